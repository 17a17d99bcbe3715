"""Named checks, one after the other: a line each on stdout, a JSON line each in a result file, a count at the end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LAST_WORDS = 800
"""Characters of a failed process's stderr that are shown: its end says why."""
Check = tuple[str, Callable[[], str]]
"""A name and what to do: the answer is what to show of a check that passed; it raises Failed."""


class Failed(Exception):
    """A check did not hold; the message says how."""


@contextmanager
def alone(results: Path, flag: str) -> Iterator[None]:
    """Hold a result file, and with it the work folder that goes with it, against a second run; that one exits with 2.

    `flag`: what names another one.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(results.with_name(results.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"error: Another run writes {results}.", file=sys.stderr)
        print(f"hint: Wait for it, or name another {flag}.", file=sys.stderr)
        sys.exit(2)
    try:
        yield
    finally:
        lock.release()


def output_of(command: Iterable[object], **options: Any) -> str:
    """What a process prints. Raises Failed with the end of its stderr when it fails. `options`: of subprocess.run."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, **options
    )
    if done.returncode != 0:
        raise Failed(done.stderr.strip()[-LAST_WORDS:] or f"exit code {done.returncode}")
    printed: str = done.stdout
    return printed


def run_checks(
    checks: Iterable[Check], results: Path, facts: Mapping[str, Any] | None = None
) -> int:
    """How many failed. Each row of `results` (appended to) has check, status, detail, seconds and `facts`."""
    failed = 0
    for name, check in checks:
        started = time.monotonic()
        try:
            status, detail = "pass", check()
        except Failed as error:
            status, detail, failed = "FAIL", str(error), failed + 1
        seconds = round(time.monotonic() - started)
        row = {**(facts or {}), "check": name, "status": status, "detail": detail}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"seconds": seconds}) + "\n")
        print(f"{status}  {name}  ({seconds} s)  {detail}", flush=True)
    print(f"{failed} failed", flush=True)
    return failed


def run_rest(checks: Iterable[Check], results: Path, facts: Mapping[str, Any]) -> int:
    """`run_checks` without those that passed before with the same facts; how many had is printed last."""
    before = passed(results, facts)
    kept = set[str]()

    def rest() -> Iterator[Check]:
        for name, check in checks:
            if name in before:
                kept.add(name)
            else:
                yield name, check

    failed = run_checks(rest(), results, facts)
    print(f"{len(kept)} had passed before", flush=True)
    return failed


def passed(results: Path, facts: Mapping[str, Any] | None = None) -> set[str]:
    """Names of the checks that passed according to a result file; of those rows alone that hold `facts`."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    rows = [row for row in map(json.loads, lines) if (facts or {}).items() <= row.items()]
    return {row["check"] for row in rows if row["status"] == "pass"}
