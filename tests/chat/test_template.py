"""The template renders as transformers renders it, and can do nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.errors import TemplateError
from gemma_neuron.template import TEMPLATE_BYTES, ChatTemplate, load_template
from tests.chat.templates import GEMMA3, GEMMA4, GEMMA4_LARGE
from tests.serving.server import write_source

DEMO = Path(__file__).parents[2] / "gemma_neuron" / "data" / "demo-model"
USER = {"role": "user", "content": "  What is <b> & 'é'?  "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "A letter."}, USER],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
    "reasoning": [USER, {"role": "assistant", "content": "x", "reasoning": "because"}, USER],
}
TOOLS = [{"type": "function", "function": {"name": "now", "description": "<&>é", "parameters": {}}}]
TEMPLATES = {"gemma3": GEMMA3, "gemma4": GEMMA4, "gemma4-large": GEMMA4_LARGE}


def stock_rendering(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, **({"add_generation_prompt": True} | options)
    )
    assert isinstance(text, str)
    return text


@pytest.mark.fault("orig-04-batchencoding")
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_prompt_ids_are_a_flat_list_equal_to_stocks(tmp_path: Path, name: str) -> None:
    """transformers 5 answers a BatchEncoding; ours are the ids in it, as plain integers."""
    from transformers import AutoTokenizer

    folder = write_source(tmp_path, family=name, template=TEMPLATES[name])
    stock: Any = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        [USER], tokenize=True, add_generation_prompt=True
    )
    assets = load_chat_assets(folder)
    ids = assets.prompt_ids([USER])
    assert not isinstance(stock, list)
    assert ids == stock["input_ids"]
    assert {type(token) for token in ids} == {int}
    assert assets.template is not None
    assets.template.close()


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_stock(tmp_path: Path, name: str, conversation: str) -> None:
    folder = write_source(tmp_path, family=name[:6], template=TEMPLATES[name])
    template = load_template(folder)
    assert template is not None
    messages = CONVERSATIONS[conversation]
    for options in (
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"tools": TOOLS, "enable_thinking": False},
        {"add_generation_prompt": False, "enable_thinking": False},
    ):
        assert template.render(messages, **options) == stock_rendering(folder, messages, **options)
    template.close()


@pytest.mark.skipif(not (DEMO / "tokenizer.json").is_file(), reason="no bundled model yet")
@pytest.mark.parametrize("conversation", ["one", "turns"])
def test_renders_the_bundled_template_as_stock(conversation: str) -> None:
    template = load_template(DEMO)
    assert template is not None
    messages = CONVERSATIONS[conversation]
    for thinking in (False, True):
        assert template.render(messages, enable_thinking=thinking) == stock_rendering(
            DEMO, messages, enable_thinking=thinking
        )
    template.close()


def test_helpers_are_stocks(tmp_path: Path) -> None:
    source = (
        "{{ messages | tojson(indent=2) }}{{ messages[0] | tojson(sort_keys=true) }}"
        "{{ strftime_now('%Y-%m') }}"
        "{% generation %}said{% endgeneration %}{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}"
        "{{ dict(a=1) | tojson }}{{ eos_token }}{{ pad_token }}{{ documents }}{{ tools }}"
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    )
    folder = write_source(tmp_path, template=source)
    template = load_template(folder)
    assert template is not None
    messages = [{"role": "user", "content": "<é>", "thinking": "hm"}]
    assert template.render(messages) == stock_rendering(folder, messages, enable_thinking=False)
    template.close()


def test_tok_17_roles_must_alternate_in_gemma3_and_need_not_in_gemma4() -> None:
    specials = {"bos_token": "<bos>"}
    three = ChatTemplate(GEMMA3, "chat_template.jinja", specials)
    with pytest.raises(
        TemplateError, match="Conversation roles must alternate user/assistant, message 1"
    ):
        three.render([USER, USER])
    four = ChatTemplate(GEMMA4, "chat_template.jinja", specials)
    assert four.render([USER, USER]).count("<|turn>user") == 2
    three.close()
    four.close()


def test_tok_18_system_text_is_folded_in_gemma3_and_a_turn_of_its_own_in_gemma4() -> None:
    messages = CONVERSATIONS["system"]
    three = ChatTemplate(GEMMA3, "chat_template.jinja", {"bos_token": "<bos>"})
    assert three.render(messages).startswith("<bos><start_of_turn>user\nBe brief.\n\nWhat")
    four = ChatTemplate(GEMMA4, "chat_template.jinja", {"bos_token": "<bos>"})
    assert four.render(messages).startswith("<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\n")
    three.close()
    four.close()


HOSTILE = {
    "endless": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "memory or time",
    ),
    "output": ("{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "1048576 bytes"),
    "memory": ("{% set x = 'a' * 999999999 %}{{ x }}", "memory"),
    "memory-in-steps": (
        "{% set n = namespace(x='a' * 1000000) %}"
        "{% for i in range(20) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "memory",
    ),
    "recursion": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "nests too deeply"),
    "raise": ("{{ raise_exception('not this way') }}", "^not this way$"),
    "syntax": ("{% if %}", "line 1"),
    "undefined": ("{{ no.such.thing }}", "'no' is undefined"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
    "mutate": ("{{ messages.append(1) }}", "unsafe"),
    "private-namespace": ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "namespace"),
    "include": ("{% include '/etc/passwd' %}", "another template"),
    "import": ("{% import 'os' as os %}", "another template"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_an_error_within_seconds(name: str) -> None:
    source, words = HOSTILE[name]
    template = ChatTemplate(source, "chat_template.jinja")
    began = time.monotonic()
    with pytest.raises(TemplateError, match=words):
        template.render([USER])
    assert time.monotonic() - began < 10
    template.close()


@pytest.mark.parametrize(
    "inner",
    [
        "{{ ''.__class__ }}",
        "{{ x['__globals__'] }}",
        "{{ x|attr('__init__') }}",
        "{% include 'x' %}",
        "{% from 'os' import path %}",
        "{% extends 'x' %}",
    ],
)
def test_an_escape_is_found_in_a_branch_that_is_never_reached(inner: str) -> None:
    template = ChatTemplate("ok{% if false %}" + inner + "{% endif %}", "chat_template.jinja")
    with pytest.raises(TemplateError, match="line 1 is unsafe"):
        template.check()
    template.close()


def test_format_strings_reach_no_attributes() -> None:
    template = ChatTemplate("{{ '{0.__class__}'.format(1) }}", "chat_template.jinja")
    assert template.render([USER]) == ""
    template.close()


def test_a_killed_render_is_followed_by_a_good_one() -> None:
    source = "{% if messages[0].content == 'loop' %}" + HOSTILE["endless"][0] + "{% endif %}ok"
    template = ChatTemplate(source, "chat_template.jinja")
    assert template.render([USER]) == "ok"
    first = template_children()
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render([USER]) == "ok"
    assert template_children().isdisjoint(first)
    for pid in template_children():
        os.kill(pid, 9)  # our own child, started above
    time.sleep(0.1)
    assert template.render([USER]) == "ok"
    template.close()
    assert not template_children()


def template_children() -> set[int]:
    found = set()
    for child in psutil.Process().children():
        if "gemma_neuron.template_child" in " ".join(child.cmdline()):
            found.add(child.pid)
    return found


def test_template_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="65537 bytes"):
        ChatTemplate("a" * (TEMPLATE_BYTES + 1), "chat_template.jinja")
    (tmp_path / "chat_template.jinja").write_text("a" * (TEMPLATE_BYTES + 1))
    with pytest.raises(TemplateError, match="65537 bytes"):
        load_template(tmp_path)


def test_the_child_has_no_secrets_and_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys, time, psutil\n"
        "from gemma_neuron.template import ChatTemplate\n"
        "t = ChatTemplate('ok', 'chat_template.jinja')\n"
        "t.render([])\n"
        "child = psutil.Process().children()[0]\n"
        "print(child.pid, 'SECRET' in child.environ(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SECRET": "x", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert parent.stdout is not None
    pid, has_secret = parent.stdout.readline().split()
    assert has_secret == "False"
    child = psutil.Process(int(pid))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def test_threads_share_one_child() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "chat_template.jinja")
    wrong = []

    def work(number: int) -> None:
        for _ in range(20):
            text = str(number) * 1000
            if template.render([{"role": "user", "content": text}]) != text:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(template_children()) == 1
    template.close()


def test_large_conversation_passes_the_pipes() -> None:
    template = ChatTemplate("{{ messages[0].content | length }}", "chat_template.jinja")
    assert template.render([{"role": "user", "content": "é" * 900_000}]) == "900000"
    template.close()


def test_origin_and_digest(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    old = load_template(tmp_path)
    assert old is not None
    assert (old.origin, old.source) == ("tokenizer_config.json", "old")
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_template(tmp_path).source == "d"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("new")
    new = load_template(tmp_path)
    assert new is not None
    assert (new.origin, new.source) == ("chat_template.jinja", "new")
    assert new.sha256 == "11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437"


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' * 100_000])
def test_bad_tokenizer_config_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json"):
        load_template(tmp_path)
