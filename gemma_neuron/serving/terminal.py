"""`chat` in a terminal: history, streaming, slash commands, over a port in this process or a URL.

Answers go to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from gemma_neuron import interrupts
from gemma_neuron.errors import GemmaNeuronError, UsageError
from gemma_neuron.serving.screen import Cleaner, clean
from gemma_neuron.serving.talkers import LocalTalker, Message, Talker, UrlTalker

if TYPE_CHECKING:
    from gemma_neuron.port import Port
    from gemma_neuron.serving.engine import RunnerFactory

HELP = """/help            this text
/clear           forget the conversation
/system [TEXT]   set the system prompt (without TEXT: remove it) and forget the conversation
/retry           answer the last question again
/history         show the conversation
/quit            leave (also Ctrl-D)"""


def run_chat(
    port_or_url: Port | str,
    runner_factory: RunnerFactory | None = None,
    *,
    once: str | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    enable_thinking: bool = False,
) -> None:
    """Chat with a port (needs `runner_factory`) or a server at an http(s) URL.

    `once`: print the answer to this one text and return; greedy unless `temperature` is given, because a
    script wants the same answer each time. An unvalidated port is named as such on stderr.
    """
    with ExitStack() as stack:
        talker: Talker
        if isinstance(port_or_url, str):
            talker = UrlTalker(port_or_url)
        else:
            if runner_factory is None:
                raise UsageError("A port needs a way to load it.")
            talker = LocalTalker(port_or_url, runner_factory)
        stack.callback(talker.close)
        talker.max_tokens = max_tokens
        talker.temperature = 0.0 if temperature is None and once is not None else temperature
        talker.enable_thinking = enable_thinking
        if talker.note:
            print(talker.note, file=sys.stderr)
        loop = ChatLoop(talker, system=system)
        if once is not None:
            loop.say(once)
            return
        loop.run()


@dataclass
class ChatLoop:
    """A conversation. `read` gives the next line and raises EOFError at the end."""

    talker: Talker
    system: str | None = None
    read: Callable[[], str] = lambda: input("> ")
    out: TextIO = field(default_factory=lambda: sys.stdout)
    notes: TextIO = field(default_factory=lambda: sys.stderr)
    messages: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Read, answer, repeat, until /quit or the end of input. An error ends one answer, not the chat."""
        if sys.stdin.isatty():
            with suppress(ImportError):  # with it, `input` edits lines and recalls earlier ones
                import readline  # noqa: F401
        print("/help lists the commands.", file=self.notes)
        while True:
            try:
                line = self.read().strip()
            except (EOFError, KeyboardInterrupt):
                print(file=self.notes)
                return
            if not line:
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return
                continue
            self._say_or_tell(line)

    def _say_or_tell(self, text: str, otherwise: list[Message] | None = None) -> None:
        """`otherwise`: the history where no answer comes of it."""
        before = list(self.messages) if otherwise is None else otherwise
        try:
            self.say(text)
        except (KeyboardInterrupt, Exception) as error:
            self.messages = before
            if isinstance(error, KeyboardInterrupt) or interrupts.asked() is interrupts.CTRL_C:
                interrupts.answered()
                print("\n(stopped)", file=self.notes)
            elif isinstance(error, GemmaNeuronError) and interrupts.asked() is None:
                print(f"\n{error.message} {error.hint}".rstrip(), file=self.notes)
            else:
                raise

    def say(self, text: str) -> str:
        """Ask, print the answer as it comes, keep both in the history; the answer. Raises UsageError for no text."""
        for said in (self.system or "", text):
            if any("\ud800" <= character <= "\udfff" for character in said):
                raise UsageError("The text is not UTF-8.", "Write it in UTF-8.")
        self.messages.append({"role": "user", "content": text})
        cleaner = Cleaner()
        answer = []
        for piece in self.talker.answer(self._with_system()):
            answer.append(piece)
            self._write(cleaner.feed(piece))
        self._write("\n")
        whole = "".join(answer)
        self.messages.append({"role": "assistant", "content": whole})
        return whole

    def command(self, line: str) -> bool:
        """Do a slash command; False leaves the chat."""
        name, _, rest = line[1:].partition(" ")
        if name in ("quit", "exit", "q"):
            return False
        if name == "clear":
            self.messages = []
        elif name == "system":
            self.system, self.messages = rest.strip() or None, []
        elif name == "history":
            for message in self._with_system():
                print(f"{message['role']}: {clean(message['content'])}", file=self.notes)
        elif name == "retry" and len(self.messages) >= 2:
            before, question = self.messages, self.messages[-2]["content"]
            self.messages = before[:-2]
            self._say_or_tell(question, otherwise=before)
        elif name == "retry":
            print("There is nothing to answer again.", file=self.notes)
        elif name == "help":
            print(HELP, file=self.notes)
        else:
            print(f"There is no command /{clean(name)}.\n{HELP}", file=self.notes)
        return True

    def _with_system(self) -> list[Message]:
        head: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages]

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
