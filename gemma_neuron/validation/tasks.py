"""lm-eval over a server's completions API: tasks of the package (data/validation/tasks) and any stock task by name.

In: a running server's URL, the folder with its tokenizer, task names. Out: figures by task, as lm-eval names them.
Refused before anything runs: lm-eval not installed (EnvironmentProblem), a name that is no task (UsageError). The only
importer of lm_eval.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gemma_neuron.errors import EnvironmentProblem, UsageError

FOLDER = Path(__file__).parent.parent / "data" / "validation" / "tasks"
TIMEOUT_SECONDS = 600
TaskFigures = dict[str, dict[str, float]]
"""Task → metric → value; a task's `samples` is how many it was asked."""


def own_tasks() -> tuple[str, ...]:
    """Names of the package's tasks."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def require_tasks(names: Sequence[str]) -> None:
    """Raise EnvironmentProblem without lm-eval, UsageError for a name it does not know and we do not have."""
    manager = _manager()
    known = {*own_tasks(), *manager.all_tasks}
    for name in names:
        if name not in known:
            raise UsageError(
                f"--tasks: there is no task {name!r}; the package has {', '.join(own_tasks())}, and lm-eval "
                f"{len(manager.all_tasks)} more.",
                "lm-eval ls tasks lists them.",
            )


def run_tasks(
    url: str,
    tokenizer: Path,
    names: Sequence[str],
    *,
    chat: bool,
    max_context: int,
    limit: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TaskFigures:
    """Ask the server at `url`. `chat`: prompts are put into the model's template; else BOS goes before them. `limit`:
    the first so many of each task. Raises EnvironmentProblem when a task cannot be loaded or the server fails."""
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="gemma-neuron",
        tokenizer=str(tokenizer),
        tokenizer_backend="huggingface",
        add_bos_token=not chat,
        max_length=max_context,
        timeout=TIMEOUT_SECONDS,
    )
    own = own_tasks()
    progress(f"lm-eval: {', '.join(names)}")
    try:
        found = simple_evaluate(
            model=model,
            tasks=[_own(name) if name in own else name for name in names],
            task_manager=_manager(),
            limit=limit,
            apply_chat_template=chat,
            bootstrap_iters=0,
            log_samples=False,
        )
    except Exception as error:  # whatever a task's loader, its metric or the client raises
        raise EnvironmentProblem(
            f"lm-eval stopped: {type(error).__name__}: {error}.",
            "A stock task loads its questions from the hub; the package's own need none.",
        ) from error
    return _figures(found)


def _manager() -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EnvironmentProblem(
            f"--tasks asks lm-eval, which cannot be imported: {error}.",
            "pip install 'gemma-neuron[eval]'",
        ) from error
    return TaskManager()


def _own(name: str) -> dict[str, Any]:
    """A task of the package as lm-eval takes it: its YAML, and its rows without a download or a cache."""
    import yaml
    from datasets import Dataset

    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {**config, "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)}}


def _figures(found: dict[str, Any]) -> TaskFigures:
    """lm-eval's results without aliases and standard errors; its `acc,none` is our `acc`."""
    counts = found["n-samples"]
    out: TaskFigures = {}
    for task, values in found["results"].items():
        kept = {
            key.removesuffix(",none"): round(float(value), 4)
            for key, value in values.items()
            if isinstance(value, int | float) and "_stderr" not in key and "," in key
        }
        out[task] = {**kept, "samples": counts.get(task, {}).get("effective", 0)}
    return out
