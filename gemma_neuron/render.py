"""How results look: tables and progress on a terminal, one JSON document with `--json`.

Results go to stdout, progress, warnings and hints to stderr. The only importer of rich. Text that came from
files or the network is shown with control bytes escaped.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gemma_neuron.errors import GemmaNeuronError

if TYPE_CHECKING:
    from rich.console import Console

    from gemma_neuron.pipeline import PortResult
    from gemma_neuron.reports import AuditReport
    from gemma_neuron.sharding.planner import Candidate, Planned

SCHEMA_VERSION = 1
PROGRESS_SECONDS = 1.0
PIPE_WIDTH = 120


def safe(text: object) -> str:
    """Text with control characters escaped: a file's name must not move the terminal's cursor."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def emit_json(fields: dict[str, Any]) -> None:
    """The one JSON document of a command, on stdout."""
    sys.stdout.write(json.dumps({"schema": SCHEMA_VERSION, **fields}, indent=1) + "\n")
    sys.stdout.flush()


def emit_lines(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(safe(line) + "\n")
    sys.stdout.flush()


def notice(line: str) -> None:
    """One line of progress, a warning or a hint, on stderr."""
    sys.stderr.write(safe(line) + "\n")
    sys.stderr.flush()


def show_error(error: GemmaNeuronError, as_json: bool) -> None:
    """What was tried, found, needed, then the hint line; with `--json` also the document on stdout."""
    notice(f"error: {error.message}")
    if error.hint:
        notice(f"hint: {error.hint}")
    if as_json:
        emit_json({"error": error.to_json()})


class ByteProgress:
    """Bytes and rate: a moving line on a terminal, else a plain line every now and then."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self.started = self.shown = time.monotonic()
        self.live = sys.stderr.isatty()

    def __call__(self, count: int, rank: int) -> None:
        """`count` more bytes were written, for `rank`."""
        self.done += count
        now = time.monotonic()
        if now - self.shown >= (PROGRESS_SECONDS if self.live else 10 * PROGRESS_SECONDS):
            self.shown = now
            rate = self.done / max(now - self.started, 1e-9)
            text = f"{self.label}: rank {rank}, {size(self.done)} at {size(rate)}/s"
            sys.stderr.write(f"\r\x1b[K{text}" if self.live else text + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        if self.live and self.done:
            sys.stderr.write("\r\x1b[K")


class Ticker:
    """Many small steps: one moving line on a terminal, else a plain line every few seconds."""

    def __init__(self) -> None:
        self.shown, self.live = 0.0, sys.stderr.isatty()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if self.live:
            sys.stderr.write(f"\r\x1b[K{safe(line)}")
            sys.stderr.flush()
        elif now - self.shown >= 5 * PROGRESS_SECONDS:
            self.shown = now
            notice(line)

    def close(self) -> None:
        if self.live:
            sys.stderr.write("\r\x1b[K")


def size(count: float) -> str:
    """Bytes in decimal units, as storage and memory of the accelerators are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _console() -> Console:
    """Wide enough for the tables where nobody can widen the window: in a pipe or a log."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, width=width)


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: bool = True
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and i else "left")
    for row in rows:
        table.add_row(*(Text(safe(cell)) for cell in row))
    _console().print(table)


def show_audit(report: AuditReport) -> None:
    """The verdict first, then findings, the ledger's counts and the buffers."""
    counts = report.tensors
    lines = [
        f"{report.verdict}: {len(report.errors)} errors, {len(report.warnings)} warnings",
        *(f"{f.severity}: {f.kind}: {f.message}" for f in report.findings),
        f"tensors: {counts.used} used, {counts.tied} tied, {counts.derived} derived, "
        f"{counts.skipped} skipped, {counts.unexplained} unexplained",
        *(f"skipped by rule {rule}: {n}" for rule, n in report.skipped_by_rule.items()),
        f"chat template: {_template_line(report.chat_template)}",
        f"stop token ids: {', '.join(map(str, report.stop_token_ids)) or 'none'}",
    ]
    emit_lines(lines)
    if report.buffers:
        rows = [
            (b.tensor, "x".join(map(str, b.shape)), b.dtype, f"{b.min:.6g}", f"{b.max:.6g}")
            for b in report.buffers
        ]
        _table("persistent buffers", ("tensor", "shape", "dtype", "min", "max"), rows)


def _template_line(template: dict[str, Any]) -> str:
    return f"{template['source']}, sha256 {template['sha256']}" if template["present"] else "none"


def show_plan(planned: Planned) -> None:
    """What was chosen and why, the candidates side by side, then one row a kind of layer."""
    chosen, instance = planned.chosen, planned.instance
    emit_lines(
        [
            f"{chosen.plan.strategy} at tp {chosen.plan.tp} on {instance.name}: "
            f"{size(chosen.bytes.total)} a core of {instance.hbm_gib_per_core} GiB",
            *(f"because {reason}" for reason in chosen.reasons),
        ]
    )
    columns = ("strategy", "fits", "weights/rank", "KV/rank", "scratch", "total", "bound tok/s")
    _table(
        f"candidates, {planned.slots} slots of {planned.context}, {planned.dtype}",
        columns,
        [_candidate_row(c) for c in planned.candidates],
    )
    groups: dict[tuple[object, ...], int] = {}
    for layer in chosen.plan.layers:
        key = (
            layer.kind,
            layer.placement,
            layer.query_heads_per_rank,
            layer.kv_heads_per_rank,
            layer.head_dim,
        )
        groups[key] = groups.get(key, 0) + 1
    _table(
        "layers",
        ("kind", "layers", "attention", "query heads/rank", "KV heads/rank", "head_dim"),
        [(key[0], count, *key[1:]) for key, count in groups.items()],
    )
    if planned.idle_cores:
        emit_lines(
            [f"{planned.idle_cores} of {instance.cores} cores stay idle at tp {chosen.plan.tp}"]
        )


def _candidate_row(candidate: Candidate) -> tuple[object, ...]:
    used = candidate.bytes
    return (
        candidate.plan.strategy,
        "yes" if candidate.fits else "no",
        size(used.weights),
        size(used.kv),
        size(used.scratch),
        size(used.total),
        f"{candidate.bound_tokens_per_second:.1f}",
    )


def show_port(result: PortResult, verb: str) -> None:
    """One line of what was done, one with the digest."""
    emit_lines(
        [
            f"{verb} {result.port}: {result.built} of {result.total} units built, {result.reused} reused, "
            f"{result.seconds:.1f} s, peak host memory {size(result.host_peak_bytes)}",
            f"digest {result.digest}",
        ]
    )


def show_checks(checks: Sequence[dict[str, str]]) -> None:
    """`doctor`: one row a check, then the remedies."""
    _table(
        "",
        ("check", "status", "found", "needed"),
        [(c["name"], c["status"], c["found"], c["needed"]) for c in checks],
        numbers=False,
    )
    emit_lines(f"{c['name']}: {c['remedy']}" for c in checks if c["status"] != "ok" and c["remedy"])
