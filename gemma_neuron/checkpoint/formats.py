"""Checkpoints of other kinds, refused with what to do: pickles, GGUF, adapters, quantised, remote code.

In: a source and its config, if it has one. Out: findings, empty for a plain safetensors checkpoint.
"""

from __future__ import annotations

from typing import Any

from gemma_neuron.checkpoint.source import ADAPTER_CONFIG_NAME, Source
from gemma_neuron.reports import Finding, FindingKind

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "tokenizer")


def format_findings(source: Source, config: dict[str, Any] | None) -> list[Finding]:
    """What makes this folder something else than a plain safetensors checkpoint."""
    found: list[Finding] = []

    def refuse(kind: FindingKind, message: str, file: str) -> None:
        found.append(Finding(kind=kind, severity="error", message=message, file=file))

    names = list(source.files.names())
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
    for part in ((config or {}), (config or {}).get("text_config")):
        if isinstance(part, dict):
            _config_refusals(part, refuse)
    return found


def _no_safetensors(names: list[str], refuse: Any) -> None:
    pickled = [n for n in names if n.endswith(PICKLED) and not n.startswith(NOT_WEIGHTS)]
    gguf = [n for n in names if n.endswith(".gguf")]
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
    elif ADAPTER_CONFIG_NAME not in names:
        refuse(
            "index-missing-file",
            "There are no weights: neither model.safetensors nor model.safetensors.index.json. "
            "Fetch them.",
            "model.safetensors",
        )


def _config_refusals(part: dict[str, Any], refuse: Any) -> None:
    quantised = part.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        refuse(
            "quantised",
            f"config.json has a quantization_config ({method or 'method not named'}): the tensors are "
            "packed and their scales separate. Use the bfloat16 release of the same model.",
            "config.json",
        )
    if part.get("auto_map"):
        refuse(
            "unsafe-format",
            "config.json has an auto_map: the checkpoint wants code of its own to be run "
            "(trust_remote_code). Use a checkpoint of the stock architecture, or remove auto_map if the "
            "weights are of one.",
            "config.json",
        )
