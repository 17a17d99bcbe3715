"""The server's own state: readiness, failure, clients that leave, the model's own settings."""

from __future__ import annotations

import time
from pathlib import Path

import httpx2
import openai
import pytest

from gemma_neuron.serving.service import placeholder_ids, sampling_defaults
from tests.serving.fake_runner import FakeRunner
from tests.serving.server import (
    USER,
    RunningServer,
    chat,
    running,
)


def test_models_say_whether_they_are_validated(folder: Path, free: RunningServer) -> None:
    model = free.client().models.list().data[0]
    assert model.id == "tiny"
    assert model.validated is True  # type: ignore[attr-defined]
    assert free.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="There is no model"):
        free.client().models.retrieve("other")
    with running(folder, validated=False, verdict=None) as server:
        entry = httpx2.get(f"{server.url}/v1/models").json()["data"][0]
        assert entry["validated"] is False
        assert "unvalidated" in entry["note"]


def test_not_ready_until_loaded(folder: Path) -> None:
    with running(folder, load=False) as server:
        assert httpx2.get(f"{server.url}/health/live").json() == {"status": "live"}
        ready = httpx2.get(f"{server.url}/health/ready")
        assert (ready.status_code, ready.json()["phase"]) == (503, "starting")
        with pytest.raises(openai.InternalServerError, match="not ready"):
            chat(server)
        server.engine.start()
        assert server.engine.wait_loaded(30)
        ready = httpx2.get(f"{server.url}/health/ready")
        assert (ready.status_code, ready.json()["phase"]) == (200, "ready")
        assert ready.json()["replicas"][0]["index"] == 0


def test_engine_failure_is_an_error_in_stream_and_answer_and_ends_readiness(folder: Path) -> None:
    runner = FakeRunner()
    runner.fail_after = 4
    with running(folder, runner) as server:
        with pytest.raises(openai.APIError, match="device lost"):
            for _ in chat(server, stream=True):
                pass
        assert httpx2.get(f"{server.url}/health/ready").status_code == 503
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
    runner = FakeRunner()
    runner.fail_after = 4
    with running(folder, runner) as server, pytest.raises(openai.InternalServerError, match="lost"):
        chat(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(folder: Path, stream: bool) -> None:
    runner = FakeRunner(slots=1, max_context=10_000, step_seconds=0.005)
    with running(folder, runner) as server:
        if stream:
            answer = chat(server, stream=True)
            next(iter(answer))
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                server.client(timeout=0.3).chat.completions.create(model="any", messages=USER)
        began = time.monotonic()
        chat(server, max_tokens=2)
        assert time.monotonic() - began < 5


def test_an_answer_past_the_time_limit_is_an_error(folder: Path) -> None:
    runner = FakeRunner(max_context=10_000, step_seconds=0.01)
    with (
        running(folder, runner, request_seconds=0.2) as server,
        pytest.raises(openai.InternalServerError, match=r"longer than 0\.2 s"),
    ):
        chat(server)


def test_sampling_defaults_are_the_models(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert sampling_defaults(tmp_path).temperature == 0.0
    file.write_text('{"temperature": 1.0, "top_k": 64}')
    assert sampling_defaults(tmp_path).temperature == 0.0
    file.write_text('{"do_sample": true, "top_k": 64, "top_p": 0.95}')
    found = sampling_defaults(tmp_path)
    assert (found.temperature, found.top_k, found.top_p) == (1.0, 64, 0.95)


def test_placeholder_ids_come_from_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"image_token_id": 258880, "boi_token_index": 255999, "bos_token_id": 2, "audio_token_id": null}'
    )
    assert placeholder_ids(tmp_path) == (255999, 258880)
