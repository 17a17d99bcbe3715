"""What `doctor` looks at for Inferentia2: packages, driver and runtime, devices, suspect cores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gemma_neuron.backends.base import BackendStatus, Check
from gemma_neuron.backends.neuron import cores, devices, packages

DRIVER_VERSION = Path("/sys/module/neuron/version")
BOOTSTRAP = "Run scripts/bootstrap-inf2."
REBOOT = "Stop what runs there and reboot the instance: a killed process can leave cores unusable until then."
QUERY_SECONDS = 20


def checks(status: BackendStatus) -> list[Check]:
    """On a machine without a device and without the SDK: one line that says so."""
    present = Path("/dev/neuron0").exists() or devices.tool("neuron-ls") is not None
    installed = any(v != packages.MISSING for n, v in status.facts.items() if n != "torch")
    if not present and not installed:
        return [
            Check(
                name="back end neuron",
                status="ok",
                found="no Neuron device and no Neuron SDK on this machine",
                needed="only for --backend neuron; compiling for it needs the SDK, but no device",
            )
        ]
    release = packages.release_of(status.facts)
    found = [package_check(status), *python_check(release)]
    if present:
        listed = devices.list_devices()
        health = None if listed.problem else devices.read_monitor()
        found += [driver_check(driver(), runtime(), release), device_check(listed, health)]
        if health is not None:
            found += [health_check(health)]
        found += [suspect_check(cores.held())]
    return found


def package_check(status: BackendStatus) -> Check:
    facts = ", ".join(f"{name} {version}" for name, version in status.facts.items())
    primary = packages.release("2.31.1")
    return Check(
        name="back end neuron",
        status="ok" if status.usable else "fail",
        found=facts if status.usable else f"{status.reason} ({facts})",
        needed=f"the packages of SDK {primary.name}: "
        + ", ".join(f"{name} {version}" for name, version in primary.packages.items()),
        remedy="" if status.usable else BOOTSTRAP,
    )


def python_check(
    release: packages.Release | None, python: tuple[int, int] = sys.version_info[:2]
) -> list[Check]:
    """Empty where no release is installed, or it has wheels for this Python."""
    version = ".".join(map(str, python))
    if release is None or version in release.python:
        return []
    return [
        Check(
            name="neuron python",
            status="warn",
            found=version,
            needed=f"{' or '.join(release.python)} for SDK {release.name}",
            remedy="Remove .venv and run GEMMA_NEURON_PYTHON=python3.11 scripts/bootstrap-inf2.",
        )
    ]


def driver_check(driver: str, runtime: str, release: packages.Release | None) -> Check:
    """The driver may be newer than what the packages' and the runtime's releases came with, never older; the runtime
    may be newer than the packages."""
    system = (release or packages.release("2.31.1")).system
    wanted = max(
        system["aws-neuronx-dkms"], packages.driver_of_runtime(runtime), key=packages.numbers
    )
    least = system["aws-neuronx-runtime-lib"]
    bad = [
        f"{part} {version or 'is missing'}"
        for part, version, needed in (("driver", driver, wanted), ("runtime", runtime, least))
        if not version or packages.numbers(version) < packages.numbers(needed)
    ]
    return Check(
        name="neuron driver",
        status="fail" if bad else "ok",
        found=f"driver {driver or 'not loaded'}, runtime {runtime or 'not installed'}",
        needed=f"driver {wanted} or newer, runtime {least} or newer",
        remedy=f"{BOOTSTRAP} A new driver is loaded by `modprobe -r neuron && modprobe neuron`."
        if bad
        else "",
    )


def device_check(found: devices.Devices, health: devices.Health | None = None) -> Check:
    """`health`: the monitor's report, which knows of processes, too."""
    processes = dict(health.processes if health is not None else ()) | dict(found.processes)
    busy = ", ".join(f"{pid} ({command})" for pid, command in processes.items())
    wrong = found.problem or not found.contiguous
    repair = REBOOT if found.installed else BOOTSTRAP
    state = found.problem or (
        f"{found.devices} devices, {found.cores} NeuronCores"
        + (f"; in use by {busy}" if busy else "")
        + ("" if found.contiguous else "; their numbers have a gap")
    )
    return Check(
        name="neuron devices",
        status="fail" if wrong else "warn" if busy else "ok",
        found=state,
        needed="devices without a gap and without another process",
        remedy=f"End process {busy} with TERM and wait."
        if busy and not wrong
        else repair
        if wrong
        else "",
    )


def health_check(found: devices.Health) -> Check:
    bad = [
        f"{count} {what}"
        for what, count in (
            ("uncorrected memory errors", found.uncorrected),
            ("hardware errors", found.hardware_errors),
        )
        if count
    ]
    doubtful = [
        *found.problems,
        *([f"{found.timed_out} executions timed out"] if found.timed_out else []),
        *([f"{found.runtime_errors} runtime errors"] if found.runtime_errors else []),
    ]
    return Check(
        name="neuron health",
        status="fail" if bad else "warn" if doubtful else "ok",
        found="; ".join([*bad, *doubtful])
        or f"no errors on {found.instance_type or 'this machine'}",
        needed="no uncorrected and no hardware errors",
        remedy="Replace the instance." if bad else "Look at the runtime's log." if doubtful else "",
    )


def suspect_check(held: list[cores.Held]) -> Check:
    suspect = [h for h in held if not h.alive]
    shown = ", ".join(f"{h.cores.start}-{h.cores.stop - 1} (process {h.pid})" for h in suspect)
    return Check(
        name="suspect cores",
        status="warn" if suspect else "ok",
        found=f"cores {shown} were held by a process that died without closing"
        if suspect
        else "none",
        needed="runners that ended in order",
        remedy=REBOOT if suspect else "",
    )


def driver() -> str:
    """Version of the loaded kernel module, or empty."""
    return DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.is_file() else ""


def runtime() -> str:
    """Version of the installed runtime library (Debian, then RPM), or empty."""
    for query in (
        ("dpkg-query", "-W", "-f=${Version}", "aws-neuronx-runtime-lib"),
        ("rpm", "-q", "--qf", "%{VERSION}", "aws-neuronx-runtime-lib"),
    ):
        if shutil.which(query[0]) is None:
            continue
        try:
            ran = subprocess.run(
                query,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=QUERY_SECONDS,
                check=False,
                env=os.environ | {"LC_ALL": "C"},
            )
        except (OSError, subprocess.TimeoutExpired):
            continue  # another package manager run may hold its data base
        if ran.returncode == 0 and ran.stdout.strip():
            return ran.stdout.strip()
    return ""
