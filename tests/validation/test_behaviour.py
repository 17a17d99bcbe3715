"""What is judged without numbers: prompts, the reference alone, conversations, and what was not looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gemma_neuron.chat import ChatAssets, load_chat_assets
from gemma_neuron.errors import UsageError
from gemma_neuron.port import Port
from gemma_neuron.validation.answers import after_thought, judge, tool_call
from gemma_neuron.validation.context import LevelContext
from gemma_neuron.validation.levels import chat, prompt
from gemma_neuron.validation.levels.position import edge_lengths
from gemma_neuron.validation.questions import Question
from gemma_neuron.validation.validator import Options, prepare, validate
from tests.tiny import write_tiny_gemma4
from tests.validation.ports import make_port
from tests.validation.stock_runner import StockRunner

SMALL = Path(__file__).parent / "small.toml"


class ScriptedRunner:
    """Says one text to every prompt, then the stop id."""

    vocab, slots, max_context, prefill_buckets, score_length = 512, 1, 256, (64,), 128

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._start = list(ids), 0

    def prefill(self, tokens: Sequence[int], *, slot: int, start: int) -> NDArray[np.float32]:
        self._start = start + len(tokens)
        return self._row(0)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> NDArray[np.float32]:
        return self._row(positions[0] - self._start + 1)[None]

    def _row(self, step: int) -> NDArray[np.float32]:
        row = np.zeros(self.vocab, np.float32)
        row[self._ids[min(step, len(self._ids) - 1)]] = 9.0
        return row


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("source"), layers=2, dtype="float32")


@pytest.fixture(scope="module")
def port(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Port:
    return make_port(source, tmp_path_factory.mktemp("ports") / "port", tp=1)


@pytest.fixture(scope="module")
def assets(source: Path) -> ChatAssets:
    return load_chat_assets(source)


def context(
    port: Port, runner: Any, tmp_path: Path, questions: str = "", **options: Any
) -> LevelContext:
    file = SMALL
    if questions:
        file = tmp_path / "q.toml"
        file.write_text('schema = 1\n[sanity]\ntext = "a b c d e f g h i j"\n' + questions)
    return prepare(port, runner, Options(questions=file, **options))


QUESTION = '[[questions]]\nprompt = "hm"\nanswers = ["yes"]\nlimit = 8\n'


def said(assets: ChatAssets, text: str, stop: str = "<turn|>") -> list[int]:
    return assets.tokenizer.encode(text + stop)


@pytest.mark.parametrize(
    ("text", "stop", "status", "words"),
    [
        ("yes", "<turn|>", "pass", "1 of 1"),
        ("no", "<turn|>", "fail", "0 of 1 answers right"),
        ("yes", "", "fail", "end by a stop id"),
        ("<|channel>yes", "<turn|>", "fail", "control tokens in the text: <|channel>"),
    ],
)
def test_chat_level(
    port: Port, assets: ChatAssets, tmp_path: Path, text: str, stop: str, status: str, words: str
) -> None:
    runner = ScriptedRunner(said(assets, text, stop))
    result = chat.run(context(port, runner, tmp_path, QUESTION))
    assert result.status == status and words in " ".join(
        [result.reason, *result.detail.get("problems", [])]
    )


def test_tool_round_trip(port: Port, assets: ChatAssets, tmp_path: Path) -> None:
    """A call to another function than the one asked for is no round trip."""
    tool = (
        QUESTION + 'kind = "tool"\ntools = "[{}]"\ntool_call = "f"\ntool_result = "3"\n'
    ).replace("limit = 8", "limit = 60")
    call = said(assets, "<|tool_call>call:g{}<tool_call|>", "<|tool_response>")
    result = chat.run(context(port, ScriptedRunner(call), tmp_path, tool))
    assert result.status == "fail"
    assert result.detail["answers"][0]["problems"] == ("did not call f",)


@pytest.mark.fault("tok-15-quotes")
@pytest.mark.fault("tok-16-bare-values")
def test_tool_call_is_read(assets: ChatAssets) -> None:
    ids = assets.tokenizer.encode(
        '<|tool_call>call:get_price{item:<|"|>red lamp<|"|>,count:2,flag:true}<tool_call|>'
    )
    assert tool_call(ids, assets) == (
        "get_price", {"item": "red lamp", "count": 2, "flag": True}
    )  # fmt: skip
    assert tool_call(assets.tokenizer.encode("no call"), assets) is None


def test_thought_is_no_part_of_the_answer(assets: ChatAssets) -> None:
    ids = assets.tokenizer.encode("<|channel>thought\nyes<channel|>no")
    assert assets.tokenizer.decode(after_thought(ids, assets)) == "no"
    question = Question(prompt="x", answers=("yes",), kind="thinking", thinking=True)
    assert not judge("q", question, ids, (), assets).right
    assert judge("q", question, ids, (), assets).problems == ()


def test_json_must_parse(assets: ChatAssets) -> None:
    question = Question(prompt="x", answers=("a",), kind="json")
    good = judge("q", question, assets.tokenizer.encode('```json\n{"a": 1}\n```'), (), assets)
    assert good.right and not good.problems
    assert judge("q", question, assets.tokenizer.encode("{a: 1"), (), assets).problems == (
        "is not JSON",
    )


def test_own_template_lints_clean(port: Port, source: Path, tmp_path: Path) -> None:
    assert prompt.run(context(port, ScriptedRunner([1]), tmp_path)).status == "pass"


def test_gemma3_markers_are_named(port: Port, tmp_path: Path) -> None:
    """`orig-01-seqmatch-gibberish`: the right answer to a wrong prompt does not exist."""
    result = prompt.run(context(port, ScriptedRunner([1]), tmp_path, force_template="gemma-3"))
    text = " ".join([result.reason, *result.detail["problems"]])
    assert result.status == "fail"
    assert "'<start_of_turn>' is Gemma 3's turn marker; this model's is '<|turn>'" in text


@pytest.mark.fault("tok-05-ppl-38115")
def test_template_file(port: Port, tmp_path: Path) -> None:
    """`tok-01-missing-bos-base` by a template that forgets BOS."""
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0]['content'] }}")
    result = prompt.run(context(port, ScriptedRunner([1]), tmp_path, force_template=str(file)))
    assert any("BOS '<bos>' (id 2) is missing" in line for line in result.detail["problems"])
    with pytest.raises(UsageError, match="cannot be read"):
        context(port, ScriptedRunner([1]), tmp_path, force_template=str(tmp_path / "none"))


def test_a_users_turn_under_another_role_is_named(source: Path, tmp_path: Path) -> None:
    """The bundled model answers every question so, and reference and port say the same."""
    port = make_port(source, tmp_path / "port", tp=1)
    file = port.source_folder / "chat_template.jinja"
    text = file.read_text()
    changed = text.replace(
        "message['role']", "('model' if message['role'] == 'user' else 'system')"
    )
    assert changed != text
    file.write_text(changed)
    result = prompt.run(context(port, ScriptedRunner([1]), tmp_path))
    assert any("messages of the user" in line for line in result.detail["problems"])


def test_other_template_than_the_port_was_made_with(source: Path, tmp_path: Path) -> None:
    port = make_port(source, tmp_path / "port", tp=1)
    file = port.source_folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")
    result = prompt.run(context(port, ScriptedRunner([1]), tmp_path))
    assert result.status == "fail" and "sha256" in result.reason


def test_forced_prompt_matches_but_is_broken(port: Port, source: Path) -> None:
    """Token match with an equally wrong reference does not rescue a wrong prompt."""
    options = Options(
        checkpoint=source,
        questions=SMALL,
        force_template="gemma-3",
        levels=frozenset({0, 2, 3, 5, 6}),
    )
    report = validate(port, StockRunner(source), options)
    assert report.token_match["equal"] == report.token_match["compared"] > 0
    assert report.verdict == "matches-but-broken"
    assert report.levels[0].status == "fail"


def test_bucket_shorter_than_the_window(source: Path, tmp_path: Path) -> None:
    port = make_port(source, tmp_path / "port", tp=1, max_context=64, buckets=(8,))
    runner = StockRunner(source, max_context=64, buckets=(8,))
    report = validate(
        port, runner, Options(checkpoint=source, questions=SMALL, levels=frozenset({4}))
    )
    assert report.levels[4].status == "not-run"
    assert "shorter than the window (16)" in report.levels[4].reason
    assert report.verdict == "insufficient"


def test_base_is_said_and_does_not_pass(port: Port, tmp_path: Path) -> None:
    result = chat.run(context(port, ScriptedRunner([1]), tmp_path, base=True))
    assert result.status == "not-run" and "--base" in result.reason


def test_model_without_template_is_judged_as_base(source: Path, tmp_path: Path) -> None:
    port = make_port(source, tmp_path / "port", tp=1)
    (port.source_folder / "chat_template.jinja").unlink()
    found = context(port, ScriptedRunner([1]), tmp_path)
    assert found.scope == "base"
    assert chat.run(found).status == "not-applicable"


def test_edges() -> None:
    lengths = edge_lengths(64, (32, 128), 600)
    for edge in (63, 64, 65, 511, 512, 513, 31, 32, 33, 127, 128, 129, 137):
        assert edge in lengths
    assert max(edge_lengths(64, (32, 128), 100)) <= 96
