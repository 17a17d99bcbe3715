"""What of a conversation is learned, and which lines are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.chat import ChatAssets, load_chat_assets
from gemma_neuron.demo import demo_folder
from gemma_neuron.tuning.data import DataError, Sample, read_samples
from tests.tiny import write_tiny_gemma3

TALK = [
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Spain?"},
    {"role": "assistant", "content": "Madrid."},
]
SUM = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}


@pytest.fixture(scope="module")
def gemma4() -> ChatAssets:
    return load_chat_assets(demo_folder())


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> ChatAssets:
    return load_chat_assets(write_tiny_gemma3(tmp_path_factory.mktemp("gemma3")))


def write(folder: Path, *conversations: Any) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in conversations) + "\n")
    return path


def learned(sample: Sample, assets: ChatAssets) -> str:
    ids = [token for token, is_it in zip(sample.ids, sample.learned, strict=True) if is_it]
    return assets.tokenizer.decode(ids, skip_special=False)


def before(sample: Sample) -> list[int]:
    return list(sample.ids[: sample.learned.index(True)])


def test_each_answer_stands_behind_the_prompt_that_serving_renders(
    gemma4: ChatAssets, tmp_path: Path
) -> None:
    found = read_samples(write(tmp_path, {"messages": TALK}), gemma4, 500)
    assert [learned(sample, gemma4) for sample in found] == ["Paris.<turn|>", "Madrid.<turn|>"]
    assert [before(sample) for sample in found] == [
        gemma4.prompt_ids(TALK[:1]),
        gemma4.prompt_ids(TALK[:3]),
    ]


def test_one_sequence_where_the_history_is_what_serving_renders(
    gemma3: ChatAssets, tmp_path: Path
) -> None:
    talk = [*TALK, {"role": "user", "content": "never answered"}]
    (found,) = read_samples(write(tmp_path, {"messages": talk}), gemma3, 500)
    assert learned(found, gemma3) == "Paris.<end_of_turn>Madrid.<end_of_turn>"
    whole = gemma3.completion_ids(gemma3.need_template().render(TALK, add_generation_prompt=False))
    assert list(found.ids) == whole[: len(found.ids)], "what follows the last answer is left out"


def test_a_call_of_a_tool_is_learned_up_to_where_serving_stops(
    gemma4: ChatAssets, tmp_path: Path
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 and 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    found = read_samples(write(tmp_path, {"messages": talk, "tools": [SUM]}), gemma4, 500)
    assert [learned(sample, gemma4) for sample in found] == [
        "<|tool_call>call:add{a:2}<tool_call|><|tool_response>",
        "It is 4.<turn|>",
    ]
    assert before(found[1]) == gemma4.prompt_ids(talk[:4], tools=[SUM])


def test_a_text_is_learned_as_it_stands_and_needs_no_template(
    gemma3: ChatAssets, tmp_path: Path
) -> None:
    base = replace(gemma3, template=None)
    path = write(tmp_path, {"text": "the end"})
    (found,) = read_samples(path, base, 500)
    assert list(found.ids) == base.completion_ids("the end")
    assert found.learned == (False, *[True] * (len(found.ids) - 1))
    write(tmp_path, {"text": ""}, {"messages": TALK}, {"text": "x<start_of_turn>"})
    with pytest.raises(DataError) as caught:
        read_samples(path, base, 500)
    assert "line 1: the text is empty; line 2: a conversation, and the model has no chat" in str(
        caught.value
    )
    assert "line 3: the text spells the control token <start_of_turn>" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"{", "no JSON"),
        (b"[1]", 'no object with a list "messages"'),
        (b'{"messages": []}', 'no object with a list "messages"'),
        (b'{"messages": [{"role": "user"}]}', 'message 1 has no "content"'),
        (b'{"messages": ["hello"]}', 'message 1 is no object with a "role"'),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "no JSON: byte 43 is not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "no assistant turn"),
        (
            b'{"messages": [{"role": "bot", "content": "x"}, {"role": "assistant", "content": "y"}]}',
            "the model's chat template refuses it: unsupported role: bot",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]}',
            "message 2, an assistant turn, is empty",
        ),
        (
            b'{"messages": [{"role": "user", "content": "<turn|>"}, {"role": "assistant", "content": "y"}]}',
            r"spells the control token <turn\|>",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "tools": 1}',
            '"tools" is no list',
        ),
        *[
            (
                b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]'
                + more,
                named,
            )
            for more, named in (
                (b', "tools": [{"x": 1}]}', '"tools" is no list of'),
                (b', "tools": [{"function": {"name": "f<turn|>"}}]}', "spells the control token"),
                (b', "text": "z"}', '"text" beside "messages"'),
                (b', "messages": []}', "no JSON: key 'messages' stands twice"),
            )
        ],
        *[
            (
                b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", '
                + rest
                + b"}]}",
                named,
            )
            for rest, named in (
                (b'"content": 5', 'the "content" of message 2 is neither text nor'),
                (b'"content": NaN', "no JSON: NaN is not JSON"),
                (b'"tool_calls": [[]]', 'the "tool_calls" of message 2 is no list of'),
                (b'"content": "\\ud83d"', r"\\ud83d is half of a character"),
                (b'"content": "y", "role": "user"', "no JSON: key 'role' stands twice"),
            )
        ],
    ],
)
def test_a_bad_line_is_named(gemma4: ChatAssets, tmp_path: Path, line: bytes, named: str) -> None:
    path = write(tmp_path, {"messages": TALK})
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=f"line 3: .*{named}") as caught:
        read_samples(path, gemma4, 500)
    assert caught.value.exit_code == 2


def test_what_editors_leave_is_read(gemma4: ChatAssets, tmp_path: Path) -> None:
    """A byte order mark, CRLF, blank lines, a character written as two escapes."""
    path = write(tmp_path, {"messages": TALK})
    plain = read_samples(path, gemma4, 500)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert read_samples(path, gemma4, 500) == plain
    path.write_bytes(b'{"text": "a\\ud83d\\ude00"}\n')
    escaped = read_samples(path, gemma4, 500)
    assert escaped == read_samples(write(tmp_path, {"text": "a\N{GRINNING FACE}"}), gemma4, 500)


def test_all_bad_lines_are_named_and_long_ones_with_their_length(
    gemma4: ChatAssets, tmp_path: Path
) -> None:
    path = write(tmp_path, {"messages": TALK}, *[{}] * 11)
    with pytest.raises(DataError) as caught:
        read_samples(path, gemma4, 12)
    text = caught.value.message
    assert "line 1: 21 tokens, --max-length is 12" in text
    assert "line 10: no object" in text and "and 2 more lines" in text


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_and_none_are_refused(gemma4: ChatAssets, tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.jsonl").write_text(text)
    with pytest.raises(DataError, match="holds no conversation"):
        read_samples(tmp_path / "empty.jsonl", gemma4, 500)
    with pytest.raises(DataError, match="is not there"):
        read_samples(tmp_path / "missing.jsonl", gemma4, 500)
    with pytest.raises(DataError, match="is no file"):
        read_samples(tmp_path, gemma4, 500)
