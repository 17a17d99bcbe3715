"""The matrix from the result lines: which level caught which fault, the score, and what token match would have said."""

from __future__ import annotations

from typing import Any

Line = dict[str, Any]
LEVELS = "0123456"
LATE_LEVELS = "3456"
BAR, BAR_LATE = 0.95, 0.90
MARKS = {"fail": "X", "pass": ".", "not-run": "-", "not-applicable": " "}


def row(line: Line) -> str:
    if "crash" in line:
        return f"{line['fault'][:54]:54} CRASH {line['crash'][:60]}"
    cells = " ".join(MARKS[line["levels"][level]] for level in LEVELS)
    tokens = "no" if line["token_match"] else "yes"
    name = line["setting"] if line["kind"] == "clean" else line["fault"]
    return f"{name[:54]:54} {cells}   {tokens:5} {line['verdict']:18} {line['seconds']:6.0f} s"


def totals(lines: list[Line]) -> int:
    """Print the matrix and the score of one model; 1 below the bars. A crash counts as not caught."""
    print(f"{'fault':54} {' '.join(LEVELS)}   token verdict")
    for line in sorted(lines, key=lambda x: (x["kind"], x["fault"], x["setting"])):
        print(row(line))
    clean = [x for x in lines if x["kind"] == "clean"]
    faulty = [x for x in lines if x["kind"] != "clean"]
    alarms = sum(x.get("verdict") != "works" for x in clean)
    caught, late = (sum(any_of(x, part) for x in faulty) for part in (LEVELS, LATE_LEVELS))
    tokens = sum("crash" not in x and not x["token_match"] for x in faulty)
    count = max(1, len(faulty))
    print(f"{len(clean)} runs without a fault, {alarms} false alarms")
    for text, found, bar in (
        ("by any level", caught, BAR),
        ("by levels 3 to 6 alone", late, BAR_LATE),
    ):
        print(f"{found} of {len(faulty)} caught {text}: {found / count:.0%} (bar {bar:.0%})")
    print(
        f"{tokens} of {len(faulty)} caught by token match on one short prompt: {tokens / count:.0%}"
    )
    for level in LEVELS:
        only = [x["fault"] for x in faulty if only_by(x, level)]
        print(f"level {level}: the only one for {len(only)}{': ' if only else ''}{'; '.join(only)}")
    return int(alarms > 0 or caught / count < BAR or late / count < BAR_LATE)


def table(lines: list[Line]) -> str:
    """Markdown: a row a fault, and for each model the levels that caught it and what token match said."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    found = {(x["fault"], x["model"]): x for x in lines if x["kind"] != "clean"}
    head = ["fault", *(text for model in models for text in (f"{model}: levels", "token match"))]
    out = [" | ".join(head), " | ".join("---" for _ in head)]
    for fault in dict.fromkeys(fault for fault, _ in found):
        cells = [fault]
        for model in models:
            line = found.get((fault, model))
            cells += ["", ""] if line is None else [_levels(line), _tokens(line)]
        out.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in out)


def any_of(line: Line, levels: str) -> bool:
    return "crash" not in line and any(line["levels"][level] == "fail" for level in levels)


def only_by(line: Line, level: str) -> bool:
    return any_of(line, level) and not any_of(line, LEVELS.replace(level, ""))


def _levels(line: Line) -> str:
    return " ".join(level for level in LEVELS if any_of(line, level)) or "none"


def _tokens(line: Line) -> str:
    return "caught" if "crash" not in line and not line["token_match"] else "passes"
