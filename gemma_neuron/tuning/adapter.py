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
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from annotated_types import Gt
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

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
HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode "
    "layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core peft_version "
    "qalora_group_size revision runtime_config target_modules task_type".split()
)
"""Fields that say how an adapter was trained or where it sits; its tensors and the fields below say the rest."""
PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""First factors that leave the base as it was. pissa, olora, corda, loftq and others change it, and peft changes it
again whenever it loads the adapter: added to the base as it is, such factors give another model."""
QUANTIFIER = re.compile(r"[*+{]|(?<!\()\?")
Number = TypeVar("Number", int, float)


def _module_pattern(text: str) -> str:
    """A regular expression that an adapter brings: one that compiles and cannot run for ever."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    plain = re.sub(r"\\.", "x", text)
    too_many = len(QUANTIFIER.findall(plain)) > 2 or plain.count("|") > 8
    if too_many or re.search(r"\)\s*[*+?{]", plain) or len(text) > 512:
        raise ValueError(f"{text[:80]!r} repeats too much to be matched in a bounded time")
    return text


ModulePattern = Annotated[str, AfterValidator(_module_pattern)]


class AdapterError(CheckpointError):
    """The adapter cannot be merged into this checkpoint."""


class AdapterConfig(BaseModel):
    """The fields of peft's LoraConfig that decide what a merge computes. Of the others, see `unknown`."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    peft_type: Literal["LORA"]
    r: Annotated[int, Gt(0)]
    lora_alpha: Annotated[float, Gt(0)]
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[ModulePattern, Annotated[int, Gt(0)]] = {}
    alpha_pattern: dict[ModulePattern, float] = {}

    def rank(self, module: str) -> int:
        return _of_module(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What B·A is multiplied by: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA."""
        rank = self.rank(module)
        alpha = _of_module(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def unknown(self) -> list[str]:
        """What is set and makes an adapter, or might make it, something else than a sum of low-rank products."""
        found = [name for name, value in (self.model_extra or {}).items() if value]
        found = [name for name in found if name not in HARMLESS]
        if self.bias != "none":
            found.append(f"bias {self.bias}")
        if isinstance(self.init_lora_weights, str) and self.init_lora_weights not in PLAIN_STARTS:
            found.append(f"init_lora_weights {self.init_lora_weights}")
        return found


def _of_module(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first key that names this module, as peft has it: a regular expression for its end."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """W becomes W + scale · B·A. `a`: [rank, in], `b`: [out, rank], float32, finite."""

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
        module = sides.setdefault(matched["module"], {})
        if matched["side"] in module:
            raise AdapterError(
                f"{folder.name} holds {module[matched['side']][0]} and {name}: two adapters in one.",
                "Save each adapter into a folder of its own.",
            )
        module[matched["side"]] = (name, _finite(folder, name, tensor))
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
    pickled = folder / WEIGHTS_NAME.replace(".safetensors", ".bin")
    if pickled.is_file() and not (folder / WEIGHTS_NAME).exists():
        raise AdapterError(
            f"{folder} has {pickled.name}, a pickle, which can run any code when it is read; {WEIGHTS_NAME} is needed.",
            "Save it with peft's save_pretrained(safe_serialization=True).",
        )
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
    if unknown := config.unknown():
        raise AdapterError(
            f"{path} has {', '.join(unknown)}: such an adapter need not be a sum of low-rank products on its base.",
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


def _finite(folder: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A factor in float32. Raises AdapterError, by name, for one that is no number somewhere, or no float."""
    import torch

    value = tensor.to(torch.float32) if tensor.is_floating_point() else None
    if value is None or not bool(torch.isfinite(value).all()):
        what = f"is {tensor.dtype}" if value is None else "has values that are NaN or infinite"
        raise AdapterError(
            f"{folder.name}: {name} {what}; finite floating-point numbers are needed.",
            "The training diverged, or the file was damaged: train or save the adapter again.",
        )
    return value


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
    (a_name, a), (_, b) = pair["A"], pair["B"]
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
    if a.shape[0] != config.rank(plain):
        raise AdapterError(
            f"{folder.name}: {a_name} has rank {a.shape[0]}; {CONFIG_NAME} says {config.rank(plain)}, and the scale "
            "depends on it.",
            f"Take the {CONFIG_NAME} that was saved with these weights.",
        )
    return Factors(name=name or f"{plain}.weight", a=a, b=b, scale=config.scale(plain))
