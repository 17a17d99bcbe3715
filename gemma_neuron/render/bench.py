"""`bench`: a table of its runs, and one plot of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemma_neuron.errors import EnvironmentProblem, UsageError
from gemma_neuron.render import emit_lines
from gemma_neuron.render.table import table

PLOTTED = ("png", "svg", "pdf")


def show_runs(target: str, runs: Sequence[dict[str, Any]]) -> None:
    columns = ["load", "requests", "errors", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99"]
    rows = [
        [
            load_name(run),
            run["requests"],
            run["errors"],
            *(
                _number(run[key][p])
                for key in ("ttft_ms", "tpot_ms")
                for p in ("p50", "p90", "p99")
            ),
            f"{run['tokens_per_second']:.1f}",
            _number(run["output_tokens_a_request"]),
        ]
        for run in runs
    ]
    table(f"{target}; times in ms", [*columns, "tokens/s", "tokens each"], rows)
    emit_lines(f"first error, {load_name(run)}: {run['error']}" for run in runs if run["error"])


def load_name(run: dict[str, Any]) -> str:
    return f"{run['concurrency']} at once" if run["rate"] is None else f"{run['rate']:g} a second"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def require_plot(path: Path | None) -> None:
    """Raise before anything runs: UsageError for a file of another kind, EnvironmentProblem without matplotlib."""
    if path is None:
        return
    if path.suffix.lstrip(".").lower() not in PLOTTED:
        raise UsageError(
            f"--plot {path}: its name must end in {', '.join('.' + k for k in PLOTTED)}.",
            f"For example --plot {path.stem}.svg.",
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            f"--plot needs matplotlib, which cannot be imported: {error}.",
            "pip install 'gemma-neuron[report]'",
        ) from error


def plot_runs(path: Path, target: str, runs: Sequence[dict[str, Any]]) -> None:
    """Throughput and the percentiles of both latencies, a run a bar or a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    names = [load_name(run) for run in runs]
    places = range(len(runs))
    axes[0].bar(places, [run["tokens_per_second"] for run in runs], color="#3465a4")
    axes[0].set_title("output tokens a second")
    for ax, key, title in (
        (axes[1], "ttft_ms", "time to first token, ms"),
        (axes[2], "tpot_ms", "time per output token, ms"),
    ):
        for p, marker in (("p50", "o"), ("p90", "s"), ("p99", "^")):
            values = [float("nan") if run[key][p] is None else run[key][p] for run in runs]
            ax.plot(places, values, marker=marker, label=p)
        ax.set_title(title)
        ax.legend()
    for ax in axes:
        ax.set_xticks(places, names, rotation=20)
        ax.set_ylim(bottom=0)
    figure.suptitle(target)
    figure.savefig(path)
