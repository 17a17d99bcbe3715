"""The fields of a unit's key that need no trace, and so no torch: a reused port imports none."""

from __future__ import annotations

import importlib.metadata

from gemma_neuron.artifacts import digest_file
from gemma_neuron.backends.base import PortPart
from gemma_neuron.backends.neuron.flags import TARGET, flags, layout_flags

SDK_PACKAGES = ("torch-neuronx", "neuronx-cc", "neuronx-distributed", "libneuronxla")
"""One release's belong together: NEFF, metaneff and interface that one made are not known to suit another's runtime."""
PACKAGES = ("torch", *SDK_PACKAGES)
LAYOUT_NAME = "layout.hlo"
"""In the decode unit: the weight layout the compiler chose. Not there when it wants none changed."""
NO_LAYOUT = "unchanged"


def versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions of what traces, compiles and runs; `none` for what is not there."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def shared_key(part: PortPart) -> dict[str, str]:
    """The fields of a unit's key that need no trace. Layout: the digest of what every weight's layout follows."""
    phase = part.unit.phase
    key = {
        "flags": layout_flags() if phase == "layout" else flags(phase),
        "target": TARGET,
        "tp": str(part.plan.tp),
        "shape": part.unit.name,
        "dtype": part.spec.dtype,
        **versions(),
    }
    if part.spec.layout:
        key["layout"] = "chosen here" if phase == "decode" else layout_digest(part)
    return key


def layout_digest(part: PortPart) -> str:
    """Digest of the committed decode unit's layout; empty while that unit is not built (a dry run)."""
    decode = part.port.unit_set(part.spec.decode_unit)
    if decode.manifest() is None:
        return ""
    path = decode.folder / LAYOUT_NAME
    return digest_file(path) if path.is_file() else NO_LAYOUT
