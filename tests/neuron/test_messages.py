"""What compiler and runtime say, in words like theirs, each leads to a class, an exit code and a remedy."""

from __future__ import annotations

import re
import time

import pytest

from gemma_neuron.backends.neuron.diagnose import OUT_OF_HOST_MEMORY, diagnose, explained
from gemma_neuron.errors import CompileError, EnvironmentProblem

MESSAGES = [
    ("[F137] neuronx-cc was forcibly killed - low system memory", "out of host memory", 6),
    ("Command '[neuronx-cc, compile]' died with <Signals.SIGKILL: 9>", "out of host memory", 6),
    ("neuronx-cc compile returned non-zero exit status -9:", "out of host memory", 6),
    ("terminate called after throwing an instance of 'std::bad_alloc'", "out of host memory", 6),
    ("[F134] neuronx-cc terminated abnormally", "compiler aborted", 6),
    ("neuronx-cc compile returned non-zero exit status -11:", "compiler aborted", 6),
    ("Subcommand ended: exited status: 139", "compiler aborted", 6),
    ("Command ['walrus'] died with <Signals.SIGBUS: 7>.", "compiler aborted", 6),
    ("ERROR: [NCC_EBVF030] 5,240,113 instructions generated", "too many instructions", 6),
    ("[NCC_EXTP004] graph is too large for the target", "too many instructions", 6),
    ("[NCC_EOOM001] tensors need 17.2 GB, 16 GB present", "out of device memory at compile", 6),
    ("[NCC_EVRF009] total of tensors exceeds HBM", "out of device memory at compile", 6),
    ("[NCC_INLA001] 524288 bytes needed against 196608 per partition", "SBUF overflow", 6),
    ("Allocation in SBUF exceeds what is there", "SBUF overflow", 6),
    ("[NCC_INLA001] unhandled exception in layout analysis", "internal layout error", 6),
    ("[NCC_EMOD025] shape of parameter 3 is not known", "dynamic shape", 6),
    ("[NCC_EVRF001] Operator sort is unknown", "unsupported operator", 6),
    ("The operator 'erf_inv' is not supported by this target", "unsupported operator", 6),
    ("[NCC_EVRF004] complex64 found", "unsupported type", 6),
    ("[NCC_EVRF051] f8e4m3fn on an older core", "unsupported type", 6),
    ("[NCC_EVRF035] integer dot product", "integer arithmetic unsupported", 6),
    ("[NCC_EVRF031] scatter iota beyond its operand", "index range", 6),
    ("[NCC_ESFH002] uint64 constant too large", "64-bit constant", 6),
    ("[NCC_EVRF059] kernel file is gone", "kernel mismatch", 6),
    ("[NCC_EARG001] lnc must be 1 for this target", "bad compiler argument", 6),
    ("neuronx-cc: error: unrecognized arguments: --fast", "bad compiler argument", 6),
    ("[NCC_EVRF023] verification refused the module", "operator rejected by verification", 6),
    ("[NCC_ITEN404] Internal tensorizer error", "internal compiler error", 6),
    ("TEN404 please report", "internal compiler error", 6),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'neuronx-cc'", "compiler missing", 8),
    ("TypeError: 'NoneType' object is not callable", "SDK too old for layout optimisation", 8),
    ("OSError: [Errno 28] No space left on device", "disk full", 8),
    ("NRT: NeuronCore(s) not available - Requested:8 Available:4", "cores busy or absent", 8),
    ("nrt_load failed with status 1005 NRT_EXEC_NC_BUSY", "cores busy or absent", 8),
    ("TDRV: Could not open the nd0", "no device", 8),
    ("This runtime requires Neuron Driver version 2.29 or newer", "driver too old", 8),
    ("NEFF version mismatch supported: 2 received: 3", "NEFF of another release or chip", 8),
    ("status NRT_FAIL_HOST_MEM_ALLOC", "host memory at load", 8),
    ("Failed to allocate 1073741824 bytes on HBM", "out of device memory", 8),
    ("nrt_execute: execution timeout after 600 s (NRT_TIMEOUT)", "execution timeout", 8),
    ("NRT_EXEC_HW_ERR_COLLECTIVES on rank 3", "collective stuck", 8),
    ("NRT_EXEC_HW_ERR_HBM_UE at nd4", "memory error of the hardware", 8),
    ("NRT_EXEC_UNIT_UNRECOVERABLE", "core unrecoverable", 8),
    ("nrt_execute status=1006 NRT_EXEC_OOB", "index out of bounds on the device", 8),
    ("NRT 1006 in nrt_execute on nc3", "index out of bounds on the device", 8),
    ("nrt_execute failed, status: 1201", "memory error of the hardware", 8),
    ("DGE out-of-bounds in gather", "index out of bounds on the device", 8),
    ("NRT_EXEC_COMPLETED_WITH_NUM_ERR", "not a number", 8),
    ("NRT_EXEC_BAD_INPUT: shape of input0", "bad input", 8),
    ("Model not initialized. Call set_weights() first", "runtime not initialised", 8),
    ("NRT_FAILURE in nrt_init", "cores left by a killed process", 8),
    ("RuntimeError: PytorchStreamReader failed reading zip archive", "truncated archive", 5),
]


