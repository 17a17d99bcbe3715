"""The page in headless Chromium, over a real server: what somebody types, sees, and is safe from."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.serving.access import AccessRules
from tests.browser import Browser, browser, missing
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import RunningServer, running, script_of, write_port

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

AXE = Path(__file__).parents[1] / "data" / "axe" / "axe.min.js"
THOUGHT = "<|channel>thought\nFirst I count.<channel|>"
PLAIN = "Two **ways**:\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |"
LONG = (
    "word and " * 300
)  # half a minute at the pace of these tests: a slow machine has time to stop it
NOWHERE = "http://leak.invalid"
HOSTILE = f"""<script>document.title = "owned"</script>
<img src=x onerror="document.title='owned'"> <img src="{NOWHERE}/1.png">
<svg onload="document.title='owned'"><a href="javascript:document.title='owned'" onclick="1">e</a>
<iframe src="{NOWHERE}/2"></iframe><style>@import url({NOWHERE}/3);</style><link rel=stylesheet href={NOWHERE}/4>

![x]({NOWHERE}/5.png) ![y](javascript:document.title='owned') ![z](data:image/png;base64,AAAA)
![w](//leak.invalid/6.png)
[a](javascript:document.title='owned') [b](data:text/html,<script>1</script>) [c](vbscript:x) <javascript:1>
[d]({NOWHERE}/read "t") [e](/v1/models) [f][ref] [g](JaVaScRiPt&colon;1) [h]( javascript&#58;1)

[ref]: javascript:document.title='owned'

| <img src={NOWHERE}/7> |
|:--|
| <math><mtext><img src={NOWHERE}/8 onerror=1> |

```html"><img src={NOWHERE}/9>
<script>document.title = "owned"</script>
```"""
TEXT = "(document.querySelector('.answer:last-child .text')?.textContent ?? '')"
DONE = (
    "document.querySelector('.answer') && !document.querySelector('.answer.busy')"
    " && document.querySelector('#stop').hidden"
)
READY = "document.querySelector('#model').textContent === 'tiny'"

FOCUSED = "return document.activeElement.id || document.activeElement.getAttribute('aria-label')"
RINGED = """
    const at = document.activeElement;
    const style = getComputedStyle(at.closest('.box') ?? at);
    return at === document.body || style.outlineStyle !== 'none' || style.boxShadow !== 'none'
"""
TOO_WIDE = """
    return [...document.querySelectorAll('main *')]
      .filter((e) => !e.closest('.scroll, pre, .unseen, svg') && e.getBoundingClientRect().right > 361)
      .map((e) => e.className)
"""
ARMED = """
    return [...document.querySelectorAll('#messages *')]
      .flatMap((e) => e.getAttributeNames())
      .filter((name) => name.startsWith('on') || name === 'style' || name === 'src')
"""
VIOLATIONS = """
    const tags = ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa', 'best-practice'];
    return axe.run({runOnly: tags}).then((found) => found.violations.map(
      (v) => v.id + ': ' + v.nodes.map((n) => n.html + n.failureSummary).join(' | ')))
"""
REFUSED = """
    const refused = [];
    document.addEventListener('securitypolicyviolation', (e) => refused.push(e.effectiveDirective));
    const tried = (f) => { try { f(); return 'allowed'; } catch (e) { return e.name; } };
    const made = [
      tried(() => { document.body.innerHTML = '<img src=x onerror=1>'; }),
      tried(() => { document.createElement('script').textContent = '1'; }),
      tried(() => trustedTypes.createPolicy('mine', {})),
    ];
    const image = new Image(); image.src = 'ELSEWHERE/1.png'; document.body.append(image);
    fetch('ELSEWHERE/2').catch(() => 0);
    document.body.setAttribute('style', 'color: red');
    return new Promise((done) => setTimeout(() => done([made, [...new Set(refused)].sort()]), 300));
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("port")
    port = write_port(folder)
    levels = [{"level": 0, "name": "prompt", "status": "pass", "reason": "fine"}]
    provenance = {"port_digest": port.record.digest}
    report = {"verdict": "works", "levels": levels, "provenance": provenance}
    (folder / "validation.json").write_text(json.dumps(report))
    port.append("events.jsonl", {"event": "worker_died", "why": HOSTILE[:60]})
    with running(port.source_folder, FakeRunner(max_context=4096), port=port) as found:
        yield found


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(window: Browser, server: RunningServer) -> Iterator[Browser]:
    """A fresh page; at the end nothing was logged and nobody else was asked for anything."""
    show(window, server)
    yield window
    assert window.console() == []
    asked = window.requests()
    assert all(address.startswith(f"{server.url}/") for address in asked), asked


def show(window: Browser, server: RunningServer) -> None:
    window.resize(1200, 800)
    window.dark(False)
    window.open(server.url)
    window.run("localStorage.clear(); sessionStorage.clear()")
    window.open("about:blank")
    window.open(server.url)
    window.wait(READY)


def forget(window: Browser) -> None:
    """What a test meant to be logged or asked for is not the next one's."""
    window.console()
    window.requests()


def say(server: RunningServer, text: str, *, step: float = 0.0) -> None:
    """What the model answers from now on, and how fast."""
    server.runner.script = script_of(server.assets, text)
    server.runner.step_seconds = step


def decoded(server: RunningServer) -> int:
    return sum(name == "decode" for name, _ in server.runner.calls)


def test_a_chat_is_typed_streamed_stopped_and_answered_again(
    page: Browser, server: RunningServer
) -> None:
    say(server, THOUGHT + LONG, step=0.03)
    page.click("#prompt")
    page.type("Tell me <b>more</b>")
    page.click("#send")
    part = page.wait(f"({TEXT}).length > 20 && {TEXT}")
    assert LONG.startswith(part.strip()) and len(part) < len(LONG) - 100
    assert "tokens/s · first after" in page.run(
        "return document.querySelector('.stats').textContent"
    )
    assert page.run("return document.querySelector('.bubble').textContent") == "Tell me <b>more</b>"
    page.click("#stop")
    page.wait(DONE)
    assert "stopped" in page.run("return document.querySelector('.stats').textContent")
    assert page.run("return document.querySelector('.stats').textContent").startswith("about ")
    made = decoded(server)
    assert page.run(f"return {TEXT}").strip() != LONG.strip()

    say(server, PLAIN)
    page.click("[aria-label='Answer again']")
    page.wait(f"{DONE} && ({TEXT}).includes('print(1)')")
    again = len(script_of(server.assets, PLAIN))
    assert decoded(server) - made < again + 5, "the stopped answer gave its slot back"
    assert page.run("return document.querySelector('.text strong').textContent") == "ways"
    assert page.run("return document.querySelector('.text td.right').textContent") == "2"
    assert page.run("return document.querySelector('.variants span').textContent") == "2/2"
    page.click("[aria-label='Previous answer']")
    assert "First I count." in page.run("return document.querySelector('.thought').textContent")
    assert page.run("return document.querySelector('.thought').open") is False, "folded away"


def test_code_is_copied(page: Browser, server: RunningServer) -> None:
    granted = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.devtools("Browser.grantPermissions", granted)
    say(server, PLAIN)
    page.type("code", "Enter")
    page.wait(DONE)
    page.click("[aria-label='Copy python code']")
    page.wait("document.querySelector('.code .link').textContent === 'Copied'")
    assert page.run("return navigator.clipboard.readText()") == "print(1)"


def test_keyboard_only(page: Browser, server: RunningServer) -> None:
    say(server, LONG, step=0.03)
    page.type("one", "Shift+Enter", "two", "Enter")
    page.wait(f"({TEXT}).length > 10")
    page.type("Escape")
    page.wait(DONE)
    assert page.run("return document.querySelector('.bubble').textContent") == "one\ntwo"
    say(server, "Short.")
    page.type("Alt+r")
    page.wait(f"{DONE} && {TEXT}.trim() === 'Short.'")
    page.type("Alt+n", "second", "Enter")
    page.wait("document.querySelectorAll('#chats a').length === 2")
    page.wait(DONE)
    page.type("Alt+Down")
    page.wait("document.querySelector('#title').textContent.startsWith('one')")
    page.type("Alt+,", "Be brief.", "Alt+,")
    assert (
        page.run("return document.querySelector('#system-line').textContent") == "System: Be brief."
    )
    assert page.run(FOCUSED) == "to-settings", "where it was opened"
    seen = set()
    for _ in range(25):
        page.type("Tab")
        seen.add(page.run(FOCUSED))
        assert page.run(RINGED), page.run(FOCUSED)
    assert {"prompt", "new-chat", "log", "Answer again", "Copy message", "Delete second"} <= seen
    page.run("document.querySelector('#new-chat').focus()")
    page.type("?")
    assert page.run("return document.querySelector('#keys-dialog').open")
    page.type("Escape", "/", "typed")
    assert page.run("return document.querySelector('#prompt').value") == "typed"
    page.type("Alt+s")
    page.wait("document.querySelector('.verdict h2')?.textContent === 'works'")


def test_conversations_and_settings_are_kept_and_sent(page: Browser, server: RunningServer) -> None:
    say(server, "Kept.")
    page.type("Alt+,", "Speak plainly.", "Alt+,", "Alt+,")
    page.run("document.querySelector('#temperature').focus()")
    page.type("0.5", "Alt+,", "/", "first", "Enter")
    page.wait(DONE)
    page.type("Alt+n", "other", "Enter")
    page.wait(f"{DONE} && document.querySelectorAll('#chats a').length === 2")
    page.open(f"{server.url}/#")
    page.run("location.reload()")
    page.wait(f"{READY} && document.querySelectorAll('#chats a').length === 2")
    page.run("document.querySelectorAll('#chats a')[1].click()")
    page.wait("document.querySelector('.bubble')?.textContent === 'first'")
    assert page.run(f"return {TEXT}").strip() == "Kept."
    assert page.run("return document.querySelector('#system').value") == "Speak plainly."
    assert page.run("return document.querySelector('#temperature').value") == "0.5"
    page.run(
        "window.bodies = []; const f = fetch; window.fetch = (u, i) => (i?.body && bodies.push(i.body), f(u, i))"
    )
    page.click("[aria-label='Answer again']")
    page.wait(f"{DONE} && window.bodies.length === 1")
    body: dict[str, Any] = json.loads(page.run("return window.bodies[0]"))
    assert body["messages"] == [
        {"role": "system", "content": "Speak plainly."},
        {"role": "user", "content": "first"},
    ]
    assert body["temperature"] == 0.5 and "seed" not in body and "top_p" not in body
    page.click("[aria-label='Delete first']")
    page.wait("document.querySelectorAll('#chats a').length === 1")
    page.click("#undo")
    page.wait("document.querySelectorAll('#chats a').length === 2")


def test_what_a_model_says_runs_nothing_and_fetches_nothing(
    page: Browser, server: RunningServer
) -> None:
    say(server, THOUGHT.replace("First", HOSTILE.replace("\n", " ")) + HOSTILE)
    page.type(HOSTILE.splitlines()[0], "Enter")
    page.wait(DONE, 60)
    tags = page.run(
        "return [...new Set([...document.querySelectorAll('#messages *')].map(e => e.localName))]"
    )
    allowed = "a b button code details div em h2 li p path pre span strong summary svg table tbody td th thead tr use"
    assert set(tags) <= {*allowed.split(), "br"}
    page.run("document.querySelectorAll('.text *').forEach(e => e.localName !== 'a' && e.click())")
    links = page.run(
        "return [...document.querySelectorAll('.text a')].map(a => [a.getAttribute('href'), a.rel])"
    )
    assert {f"{NOWHERE}/read", f"{NOWHERE}/5.png"} <= {href for href, _ in links}
    assert all(href.startswith(f"{NOWHERE}/") and "noopener" in rel for href, rel in links)
    assert page.run(ARMED) == []
    assert page.run("return document.title") == f"{HOSTILE.splitlines()[0]} – gemma-neuron"


def test_the_policy_holds_where_the_sanitiser_is_not_asked(
    window: Browser, server: RunningServer
) -> None:
    show(window, server)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        address = f"http://127.0.0.1:{elsewhere.getsockname()[1]}"
        made, violated = window.run(REFUSED.replace("ELSEWHERE", address))
        elsewhere.settimeout(0.1)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    assert made == ["TypeError"] * 3
    directives = {"img-src", "connect-src", "style-src-attr", "require-trusted-types-for"}
    assert directives <= set(violated)
    forget(window)


def test_phone_width(page: Browser, server: RunningServer) -> None:
    page.resize(360, 740)
    say(server, PLAIN + "\n\n```\n" + "x = 1; " * 30 + "\n```\n\n" + "a" * 120)
    page.click("#prompt")
    page.type("on a phone")
    page.click("#send")
    page.wait(DONE)
    page.type("Alt+s")
    for _ in range(2):
        assert page.run("return document.documentElement.scrollWidth") == 360
        assert page.run(TOO_WIDE) == []
        page.type("Alt+s")
    page.type("Alt+s")
    page.click("#menu")
    page.wait("getComputedStyle(document.querySelector('#sidebar')).translate.startsWith('0')")
    assert page.run("return document.querySelector('#main').inert")
    page.click("#new-chat")
    page.wait("!document.querySelector('#main').inert")
    assert page.run("return document.querySelector('#title').textContent") == "New chat"


def test_axe_finds_nothing_in_light_and_dark(page: Browser, server: RunningServer) -> None:
    say(server, THOUGHT + PLAIN)
    page.type("look", "Enter")
    page.wait(DONE)
    page.type("Alt+r")
    page.wait(f"{DONE} && document.querySelector('.variants')")
    page.run(AXE.read_text())
    found: list[str] = []
    for view in ("", "Alt+,", "?", "Alt+s"):
        page.run("document.querySelector('#new-chat').focus()")
        page.run("document.querySelector('.thought').open = true")
        if view:
            page.type(view)
        page.wait("!location.hash.includes('status') || document.querySelector('.verdict')")
        for dark in (False, True):
            page.dark(dark)
            found += [f"{view} {dark}: {text}" for text in page.run(VIOLATIONS)]
        if view == "?":
            page.type("Escape")
    assert found == []


def test_the_key_is_asked_for_where_there_is_one(
    window: Browser, server: RunningServer, folder: Path
) -> None:
    with running(
        folder, rules=AccessRules(api_key="secret"), validated=False, verdict=None
    ) as guarded:
        window.open(guarded.url)
        window.wait("document.querySelector('#key-dialog').open")
        window.type("wrong", "Enter")
        window.wait("!document.querySelector('#key-trouble').hidden")
        window.type("Escape", "secret", "Enter")
        window.wait(READY)
        assert window.run("return document.querySelector('#badge').textContent") == "unvalidated"
        assert "unvalidated" in window.run(
            "return document.querySelector('#greeting-note').textContent"
        )
        assert not window.run("return JSON.stringify({...localStorage}).includes('secret')")
        window.open("about:blank")
    forget(window)
