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
    if model_type in FAMILY_OF_MODEL_TYPE:
        return FAMILY_OF_MODEL_TYPE[model_type]
    near = difflib.get_close_matches(model_type, FAMILY_OF_MODEL_TYPE, n=1, cutoff=0.0)
    raise UnknownModelError(
        f"config.json says model_type {model_type!r}; this toolkit ports "
        f"{', '.join(sorted(FAMILY_OF_MODEL_TYPE))}.",
        f"The nearest is {near[0]!r}: check that this is the checkpoint you meant.",
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
