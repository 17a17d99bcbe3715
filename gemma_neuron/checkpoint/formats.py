"""Checkpoints of other kinds, refused with what to do: pickles, GGUF, adapters, quantised, remote code.

In: a source, its config if it has one, and its tensors. Out: findings, empty for a plain safetensors checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gemma_neuron.checkpoint.header import TensorEntry
from gemma_neuron.checkpoint.selection import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    OF_OTHER_FRAMEWORKS,
    PICKLED,
)
from gemma_neuron.checkpoint.source import Source, read_optional_json
from gemma_neuron.checkpoint.token_ids import TOKENIZER_CONFIG_NAME
from gemma_neuron.errors import ConfigError
from gemma_neuron.reports import Finding, FindingKind

NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "tokenizer", "scaler")
ADAPTER_MARKS = (".lora_A.", ".lora_B.", ".lora_embedding_", ".base_layer.", ".modules_to_save.")
QUANTISED_ENDINGS = {
    ".qweight": "GPTQ or AWQ", ".qzeros": "GPTQ or AWQ", ".g_idx": "GPTQ", ".scales": "GPTQ, AWQ or MLX",
    ".biases": "MLX", ".weight_packed": "compressed-tensors", ".weight_shape": "compressed-tensors",
    ".weight_zero_point": "compressed-tensors", ".weight_scale": "compressed-tensors or FP8",
    ".weight_scale_inv": "FP8", ".input_scale": "FP8", ".SCB": "bitsandbytes",
    ".absmax": "bitsandbytes", ".quant_map": "bitsandbytes",
    ".bitsandbytes__nf4": "bitsandbytes", ".bitsandbytes__fp4": "bitsandbytes",
    "_blocks": "MXFP4", "_scales": "MXFP4",
}  # fmt: skip
"""What the tools name a packed weight's companions, for checkpoints whose config does not say it."""
QUANTISED_DTYPES = ("F8_", "F6_", "F4")
QUANTISED_FILES = {
    "quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt",
}  # fmt: skip
UNPACKED = (
    "Use the bfloat16 release of the same model: nothing here unpacks weights, and a scale that is left out "
    "gives wrong answers without an error."
)
Refuse = Callable[[FindingKind, str, str], None]


def format_findings(source: Source, config: dict[str, Any] | None) -> list[Finding]:
    """What makes this folder something else than a plain safetensors checkpoint, by files and configs."""
    found: list[Finding] = []

    def refuse(kind: FindingKind, message: str, file: str) -> None:
        found.append(Finding(kind=kind, severity="error", message=message, file=file))

    names = source.files.names()
    if ADAPTER_CONFIG_NAME in names:
        refuse(
            "adapter",
            f"{ADAPTER_CONFIG_NAME} makes this an adapter (LoRA) folder: a change to a model, not one. "
            "Merge it into its base first (`gemma-neuron merge BASE ADAPTER --out DIR`, or peft's "
            "merge_and_unload) and give the merged folder.",
            ADAPTER_CONFIG_NAME,
        )
    if not any(name.endswith(".safetensors") and name[:8] != "adapter_" for name in names):
        _no_safetensors(names, refuse)
    whole = config or {}
    _quantised(names, whole, refuse)
    _remote_code(whole, CONFIG_NAME, refuse)
    _remote_code(_tokenizer_config(source), TOKENIZER_CONFIG_NAME, refuse)
    return found


def tensor_findings(entries: Iterable[TensorEntry]) -> Iterator[Finding]:
    """`adapter` and `quantised` by names and dtypes of tensors: at most one of each, naming the first."""
    seen: set[FindingKind] = set()
    for entry in entries:
        for kind, message in _by_tensor(entry):
            if kind not in seen:
                seen.add(kind)
                yield Finding(
                    kind=kind,
                    severity="error",
                    message=message,
                    tensor=entry.name,
                    file=entry.file.name,
                )


def _by_tensor(entry: TensorEntry) -> Iterator[tuple[FindingKind, str]]:
    if any(mark in entry.name for mark in ADAPTER_MARKS):
        yield (
            "adapter",
            f"{entry.name} belongs to an adapter (LoRA) that was saved unmerged. Merge it first "
            "(peft's merge_and_unload, then save_pretrained) and give the merged folder.",
        )
    method = next((m for end, m in QUANTISED_ENDINGS.items() if entry.name.endswith(end)), None)
    if entry.dtype.startswith(QUANTISED_DTYPES):
        method = f"dtype {entry.dtype}"
    if method is not None:
        yield "quantised", f"{entry.name} is of a quantised checkpoint ({method}). {UNPACKED}"


def _no_safetensors(names: Iterable[str], refuse: Refuse) -> None:
    pickled = [n for n in names if n.endswith(PICKLED) and not n.startswith(NOT_WEIGHTS)]
    gguf = [n for n in names if n.endswith(".gguf")]
    other = [n for n in names if n.endswith(OF_OTHER_FRAMEWORKS)]
    if pickled:
        refuse(
            "unsafe-format",
            f"The weights are pickled ({', '.join(pickled[:3])}): loading a pickle runs code from the file, "
            "so it is never done here. Convert them on a machine you can lose: load with transformers "
            "there, then save_pretrained, which writes *.safetensors.",
            pickled[0],
        )
    elif gguf:
        refuse(
            "unsafe-format",
            f"The weights are GGUF ({', '.join(gguf[:3])}), most often quantised. Use the model's "
            "safetensors release.",
            gguf[0],
        )
    elif other:
        refuse(
            "unsafe-format",
            f"The weights are of another framework ({', '.join(other[:3])}). Use the model's safetensors "
            "release, or load them with transformers and save_pretrained.",
            other[0],
        )
    elif ADAPTER_CONFIG_NAME not in names:
        refuse(
            "index-missing-file",
            "There are no weights: neither model.safetensors nor model.safetensors.index.json. "
            "Fetch them.",
            "model.safetensors",
        )


def _quantised(names: Iterable[str], config: dict[str, Any], refuse: Refuse) -> None:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "quantization", "compression_config"):
            found = part.get(key)
            if found:
                method = found.get("quant_method") if isinstance(found, dict) else None
                name = str(method or "method not named")[:40]
                refuse(
                    "quantised",
                    f"config.json has a {key} ({name}): the tensors are packed and their scales separate. "
                    f"{UNPACKED}",
                    CONFIG_NAME,
                )
                return
    for file, method in QUANTISED_FILES.items():
        if file in names:
            message = f"{file} says that the tensors are quantised ({method}). {UNPACKED}"
            refuse("quantised", message, file)
            return


def _remote_code(part: dict[str, Any], file: str, refuse: Refuse) -> None:
    text = part.get("text_config")
    if part.get("auto_map") or (isinstance(text, dict) and text.get("auto_map")):
        refuse(
            "unsafe-format",
            f"{file} has an auto_map: the checkpoint wants code of its own to be run (trust_remote_code). Use "
            "a checkpoint of the stock architecture, or remove auto_map if the weights are of one.",
            file,
        )


def _tokenizer_config(source: Source) -> dict[str, Any]:
    try:
        return read_optional_json(source, TOKENIZER_CONFIG_NAME) or {}
    except ConfigError:
        return {}  # a finding of the prompt files
