"""The terminal chat: over an engine in this process and over a URL; control sequences never get out."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_neuron import interrupts
from gemma_neuron.chat import Tokenizer, load_chat_assets
from gemma_neuron.errors import (
    CompileError,
    EnvironmentProblem,
    TemplateError,
    UsageError,
)
from gemma_neuron.serving.access import AccessRules
from gemma_neuron.serving.bench import find_target
from gemma_neuron.serving.screen import Cleaner, clean
from gemma_neuron.serving.talkers import (
    LocalTalker,
    Message,
    UrlTalker,
    _content,
    _told_as_ours,
)
from gemma_neuron.serving.terminal import ChatLoop, run_chat
from gemma_neuron.settings import KEY_VARIABLE
from tests.command import run
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import USER, running, write_port, write_source

SAID = "The end,\nit is 😀."


def factory(folder: Path, said: str = SAID) -> Callable[[], FakeRunner]:
    script = [*Tokenizer.from_folder(folder).encode(said), 106]
    return lambda: FakeRunner(script=script)


def lines(*texts: str) -> Callable[[], str]:
    left: Iterator[str] = iter(texts)

    def read() -> str:
        for text in left:
            return text
        raise EOFError

    return read


def test_once_prints_the_answer_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = write_port(tmp_path)
    run_chat(port, factory(port.source_folder), once="hello")
    assert capsys.readouterr() == (SAID + "\n", "")


def test_once_over_a_url_equals_the_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_source(tmp_path)
    with running(folder, factory(folder)()) as server:
        for url in (server.url, server.url + "/v1", server.url + "/"):
            run_chat(url, once="hello", system="Be brief.")
            assert capsys.readouterr() == (SAID + "\n", "")
        run_chat(server.url, once="hello", max_tokens=4)
        assert capsys.readouterr().out == "The \n"


def test_once_is_greedy_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = write_port(tmp_path)
    (port.source_folder / "generation_config.json").write_text('{"do_sample": true}')

    def answers(temperature: float | None) -> set[str]:
        found = set()
        for _ in range(3):
            run_chat(port, FakeRunner, once="hello", max_tokens=10, temperature=temperature)
            found.add(capsys.readouterr().out)
        return found

    assert len(answers(None)) == 1
    assert len(answers(1.0)) == 3


def test_unvalidated_is_said_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = write_port(tmp_path, verdict=None)
    run_chat(port, factory(port.source_folder), once="hello")
    out, errors = capsys.readouterr()
    assert out == SAID + "\n"
    assert errors.startswith("unvalidated:")
    with running(port.source_folder, factory(port.source_folder)(), validated=False) as server:
        run_chat(server.url, once="hello")
        assert capsys.readouterr().err.startswith("unvalidated:")


def test_a_failed_engine_is_an_error_each_time_and_a_failed_retry_forgets_nothing(
    tmp_path: Path,
) -> None:
    port = write_port(tmp_path)
    runner = factory(port.source_folder)()
    talker = LocalTalker(port, lambda: runner)
    notes = io.StringIO()
    loop = ChatLoop(talker, out=io.StringIO(), notes=notes)
    loop.say("hello")
    before = list(loop.messages)
    runner.fail_after = len(runner.calls)
    for told in ("device lost", "not ready: failed"):
        loop.read = lines("/retry")
        loop.run()
        assert told in notes.getvalue()
        assert loop.messages == before
    talker.close()


@pytest.mark.parametrize(
    ("chunk", "told"),
    [
        ({"error": "out of memory"}, "out of memory"),
        ([], "does not answer"),
        ({"choices": [1]}, "does not answer"),
    ],
)
def test_what_is_no_answer_of_a_server_is_an_error(chunk: object, told: str) -> None:
    with pytest.raises(EnvironmentProblem, match=told), _told_as_ours("http://x"):
        list(_content(chunk))
    assert list(_content({"choices": [{"delta": None}]})) == []


def test_conversation_and_commands(tmp_path: Path) -> None:
    port = write_port(tmp_path)
    talker = LocalTalker(port, lambda: FakeRunner(max_context=400))
    talker.max_tokens = 5
    out, notes = io.StringIO(), io.StringIO()
    loop = ChatLoop(
        talker,
        read=lines(
            "one", "two", "/retry", "/history", "/nonsense", "", "/system be\x1b[2J kind", "three"
        ),
        out=out,
        notes=notes,
    )
    loop.run()
    answers = out.getvalue()
    assert [m["role"] for m in loop.messages] == ["user", "assistant"]
    assert loop.system == "be\x1b[2J kind"
    assert "user: one" in notes.getvalue()
    assert "no command /nonsense" in notes.getvalue()
    assert "\x1b" not in notes.getvalue()
    # The second answer, asked again, is the same: greedy, same history.
    talker_alone = ChatLoop(
        talker, read=lines("one", "two"), out=io.StringIO(), notes=io.StringIO()
    )
    talker_alone.run()
    assert answers.count(clean(talker_alone.messages[3]["content"])) == 2
    talker.close()


def test_an_error_ends_one_answer_not_the_chat(tmp_path: Path) -> None:
    port = write_port(tmp_path)
    talker = LocalTalker(port, factory(port.source_folder))
    out, notes = io.StringIO(), io.StringIO()
    loop = ChatLoop(talker, read=lines("a" * 300, "hello", "/quit", "never"), out=out, notes=notes)
    loop.run()
    talker.close()
    assert "context is 256" in notes.getvalue()
    assert out.getvalue() == SAID + "\n"
    assert len(loop.messages) == 2


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:abc", "http://", "http://a\x01b"])
def test_what_is_no_address_is_a_mistake(url: str) -> None:
    for command in (("chat", url, "--once", "hello"), ("bench", url)):
        done = run(*command)
        assert done.returncode == 2 and "no http(s) URL" in done.stderr, done.stderr
        assert "hint: " in done.stderr and "Traceback" not in done.stderr


def test_a_key_is_whatever_bytes_the_environment_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = AccessRules(hosts=None, api_key="k\u00e9y")
    monkeypatch.setenv(KEY_VARIABLE, "k\u00e9y")
    with running(write_source(tmp_path), rules=rules) as server:
        talker = UrlTalker(server.url)
        talker.max_tokens = 2
        assert "".join(talker.answer(USER))
        talker.close()
        assert find_target(server.url, None, None).model == "tiny"


def test_text_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    loop = ChatLoop(Signalled(signal.SIGINT, False), system="a\udcffb")
    with pytest.raises(UsageError, match="not UTF-8"):
        loop.say("hello")
    loop.system = None
    with pytest.raises(UsageError, match="not UTF-8"):
        loop.say("\ud83d")
    assert loop.messages == []


class Signalled:
    """A talker that gets a signal in its first answer; in its later ones it says "well"."""

    note = ""
    max_tokens: int | None = None
    temperature: float | None = None
    enable_thinking = False

    def __init__(self, number: int, hidden: bool) -> None:
        self.number, self.hidden, self.asked = number, hidden, 0

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        self.asked += 1
        if self.asked == 1:
            yield "I was about to"
            with contextlib.suppress(BaseException) if self.hidden else contextlib.nullcontext():
                signal.raise_signal(self.number)
            raise ValueError("an error of C code in the place of the signal's")
        yield "well"

    def close(self) -> None: ...


@pytest.fixture
def signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.hear_signals()
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("hidden", [False, True])
def test_ctrl_c_ends_one_answer_and_is_then_forgotten(signals: None, hidden: bool) -> None:
    out, notes = io.StringIO(), io.StringIO()
    talker = Signalled(signal.SIGINT, hidden)
    loop = ChatLoop(talker, read=lines("one", "two"), out=out, notes=notes)
    loop.run()
    assert "(stopped)" in notes.getvalue() and out.getvalue().endswith("well\n")
    assert [message["content"] for message in loop.messages] == ["two", "well"]
    assert interrupts.asked() is None


@pytest.mark.parametrize("hidden", [False, True])
def test_sigterm_ends_the_chat(signals: None, hidden: bool) -> None:
    talker = Signalled(signal.SIGTERM, hidden)
    loop = ChatLoop(talker, read=lines("one", "two"), out=io.StringIO(), notes=io.StringIO())
    with pytest.raises(ValueError if hidden else interrupts.Stop):
        loop.run()
    assert talker.asked == 1 and interrupts.asked() is interrupts.SIGTERM


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no http"):
        UrlTalker("ftp://x")
    with pytest.raises(EnvironmentProblem, match="ConnectError") as caught:
        run_chat("http://127.0.0.1:9", once="x")
    assert "serve-local" in caught.value.hint
    base = write_port(tmp_path / "base", template="")
    with pytest.raises(TemplateError, match="no chat template"):
        run_chat(base, FakeRunner, once="x")
    port = write_port(tmp_path / "port")

    def broken() -> FakeRunner:
        raise CompileError("no graph")

    with pytest.raises(CompileError):
        run_chat(port, broken, once="x")


def test_a_servers_refusal_is_told_in_its_words(tmp_path: Path) -> None:
    folder = write_source(tmp_path)
    with running(folder) as server, pytest.raises(UsageError, match=r"400: .*'<turn\|>'"):
        run_chat(server.url, once="<turn|>")


HOSTILE = {
    "\x1b[2J\x1b[Hgone": "gone",
    "\x1b]0;title\x07text": "text",
    "\x1b]52;c;cHduZWQ=\x1b\\text": "text",
    "\x1bPq#0\x1b\\x": "x",
    "a\x9b31mb": "ab",
    "a\rb\x08c\x7f": "abc",
    "safe\u202egnp.exe": "safegnp.exe",
    "tab\tnew\nline 😀": "tab\tnew\nline 😀",
    "\x1b": "",
    "\x1b[": "",
    "a\x1b]unfinished\nb": "a\nb",
    "\x1b\né": "\né",
    "\x1bc": "",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_control_sequences_are_taken_out(text: str) -> None:
    assert clean(text) == HOSTILE[text]


@given(st.lists(st.text("\x1b[]0;m\x07\\aP\n", max_size=5), max_size=12))
def test_cleaning_pieces_never_lets_a_sequence_out(parts: list[str]) -> None:
    cleaner = Cleaner()
    found = "".join(cleaner.feed(part) for part in parts)
    assert "\x1b" not in found
    assert "\x07" not in found
    assert found == clean("".join(parts))


def test_plain_text_is_not_held_back() -> None:
    cleaner = Cleaner()
    assert [cleaner.feed(t) for t in ("a", "b\x1b[1mc", "d\x1b[", "1me")] == ["a", "bc", "d", "e"]


def test_the_model_cannot_write_to_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = write_port(tmp_path)
    assets = load_chat_assets(port.source_folder)
    script = [*assets.tokenizer.encode("ok\x1b]52;c;x\x07\x1b[2Jfine"), 106]
    run_chat(port, lambda: FakeRunner(script=script), once="x")
    assert capsys.readouterr().out == "okfine\n"
