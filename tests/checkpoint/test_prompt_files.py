from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers import clean, edit_json, inspect, only

GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


def test_template_and_stop_ids_of_both_families(gemma4: Path, gemma3: Path) -> None:
    for folder, stops in ((gemma4, (1, 50, 106)), (gemma3, (1, 106))):
        report = inspect(folder)
        clean(report)
        assert report.stop_token_ids == stops
        assert report.chat_template["present"] is True
        assert report.chat_template["source"] == "chat_template.jinja"
        assert len(report.chat_template["sha256"]) == 64


def test_template_inside_the_tokenizer_config(gemma4: Path) -> None:
    text = (gemma4 / "chat_template.jinja").read_text()
    (gemma4 / "chat_template.jinja").unlink()
    edit_json(gemma4, TOKENIZER_CONFIG, lambda c: c.update(chat_template=text))
    report = inspect(gemma4)
    clean(report)
    assert report.chat_template["source"] == "tokenizer_config.json"


def test_missing_template_of_a_chat_model_is_an_error(gemma4: Path) -> None:
    (gemma4 / "chat_template.jinja").unlink()
    report = inspect(gemma4)
    assert "tuned for chat" in only(report, "template-missing").message
    assert report.chat_template == {"present": False, "source": "", "sha256": ""}
    only(inspect(gemma4, need_template=False), "template-missing", "warning")


def test_missing_template_of_a_base_model_is_a_warning(gemma3: Path) -> None:
    (gemma3 / "chat_template.jinja").unlink()
    edit_json(gemma3, GENERATION, lambda c: c.update(eos_token_id=1))
    only(inspect(gemma3), "template-missing", "warning")
    only(inspect(gemma3, need_template=True), "template-missing")


def test_legacy_template_file_is_pointed_at(gemma4: Path) -> None:
    text = (gemma4 / "chat_template.jinja").read_text()
    (gemma4 / "chat_template.jinja").unlink()
    (gemma4 / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    assert "older form" in only(inspect(gemma4), "template-missing").message


@pytest.mark.parametrize("content", [b"x" * (64 * 1024 + 1), b"\xff\xfe"])
def test_template_that_is_not_read(gemma4: Path, content: bytes) -> None:
    (gemma4 / "chat_template.jinja").write_bytes(content)
    assert only(inspect(gemma4), "template-unsafe").file == "chat_template.jinja"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ bos_token }}{% if %}", "line 1"),
        ("{% for m in messages %}{{ m.content }}", "Unexpected end of template"),
        ("{{ messages[0].content }}{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content }}{% if false %}{{ x.__globals__ }}{% endif %}", "unsafe"),
        ("{{ messages[0].content }}{% include 'secret' %}", "another template"),
        ("{{ raise_exception('never') }}", "never"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "memory or time",
        ),
        ("{{ messages[0].content }}{% set x = 'a' * 999999999 %}{{ x }}", "memory"),
        ("{{ bos_token }}{{ messages[0].text }}", "leaves out what the user says"),
    ],
)
def test_a_template_is_tried_before_a_port_is_built_on_it(
    gemma4: Path, text: str, said: str
) -> None:
    (gemma4 / "chat_template.jinja").write_text(text)
    report = inspect(gemma4)
    found = only(report, "template-unsafe")
    assert found.file == "chat_template.jinja"
    assert said in found.message


def test_two_templates_that_differ(gemma4: Path) -> None:
    text = (gemma4 / "chat_template.jinja").read_text()
    edit_json(gemma4, TOKENIZER_CONFIG, lambda c: c.update(chat_template=text))
    clean(inspect(gemma4))
    edit_json(gemma4, TOKENIZER_CONFIG, lambda c: c.update(chat_template=text + "x"))
    only(inspect(gemma4), "template-unsafe", "warning")


def test_template_of_the_other_family(gemma4: Path, gemma3: Path) -> None:
    text = (gemma3 / "chat_template.jinja").read_text()
    (gemma4 / "chat_template.jinja").write_text(text)
    found = only(inspect(gemma4), "token-id-contradiction")
    assert "<end_of_turn>" in found.message


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"{}", b'{"model": {"vocab": {}}}'])
def test_tokenizer_missing_or_broken(gemma4: Path, content: bytes | None) -> None:
    if content is None:
        (gemma4 / "tokenizer.json").unlink()
    else:
        (gemma4 / "tokenizer.json").write_bytes(content)
    assert only(inspect(gemma4), "tokenizer-missing").file == "tokenizer.json"


