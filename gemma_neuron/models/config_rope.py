"""Rotary parameters out of `config.json`: per layer type, in transformers 5's form and the older flat one.

In: a ConfigReader. Out: RopeGeometry of one layer kind. Refused with the key's name: rotary forms that no
Gemma ships with, since an ignored key there is wrong only on long prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemma_neuron.errors import ConfigError
from gemma_neuron.geometry import AttentionKind, RopeGeometry, RopeKind
from gemma_neuron.models.config import (
    KIND_OF_LAYER_TYPE,
    LAYER_TYPE_OF_KIND,
    ConfigReader,
    checked_number,
)

ROPE_KINDS: dict[str, RopeKind] = {
    "default": "default", "linear": "linear", "proportional": "proportional"
}  # fmt: skip
ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"})
FORMS_HINT = "This toolkit ports the rotary forms Gemma 3 and 4 ship with."


@dataclass(frozen=True, slots=True)
class OldRopeKeys:
    """Flat keys before transformers 5: theta of a kind, and one scaling for global layers."""

    theta: str
    scaling: str = ""


def read_rope(
    read: ConfigReader, kind: AttentionKind, default: RopeGeometry, old: OldRopeKeys | None
) -> RopeGeometry:
    """Rope of one layer kind; `default` where the file says nothing. `old`: flat keys that count too."""
    name = LAYER_TYPE_OF_KIND[kind]
    table = read.value("rope_parameters")
    entry = {} if table is None else _entry(table, name, old is not None)
    where = f"rope_parameters of {name} layers"
    scaling = read.value(old.scaling) if old is not None and old.scaling else None
    if scaling is not None:
        entry = _merged(entry, scaling, where)
    if old is not None and read.value(old.theta) is not None:
        theta = read.number(old.theta)
        if entry.setdefault("rope_theta", theta) != theta:
            raise ConfigError(
                f"config.json: rope_theta is {entry['rope_theta']!r} in {where} and {theta!r} as "
                f"{old.theta}.",
                "Keep the one of the checkpoint's own config.json.",
            )
    if not entry and table is None:
        return default
    return _geometry(entry, where, default, needs_theta=old is None)


def _entry(table: Any, name: str, may_lack: bool) -> dict[str, Any]:
    """The values of one layer type, nulls left out. Raises ConfigError for any other shape of table."""
    if not isinstance(table, dict) or not table.keys() <= KIND_OF_LAYER_TYPE.keys():
        found = list(table)[:4] if isinstance(table, dict) else table
        raise ConfigError(
            f"config.json: rope_parameters has {str(found)[:80]}; an object with sliding_attention and "
            "full_attention is needed.",
            FORMS_HINT,
        )
    entry = table.get(name)
    if entry is None and not may_lack:
        raise ConfigError(f"config.json: rope_parameters lacks {name}.", FORMS_HINT)
    if entry is not None and not isinstance(entry, dict):
        raise ConfigError(f"config.json: rope_parameters of {name} is no object.", FORMS_HINT)
    return {key: value for key, value in (entry or {}).items() if value is not None}


def _merged(entry: dict[str, Any], scaling: Any, where: str) -> dict[str, Any]:
    """`rope_scaling` over what `rope_parameters` says, as transformers merges them."""
    if not isinstance(scaling, dict):
        raise ConfigError("config.json: rope_scaling is no object.", FORMS_HINT)
    more = {key: value for key, value in scaling.items() if value is not None}
    for key in sorted(more.keys() & entry.keys()):
        # transformers 5 writes `default` beside a scaling that it has not merged yet
        if entry[key] not in (more[key], "default"):
            raise ConfigError(
                f"config.json: {key} is {entry[key]!r} in {where} and {more[key]!r} in rope_scaling.",
                "Keep the one of the checkpoint's own config.json.",
            )
    return entry | more


def _geometry(
    entry: dict[str, Any], where: str, default: RopeGeometry, *, needs_theta: bool
) -> RopeGeometry:
    if needs_theta and "rope_theta" not in entry:
        raise ConfigError(f"config.json: {where} lacks rope_theta.", FORMS_HINT)
    unknown = sorted(entry.keys() - ROPE_KEYS)
    if unknown:
        raise ConfigError(
            f"config.json: {where} has {', '.join(unknown[:4])[:80]}, which this toolkit does not act on.",
            FORMS_HINT,
        )
    name = entry.get("rope_type", entry.get("type", "default"))
    if not isinstance(name, str) or name not in ROPE_KINDS or entry.get("type", name) != name:
        raise ConfigError(
            f"config.json: rope_type {str(entry.get('type', name))[:40]!r} in {where} is not one of "
            f"{', '.join(ROPE_KINDS)}.",
            FORMS_HINT,
        )
    theta, factor, fraction = (
        checked_number(f"{key} in {where}", entry.get(key, otherwise))
        for key, otherwise in (
            ("rope_theta", default.theta),
            ("factor", 1.0),
            ("partial_rotary_factor", 1.0),
        )
    )
    if (name == "default" and factor != 1.0) or (name != "proportional" and fraction != 1.0):
        raise ConfigError(
            f"config.json: {where} has factor {factor} and partial_rotary_factor {fraction}, which rope_type "
            f"{name} does not go with.",
            FORMS_HINT,
        )
    if fraction > 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor {fraction} in {where} is over 1.", FORMS_HINT
        )
    return RopeGeometry(
        kind=ROPE_KINDS[name], theta=theta, factor=factor, rotated_fraction=fraction
    )
