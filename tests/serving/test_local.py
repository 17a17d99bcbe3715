"""`serve` in a real process: the gate, what it announces, signals, refusals to start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from gemma_neuron import interrupts
from gemma_neuron.commands.serving import serve_local
from gemma_neuron.errors import IntegrityError, Interrupted, UsageError
from gemma_neuron.port import Port
from gemma_neuron.serving.local import access_rules, model_id
from tests.serving.serve_process import SAID
from tests.serving.server import write_port

USER: list[Any] = [{"role": "user", "content": "hello"}]


@contextmanager
def process(folder: Path, *knobs: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    found = subprocess.Popen(
        [sys.executable, "-m", "tests.serving.serve_process", str(folder), *knobs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"GEMMA_NEURON_API_KEY": ""} | env,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield found
    finally:
        found.kill()
        found.communicate()


def announced(found: subprocess.Popen[str]) -> dict[str, Any]:
    assert found.stdout is not None
    line = found.stdout.readline()
    assert line, found.communicate()
    facts = json.loads(line)
    assert isinstance(facts, dict)
    return facts


def ended(found: subprocess.Popen[str], seconds: float = 30) -> tuple[int, str]:
    _, errors = found.communicate(timeout=seconds)
    return found.returncode, errors


def test_serves_and_ends_at_once_when_idle(tmp_path: Path) -> None:
    write_port(tmp_path)
    with process(tmp_path) as found:
        facts = announced(found)
        assert facts["pid"] == found.pid
        ((index, pid),) = [(r["index"], r["pid"]) for r in facts["replicas"]]
        assert (index, pid != found.pid) == (0, True)
        ready = httpx2.get(facts["url"] + "/health/ready").json()
        assert (ready["phase"], ready["replicas"]) == ("ready", facts["replicas"])
        with openai.OpenAI(base_url=facts["url"] + "/v1", api_key="none") as client:
            answer = client.chat.completions.create(model="any", messages=USER)
            assert answer.choices[0].message.content == SAID
            assert answer.model == "tiny-it"
        found.send_signal(signal.SIGTERM)
        assert ended(found) == (0, "")


def test_sigterm_before_it_listens_for_one_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, ends in ((interrupts.SIGTERM, True), (interrupts.CTRL_C, False)):

        def asked(*_: object, error: Interrupted = error) -> None:
            raise interrupts.Stop(error)

        monkeypatch.setattr("gemma_neuron.pipeline.open_port", asked)
        with nullcontext() if ends else pytest.raises(interrupts.Stop):
            serve_local(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{"])
def test_a_verdict_that_cannot_be_read_is_said(tmp_path: Path, text: str) -> None:
    port = write_port(tmp_path)
    (tmp_path / "validation.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"validation\.json is not readable"):
        port.verdict()
    (tmp_path / "validation.json").write_text('{"verdict": "works", "provenance": [1]}')
    assert port.verdict() is None
    # A port whose hidden states are not finite has such distances in its report.
    known = f'{{"verdict": "differs", "drift": [Infinity], "provenance": {{"port_digest": "{port.record.digest}"}}}}'
    (tmp_path / "validation.json").write_text(known)
    assert port.verdict() == "differs"


def test_sigterm_lets_the_running_stream_end_and_refuses_new_requests(tmp_path: Path) -> None:
    write_port(tmp_path)
    with process(tmp_path, "step=0.05") as found:
        url = announced(found)["url"]
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="any", messages=USER, stream=True)
            text, signalled = "", False
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text and not signalled:
                    signalled = True
                    found.send_signal(signal.SIGTERM)
                    time.sleep(0.3)
                    assert httpx2.get(url + "/health/ready").status_code == 503
                    assert httpx2.get(url + "/health/live").status_code == 200
                    with pytest.raises(openai.InternalServerError, match="draining"):
                        client.chat.completions.create(model="any", messages=USER)
            assert text == SAID
        assert ended(found) == (0, "")


def test_a_drain_that_runs_out_of_time_ends_every_answer_with_an_error(tmp_path: Path) -> None:
    write_port(tmp_path)
    with process(tmp_path, "step=0.4", "drain=0.5") as found:
        url = announced(found)["url"]
        body = {"messages": USER}
        whole: list[httpx2.Response] = []

        def ask() -> None:
            whole.append(httpx2.post(url + "/v1/chat/completions", json=body, timeout=60))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        lines: list[str] = []
        with httpx2.stream(
            "POST", url + "/v1/chat/completions", json=body | {"stream": True}, timeout=60
        ) as stream:
            for line in stream.iter_lines():
                if line and not lines:
                    found.send_signal(signal.SIGTERM)
                lines += [line] if line else []
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["message"] == "The server stopped before the answer was complete."
        assert ended(found) == (0, "")
        thread.join()
        assert whole[0].status_code == 500
        assert whole[0].json()["error"] == error


def test_a_request_that_never_comes_whole_is_told_of_the_servers_end(tmp_path: Path) -> None:
    write_port(tmp_path)
    with process(tmp_path) as found:
        host, port = announced(found)["url"].removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=40) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
            time.sleep(0.5)
            found.send_signal(signal.SIGTERM)
            with client.makefile("rb") as reply:
                lines = reply.read().splitlines()
        assert lines[0].split()[1] == b"503"
        assert json.loads(lines[-1])["error"]["code"] == "not_ready"
        assert ended(found)[0] == 0


def test_ctrl_c_drains_and_twice_ends_at_once(tmp_path: Path) -> None:
    write_port(tmp_path)
    with process(tmp_path) as found:
        announced(found)
        found.send_signal(signal.SIGINT)
        assert ended(found)[0] == 130
    with process(tmp_path, "step=1.0") as found:
        url = announced(found)["url"]
        errors: list[Exception] = []

        def ask() -> None:
            try:
                with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
                    client.chat.completions.create(model="any", messages=USER)
            except openai.OpenAIError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(1.0)
        found.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert found.poll() is None
        found.send_signal(signal.SIGINT)
        assert ended(found, 15)[0] == 130
        thread.join()
        assert errors


def test_live_while_loading_and_sigterm_ends_a_load(tmp_path: Path) -> None:
    write_port(tmp_path)
    port = free_port()
    with process(tmp_path, "load=5", f"port={port}") as found:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                assert httpx2.get(f"http://127.0.0.1:{port}/health/live").status_code == 200
                break
            except httpx2.ConnectError:
                time.sleep(0.02)
        ready = httpx2.get(f"http://127.0.0.1:{port}/health/ready")
        assert (ready.status_code, ready.json()["phase"]) == (503, "loading")
        found.send_signal(signal.SIGTERM)
        assert ended(found)[0] == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("verdict", [None, "matches-but-broken", "differs", "insufficient"])
def test_the_gate(tmp_path: Path, verdict: str | None) -> None:
    write_port(tmp_path, verdict=verdict)
    with process(tmp_path) as found:
        code, text = ended(found)
    assert code == 7
    assert (verdict or "has not been validated") in text
    assert f"gemma-neuron validate {tmp_path}" in text
    assert "--unvalidated" in text


def test_unvalidated_is_served_when_asked_for_and_says_so(tmp_path: Path) -> None:
    write_port(tmp_path, verdict="differs")
    with process(tmp_path, "unvalidated=1") as found:
        entry = httpx2.get(announced(found)["url"] + "/v1/models").json()["data"][0]
        assert (entry["validated"], entry["verdict"]) == (False, "differs")
        assert "unvalidated" in entry["note"]


def test_refusals_to_start(tmp_path: Path) -> None:
    write_port(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with process(tmp_path, f"port={taken.getsockname()[1]}") as found:
            code, text = ended(found)
        assert code == 8
        assert "Cannot listen on 127.0.0.1" in text
    with process(tmp_path, "broken=1") as found:
        assert ended(found) == (6, "The graph is of another machine.\nCompile again.\n")
    with process(tmp_path, "host=0.0.0.0") as found:
        code, text = ended(found)
        assert code == 2
        assert "GEMMA_NEURON_API_KEY" in text
    (tmp_path / "validation.json").write_text("{")
    with process(tmp_path) as found:
        assert ended(found)[0] == 5
    # a report that does not say of which port it is
    (tmp_path / "validation.json").write_text('{"verdict": "works"}')
    with process(tmp_path) as found:
        assert ended(found)[0] == 7
    report = {"verdict": "works", "provenance": {"port_digest": Port(tmp_path).record.digest}}
    (tmp_path / "validation.json").write_text(json.dumps(report))
    (tmp_path / "source" / "chat_template.jinja").write_text("{% if %}")
    with process(tmp_path) as found:
        code, text = ended(found)
        assert code == 3
        assert "chat_template.jinja" in text
    (tmp_path / "source" / "tokenizer.json").unlink()
    with process(tmp_path) as found:
        code, text = ended(found)
        assert code == 3
        assert "tokenizer.json" in text


def test_beyond_loopback_the_key_is_needed_and_any_name_is_answered(tmp_path: Path) -> None:
    write_port(tmp_path)
    with process(tmp_path, "host=0.0.0.0", GEMMA_NEURON_API_KEY="secret") as found:
        url = announced(found)["url"]
        headers = {"host": "gemma.example"}
        assert httpx2.get(url + "/v1/models", headers=headers).status_code == 401
        headers["authorization"] = "Bearer secret"
        assert httpx2.get(url + "/v1/models", headers=headers).status_code == 200


def test_access_rules() -> None:
    assert access_rules("127.0.0.1", None, no_auth=False).api_key is None
    assert access_rules("localhost", "k", no_auth=False).api_key == "k"
    named = access_rules("10.0.0.5", "k", no_auth=False).hosts
    assert named == frozenset({"localhost", "127.0.0.1", "::1", "10.0.0.5"})
    assert access_rules("0.0.0.0", "k", no_auth=False).hosts is None
    behind_a_proxy = access_rules("127.0.0.1", None, no_auth=False, allow_hosts=["Chat.example"])
    assert behind_a_proxy.hosts == frozenset({"localhost", "127.0.0.1", "::1", "chat.example"})
    with pytest.raises(UsageError, match=r"10\.0\.0\.5"):
        access_rules("10.0.0.5", None, no_auth=False)


def test_model_id_is_the_sources_name(tmp_path: Path) -> None:
    assert model_id(write_port(tmp_path)) == "tiny-it"
