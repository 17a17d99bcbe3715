"""Level 0: is the prompt one the model was trained on? Before any number is compared.

In: template, tokenizer, the rendered prompts. Bars: none of a lint's findings; template digest equal to the
one the port was made with; the template's turn end among the stop ids.
"""

from __future__ import annotations

from typing import Any

from gemma_neuron.chat import lint_prompt
from gemma_neuron.reports import LevelResult
from gemma_neuron.validation.context import LevelContext, from_problems, result
from gemma_neuron.validation.prompts import QUESTIONS, GreedyPrompt

LEVEL = 0


def run(context: LevelContext) -> LevelResult:
    """Lint every prompt; the template's part does not apply to a model without one."""
    assets, prompts = context.assets, context.prompts.greedy
    problems: list[str] = []
    linted: dict[str, list[str]] = {}
    for prompt in prompts:
        plain = context.scope == "base"
        found = lint_prompt(prompt.ids, prompt.text, assets, plain=plain) if prompt.text else []
        found += _role_problems(context, prompt)
        if found:
            linted[prompt.name] = found
    lines = list(dict.fromkeys(line for found in linted.values() for line in found))
    lines.sort(
        key=lambda line: "turn marker; this model's" not in line
    )  # what names the cause first
    problems += [*_template_problems(context, lines), *lines, *_stop_problems(context)]
    asked = [prompt for prompt in prompts if prompt.text]
    if not asked:
        problems += _unasked_problems(context)
    detail: dict[str, Any] = {
        "prompts": len(asked),
        "prompts_with_findings": len(linted),
        "template": assets.template.sha256 if assets.template else "not-applicable",
        "template_used": context.forced or "the model's own",
        "stop_token_ids": sorted(assets.stop_ids),
        "example": asked[0].text[-200:] if asked else "",
    }
    if not problems and not asked:  # nobody looked
        none = f"{context.questions.origin} has no question for scope {context.scope}"
        return result(LEVEL, "not-run", none, detail)
    passed = _passed(context, len(asked))
    if not problems and context.base_asked and assets.template is not None:
        reason = f"{passed} as plain text; --base leaves out the template's part"
        return result(LEVEL, "not-run", reason, detail)
    return from_problems(LEVEL, problems, passed, detail)


def _unasked_problems(context: LevelContext) -> list[str]:
    """Why there is no prompt, where that is a fault of the port."""
    questions = context.questions
    if context.by_name:
        return [f"no question of {questions.origin} can be rendered for scope {context.scope}"]
    if context.assets.template is None and not context.base_asked:
        return [
            f"{questions.origin} asks in conversations only, and the model has no chat template: was it left "
            "behind? (A base model is asked with --base.)"
        ]
    return []


def _passed(context: LevelContext, asked: int) -> str:
    """What was linted, and how many questions nobody will ask."""
    due = min(QUESTIONS, len(context.by_name))
    gone = due - sum(prompt.name in context.by_name for prompt in context.prompts.greedy)
    note = (
        f"; {gone} of {due} questions left out: refused by the template or too long for the context"
    )
    return f"{asked} prompts lint clean{note if gone else ''}"


def _template_problems(context: LevelContext, lines: list[str]) -> list[str]:
    own = context.assets.template
    needed = context.port.record.fingerprints.template
    if context.forced is not None:
        return [
            f"prompts were rendered with {context.forced!r}, not with the model's own chat template: "
            + (lines[0] if lines else "what follows judges that prompt, not the model")
        ]
    found = own.sha256 if own is not None else ""
    if found != needed:
        return [
            f"the chat template in the port has sha256 {found[:16] or 'none'}; the port was made with "
            f"{needed[:16] or 'none'}"
        ]
    return []


def _role_problems(context: LevelContext, prompt: GreedyPrompt) -> list[str]:
    """Every family opens a turn by its marker and a line with the role: `user` once a message of the user, and last
    of all the model's."""
    question, markers = context.by_name.get(prompt.name), context.assets.markers
    if question is None or markers is None or context.scope == "base":
        return []
    wanted = sum(turn["role"] == "user" for turn in question.turns)
    header = f"{markers.turn_open}user\n"
    found = prompt.text.count(header)
    problems = []
    if found != wanted:
        problems.append(f"{header!r} occurs {found} times, for {wanted} messages of the user")
    last = prompt.text.rpartition(markers.turn_open)[2]
    if not last.startswith("model\n"):
        problems.append(f"the last turn opened is {last[:12]!r}, not the model's")
    return problems


def _stop_problems(context: LevelContext) -> list[str]:
    """What ends a turn, and what begins a tool's answer, must stop the model."""
    assets = context.assets
    if not assets.stop_ids:
        return ["no stop id is known: neither generation_config.json nor config.json names one"]
    wanted = {"turn end": assets.turn_end}
    if assets.markers is not None and assets.template is not None:
        wanted["tool answer's begin"] = assets.markers.reply_begin(assets.template.source)
    problems = []
    for what, piece in wanted.items():
        token = None if piece is None else assets.tokenizer.id_of(piece)
        if token is not None and token not in assets.stop_ids:
            problems.append(f"the {what} {piece!r} (id {token}) is not among the stop ids")
    return problems
