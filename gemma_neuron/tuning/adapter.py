"""A LoRA adapter folder as peft writes it, read strictly: what cannot be merged exactly is refused by name.

In: a folder with adapter_config.json and adapter_model.safetensors. Out: `Adapter`, one pair of factors per
changed weight. Names in an adapter are module paths of whatever class it was trained on; behind peft's
wrappers they are a checkpoint's, and the parameter table knows those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt
from pydantic import BaseModel, ConfigDict, ValidationError

from gemma_neuron.errors import CheckpointError
from gemma_neuron.parameters import ParameterTable

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_LIMIT = 4 * 1024 * 1024
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[\w-]+)?\.weight")
TABLES = ("embed_tokens", "lm_head")
WRAPPERS = "base_model.model."
"""What peft puts before a module's path."""


class AdapterError(CheckpointError):
    """The adapter cannot be merged into this checkpoint."""


class AdapterConfig(BaseModel):
    """The fields of peft's LoraConfig that decide what a merge computes; others do not change it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peft_type: Literal["LORA"]
    r: Annotated[int, Gt(0)]
    lora_alpha: Annotated[float, Gt(0)]
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    trainable_token_indices: Any = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    def scale(self, module: str, rank: int) -> float:
        """What B·A is multiplied by: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA."""
        alpha = next(
            (value for key, value in self.alpha_pattern.items() if _matches(key, module)),
            self.lora_alpha,
        )
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matches(pattern: str, module: str) -> bool:
    """Whether a key of a pattern names this module, as peft has it: a regular expression for its end."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """W becomes W + scale · B·A. `a`: [rank, in], `b`: [out, rank], in the adapter's dtype."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """Our name of each changed weight → its factors."""

    config: AdapterConfig
    factors: Mapping[str, Factors]


def read_adapter(folder: Path, table: ParameterTable) -> Adapter:
    """`table`: of the base, for the names. Raises AdapterError for what is no mergeable LoRA adapter."""
    config = _read_config(folder)
    sides: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, tensor in _tensors(folder / WEIGHTS_NAME):
        if any(table_name in name for table_name in TABLES):
            raise AdapterError(
                f"{folder.name} changes {name}: Gemma ties its table to the head, and a merge would change "
                "both.",
                "Train without embed_tokens and lm_head among the target modules.",
            )
        matched = FACTOR.fullmatch(name)
        if matched is None:
            raise AdapterError(
                f"{folder.name}: {name} is no lora_A or lora_B of a linear layer.", _hint(name)
            )
        sides.setdefault(matched["module"], {})[matched["side"]] = (name, tensor)
    factors = [_factors(folder, config, table, module, pair) for module, pair in sides.items()]
    if not factors:
        raise AdapterError(f"{folder / WEIGHTS_NAME} holds no tensors.", "Train the adapter first.")
    by_name = {each.name: each for each in factors}
    if len(by_name) < len(factors):
        raise AdapterError(
            f"{folder.name}: two modules are both one weight of the text model.",
            "Train it on the text model alone.",
        )
    return Adapter(config, by_name)


def _read_config(folder: Path) -> AdapterConfig:
    path = folder / CONFIG_NAME
    if not path.is_file() or not (folder / WEIGHTS_NAME).is_file():
        raise AdapterError(
            f"{folder} is no adapter: {CONFIG_NAME} and {WEIGHTS_NAME} are needed.",
            "Name the folder that `gemma-neuron tune` or peft's save_pretrained wrote.",
        )
    if path.stat().st_size > CONFIG_LIMIT:
        raise AdapterError(f"{path} has more than {CONFIG_LIMIT:,} bytes.", "Is it an adapter's?")
    try:
        config = AdapterConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise AdapterError(
            f"{path}: {'.'.join(map(str, first['loc'])) or 'text'}: {first['msg']}.",
            "Only LoRA adapters are merged.",
        ) from error
    refused = {
        "use_dora": config.use_dora,
        "fan_in_fan_out": config.fan_in_fan_out,
        "lora_bias": config.lora_bias,
        f"bias {config.bias}": config.bias != "none",
        f"modules_to_save {config.modules_to_save}": bool(config.modules_to_save),
        "trainable_token_indices": bool(config.trainable_token_indices),
    }
    for what, is_set in refused.items():
        if is_set:
            raise AdapterError(
                f"{path} has {what}: such an adapter is more than a sum of low-rank products.",
                "Train plain LoRA, or merge it with peft and check the result with `inspect`.",
            )
    return config


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise AdapterError(f"{path}: {error}.", "Save the adapter again.") from error


def _hint(name: str) -> str:
    if "magnitude" in name:
        return "That is DoRA; train plain LoRA."
    return "Train plain LoRA on the projections."


def _factors(
    folder: Path,
    config: AdapterConfig,
    table: ParameterTable,
    module: str,
    pair: dict[str, tuple[str, torch.Tensor]],
) -> Factors:
    if set(pair) != {"A", "B"}:
        have = next(iter(pair.values()))[0]
        raise AdapterError(f"{folder.name}: {have} has no partner.", "Save the adapter again.")
    a, b = pair["A"][1], pair["B"][1]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"{folder.name}: {module} has A {list(a.shape)} and B {list(b.shape)}; their ranks differ.",
            "Save the adapter again.",
        )
    plain = module.removeprefix(WRAPPERS)
    rule, name = table.skip_rule(f"{plain}.weight"), table.local_name(f"{plain}.weight")
    if rule is not None:
        raise AdapterError(
            f"{folder.name} changes {plain}, which is no part of the text model ({rule}).",
            "Train it on the language model's layers alone.",
        )
    scale = config.scale(plain, int(a.shape[0]))
    return Factors(name=name or f"{plain}.weight", a=a, b=b, scale=scale)