@pytest.mark.parametrize(("text", "kind", "code"), MESSAGES, ids=[m[0][:40] for m in MESSAGES])
@pytest.mark.fault("orig-07-not-initialized-reload")
@pytest.mark.fault("orig-09-sigkill-bad-cores")
@pytest.mark.fault("orig-18-softcap-sbuf")
@pytest.mark.fault("nxdi-11-e2b-compiler")
@pytest.mark.fault("cc-02-f137b")
@pytest.mark.fault("cc-09-ten404")
def test_a_message_has_a_class_an_exit_code_and_a_remedy(text: str, kind: str, code: int) -> None:
    log = f"2026-01-01 INFO started\n{text}\n2026-01-01 INFO ended\n"
    found = diagnose(log)
    assert found is not None
    assert (found.kind, found.exit_code, found.shown) == (kind, code, text)
    error = explained("It failed", log, CompileError, "")
    assert error.exit_code == code and error.hint == found.hint
    assert re.search(r"[a-z]{4}", found.hint)


def test_faults_of_the_compiler_or_of_the_moment_are_tried_again_and_no_others() -> None:
    """Memory is of the moment: what else ran took some of it."""
    tried = {kind for text, kind, _ in MESSAGES if (d := diagnose(text)) is not None and d.retry}
    of_the_compiler = {"compiler aborted", "internal layout error", "internal compiler error"}
    assert tried == of_the_compiler | {OUT_OF_HOST_MEMORY}


def test_a_full_disk_is_told_before_what_it_led_to() -> None:
    text = "OSError: [Errno 28] No space left on device\nINTERNAL_ERROR: Backend exited with code 1"
    found = diagnose(text)
    assert found is not None and found.kind == "disk full" and not found.retry


@pytest.mark.parametrize("first", [True, False], ids=["at its start", "at its end"])
def test_a_hundred_megabytes_of_output_are_read_at_both_ends_only(first: bool) -> None:
    """All of it took minutes, in which the worker's other threads stood still."""
    flood, telling = "ERROR: tile 17 is spilled\n" * 4_000_000, "[F137] forcibly killed\n"
    started = time.process_time()
    found = diagnose(telling + flood if first else flood + telling)
    assert found is not None and found.kind == OUT_OF_HOST_MEMORY
    assert time.process_time() - started < 30


UNKNOWN = (
    "the flux capacitor is unhappy: code 17",
    "cannot write MODULE_9cf137a01f134b00/model.neff",
    "2026-01-01T10:00:00Z WARNING 4711 [Tiling]: operator sort is not supported there, going on\n"
    "2026-01-01 10:00:01.123 4711 INFO  ||NCC||: dynamic dimension: none; SBUF not enough, spilling\n"
    "neuronx-cc: the flux capacitor is unhappy",
)
"""Of a kind not known here, among what looks like known ones: digits of a digest, and what a log copes with."""


@pytest.mark.parametrize("text", UNKNOWN)
@pytest.mark.fault("nxdi-11-e2b-compiler")
def test_an_unknown_message_is_shown_as_it_is_and_never_classified(text: str) -> None:
    assert diagnose(text) is None
    error = explained("The runtime failed", text, EnvironmentProblem, "")
    assert error.message == f"The runtime failed: {text}" and error.exit_code == 8
