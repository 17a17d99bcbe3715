"""The texts by which each Gemma family marks turns, thoughts and tool answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyMarkers:
    """How a family marks turns. Ids 105 and 106 mean different text in Gemma 3 and 4: compare text."""

    family: str
    turn_open: str
    turn_end: str
    think: str | None = None
    """Asks for thinking when it stands in the prompt."""
    thought_open: str | None = None
    thought_close: str | None = None
    reply_open: str | None = None
    """Begins a tool's answer: where the model writes it, it has called a tool and waits (Gemma 4's generation_config
    lists its id among the stop ids)."""
    reply_close: str | None = None
    """Ends a tool's answer; after it the model goes on without a new turn."""
    call_open: str | None = None
    call_close: str | None = None
    """Around a tool call, in the notation that `serving/notation.py` reads."""
    quote: str | None = None

    def reply_begin(self, template: str) -> str | None:
        """What begins a tool's answer in a template that writes one: the model must stop there."""
        return self.reply_open if self.reply_open and self.reply_open in template else None


FAMILIES = (
    FamilyMarkers(
        family="Gemma 4",
        turn_open="<|turn>",
        turn_end="<turn|>",
        think="<|think|>",
        thought_open="<|channel>",
        thought_close="<channel|>",
        reply_open="<|tool_response>",
        reply_close="<tool_response|>",
        call_open="<|tool_call>",
        call_close="<tool_call|>",
        quote='<|"|>',
    ),
    FamilyMarkers(family="Gemma 3", turn_open="<start_of_turn>", turn_end="<end_of_turn>"),
)
