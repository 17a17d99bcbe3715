"""`model_type` of a config.json → family; families are imported late, torch only for model code."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from gemma_neuron.errors import ConfigError, UnknownModelError

if TYPE_CHECKING:
    from gemma_neuron.geometry import ModelGeometry
    from gemma_neuron.parameters import ParameterTable

FAMILY_OF_MODEL_TYPE = {
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
}


def family_of(config: dict[str, Any]) -> str:
    """Family key of a parsed config.json. Raises UnknownModelError with the nearest name."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(
            "config.json has no model_type.",
            "Point at the folder with the model's own config.json.",
        )
    family = FAMILY_OF_MODEL_TYPE.get(model_type)
    if family is not None:
        _require_same_family(model_type, family, config.get("text_config"))
        return family
    near = difflib.get_close_matches(model_type, FAMILY_OF_MODEL_TYPE, n=1, cutoff=0.0)
    raise UnknownModelError(
        f"config.json says model_type {model_type!r}; this toolkit ports "
        f"{', '.join(sorted(FAMILY_OF_MODEL_TYPE))}.",
        f"The nearest is {near[0]!r}: check that this is the checkpoint you meant.",
    )


def _require_same_family(model_type: str, family: str, text: object) -> None:
    inner = text.get("model_type") if isinstance(text, dict) else None
    if inner is not None and FAMILY_OF_MODEL_TYPE.get(str(inner)) != family:
        raise ConfigError(
            f"config.json is of model_type {model_type!r}, but its text_config of {str(inner)[:60]!r}.",
            "Fetch the checkpoint's own config.json.",
        )


def read_geometry(config: dict[str, Any]) -> ModelGeometry:
    """Geometry of any supported config.json. Raises UnknownModelError or ConfigError."""
    module = importlib.import_module(f"gemma_neuron.models.{family_of(config)}.geometry")
    result: ModelGeometry = module.geometry(config)
    return result


def read_parameter_table(geometry: ModelGeometry) -> ParameterTable:
    """Every tensor a geometry's model must have."""
    module = importlib.import_module(f"gemma_neuron.models.{geometry.family}.weights")
    table: ParameterTable = module.parameter_table(geometry)
    return table


def read_config_notes(config: dict[str, Any]) -> tuple[str, ...]:
    """What of a config.json that has a geometry is not acted on, as sentences naming the keys."""
    from gemma_neuron.models.config_notes import config_notes

    return config_notes(config, family_of(config))
