"""From levels to a verdict.

`differs`: the port is not the reference (levels 1, 3, 4 or 5 fail). `matches-but-broken`: it is, and what it
equals fails on its own (levels 0, 2 or 6). `insufficient`: a required level was not run. `works`: all passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemma_neuron.reports import LevelResult, Scope, Verdict

COMPARING = frozenset({1, 3, 4, 5})
JUDGING = frozenset({0, 2, 6})
MATCHING = frozenset({3, 5})
"""One of these passing is what "matches" means."""
REQUIRED = frozenset(range(7))


def verdict(levels: Sequence[LevelResult]) -> Verdict:
    """The verdict of levels 0 to 6; level 7 is extra and only reported."""
    status = {item.level: item.status for item in levels}
    failed = {level for level in REQUIRED if status.get(level) == "fail"}
    if failed & COMPARING:
        return "differs"
    if failed & JUDGING and any(status.get(level) == "pass" for level in MATCHING):
        return "matches-but-broken"
    missing = [n for n in REQUIRED if status.get(n, "not-run") == "not-run"]
    if missing or failed:
        return "insufficient"
    return "works"


def scope(has_template: bool, base_asked: bool) -> Scope:
    """What was judged: a conversation, or plain completion."""
    return "chat" if has_template and not base_asked else "base"
