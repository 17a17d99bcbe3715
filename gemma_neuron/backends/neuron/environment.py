"""Every environment variable the neuron back end sets or removes, in one place, before the SDK is imported."""

from __future__ import annotations

import logging
import os

from gemma_neuron.backends.neuron.flags import LOGICAL_CORES, TARGET

log = logging.getLogger(__name__)

EXECUTION_TIMEOUT_SECONDS = 600
"""The documentation gives two defaults, 2 and 30 seconds; a long prefill may take longer than either."""

REFUSED = (
    "NEURON_CC_FLAGS",
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_32BIT_LONG",
    "XLA_NO_SPECIAL_SCALARS",
    "XLA_HANDLE_SPECIAL_SCALAR",
    "NXD_CPU_MODE",
    "NEURON_EXPERIMENTAL_COMPRESS_RG",
    "LOCAL_WORLD_SIZE",
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VIRTUAL_CORE_SIZE",
    "NEURON_RT_ROOT_COMM_ID",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN",
    "NEURON_RT_STOCHASTIC_ROUNDING_SEED",
)
"""What would change a graph, a compile, the choice of cores or a port's numbers without standing in a key or a plan, or
let the runtime wait for other machines."""


def for_compiling() -> None:
    """Trace and compile for Inferentia2 whatever the host is: no device is needed."""
    _clear()
    _set(
        {"NEURON_PLATFORM_TARGET_OVERRIDE": TARGET, "NEURON_LOGICAL_NC_CONFIG": str(LOGICAL_CORES)}
    )


def for_running(cores: range, tag: str) -> None:
    """Claim a contiguous range of NeuronCores: the default is to seize every core there is."""
    _clear()
    _set(
        {
            "NEURON_LOGICAL_NC_CONFIG": str(LOGICAL_CORES),
            "NEURON_RT_VISIBLE_CORES": f"{cores.start}-{cores.stop - 1}",
            "NEURON_RT_EXEC_TIMEOUT": str(EXECUTION_TIMEOUT_SECONDS),
            "NEURON_PROCESS_TAG": tag,
        }
    )


def _clear() -> None:
    for name in REFUSED:
        if os.environ.pop(name, None) is not None:
            log.warning(
                "%s was set; it is ignored, as it would not be part of any unit's key", name
            )


def _set(values: dict[str, str]) -> None:
    for name, value in values.items():
        before = os.environ.get(name, value)
        if before != value:
            log.warning("%s was %s; it is %s from here on", name, before, value)
    os.environ.update(values)
    os.environ.setdefault("NXD_LOG_LEVEL", "warning")
    log.info("neuron environment: %s", " ".join(f"{k}={v}" for k, v in values.items()))