def test_only_the_sentencepiece_file(gemma4: Path) -> None:
    (gemma4 / "tokenizer.json").rename(gemma4 / "tokenizer.model")
    assert "not enough" in only(inspect(gemma4), "tokenizer-missing").message


@pytest.mark.parametrize("eos", [1, [1], [1, 50]])
def test_stop_ids_reduced(gemma4: Path, eos: Any) -> None:
    edit_json(gemma4, GENERATION, lambda c: c.update(eos_token_id=eos))
    report = inspect(gemma4)
    assert "<turn|> (106)" in only(report, "stop-ids-reduced", "warning").message
    assert 106 in report.stop_token_ids


def test_generation_config_is_optional(gemma4: Path, gemma3: Path) -> None:
    (gemma4 / GENERATION).unlink()
    report = inspect(gemma4)  # config.json has [1, 106]
    clean(report)
    assert report.stop_token_ids == (1, 106)
    (gemma3 / GENERATION).unlink()
    only(inspect(gemma3), "stop-ids-reduced", "warning")  # config.json has 1


@pytest.mark.parametrize("name", [GENERATION, TOKENIZER_CONFIG])
def test_broken_json_beside_the_weights(gemma4: Path, name: str) -> None:
    (gemma4 / name).write_text("{]")
    report = inspect(gemma4)
    assert report.verdict == "broken"
    assert any(name in f.message and "line 1" in f.message for f in report.errors)


@pytest.mark.parametrize("key", ["bos", "eos", "pad"])
@pytest.mark.parametrize("file", ["config.json", GENERATION])
@pytest.mark.parametrize("token", [512, -1])
def test_id_outside_the_vocabulary(gemma4: Path, key: str, file: str, token: int) -> None:
    def change(config: dict[str, Any]) -> None:
        value = [1, 106, token] if key == "eos" else token
        config.get("text_config", config)[f"{key}_token_id"] = value

    edit_json(gemma4, file, change)
    found = [f for f in inspect(gemma4).errors if f"_token_id {token};" in f.message]
    assert [(f.kind, f.file) for f in found] == [("token-id-contradiction", file)]


def test_bos_ids_that_differ(gemma4: Path) -> None:
    edit_json(gemma4, GENERATION, lambda c: c.update(bos_token_id=1))
    found = only(inspect(gemma4), "token-id-contradiction")
    assert "bos_token_id differs" in found.message
    assert "generation_config.json [1]" in found.message


def test_pad_ids_that_differ_are_a_warning(gemma4: Path) -> None:
    edit_json(gemma4, TOKENIZER_CONFIG, lambda c: c.update(pad_token="<eos>"))
    only(inspect(gemma4), "token-id-contradiction", "warning")


def test_tokenizer_eos_may_be_the_turn_end_but_nothing_else(gemma4: Path) -> None:
    edit_json(gemma4, TOKENIZER_CONFIG, lambda c: c.update(eos_token={"content": "<turn|>"}))
    clean(inspect(gemma4))
    edit_json(gemma4, TOKENIZER_CONFIG, lambda c: c.update(eos_token="<mask>"))
    assert "no id is common" in only(inspect(gemma4), "token-id-contradiction").message


def test_special_piece_that_the_tokenizer_lacks(gemma4: Path) -> None:
    edit_json(gemma4, TOKENIZER_CONFIG, lambda c: c.update(eos_token="</s>"))
    assert "'</s>'" in only(inspect(gemma4), "token-id-contradiction").message


def test_tokenizer_larger_than_the_table(gemma4: Path) -> None:
    def grow(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["vocab"]["zzz"] = 512

    edit_json(gemma4, "tokenizer.json", grow)
    found = only(inspect(gemma4), "token-id-contradiction")
    assert "'zzz' 512" in found.message


def test_added_placeholder_past_the_table_is_a_warning(gemma3: Path) -> None:
    # Gemma 3 1B and 270M ship <image_soft_token> at 262144, one past their table of 262144 rows
    def grow(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"].append(
            {**tokenizer["added_tokens"][0], "id": 512, "content": "<image_soft_token>"}
        )

    edit_json(gemma3, "tokenizer.json", grow)
    found = only(inspect(gemma3), "token-id-contradiction", "warning")
    assert "<image_soft_token>" in found.message
