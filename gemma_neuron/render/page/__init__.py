"""`--report FILE.html`: one page that holds everything it shows, for a reader without a network.

In: a ValidationReport, or what a `tune` left (`tuning`). Out: an HTML file with style and plots inside, no script.
Needs matplotlib (extra `report`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.errors import EnvironmentProblem
from gemma_neuron.places import require_place
from gemma_neuron.render import safe

if TYPE_CHECKING:
    from gemma_neuron.reports import ValidationReport

DATA = Path(__file__).parents[2] / "data"


def require_page(path: Path) -> None:
    """Raise before anything long runs: EnvironmentProblem without matplotlib, UsageError when `path` cannot be
    written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            f"--report draws its plots with matplotlib, which cannot be imported: {error}.",
            "pip install 'gemma-neuron[report]'",
        ) from error
    require_place(path, "--report")


def write_page(report: ValidationReport, path: Path) -> None:
    """Render `report` and put it at `path`, whole or not at all."""
    from gemma_neuron.artifacts import write_atomic

    write_atomic(path, page(report).encode("utf-8"))


def page(report: ValidationReport) -> str:
    """The page's text."""
    from gemma_neuron.render.page.content import content

    return rendered("validation/report.html.jinja", content(report))


def rendered(template: str, variables: dict[str, Any]) -> str:
    """A page's text. `template`: of the package's data, an extension of page/base.html.jinja."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([DATA, DATA / "page"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(variables)


def _shown(value: Any) -> Any:
    """Text of a model or a file with control bytes spelled out; plots (Markup) as they are."""
    return safe(value) if type(value) is str else value
