"""A real server on loopback for tests: a folder with a tiny tokenizer, a fake runner, uvicorn in a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import uvicorn

from gemma_neuron.chat import ChatAssets, load_chat_assets
from gemma_neuron.port import Fingerprints, Port, PortRecord, SourceRecord
from gemma_neuron.serving.access import AccessRules
from gemma_neuron.serving.connections import Connection
from gemma_neuron.serving.engine import Engine
from gemma_neuron.serving.http import create_app
from gemma_neuron.serving.local import listen
from gemma_neuron.serving.service import ServerInfo, Service
from tests.chat.templates import GEMMA3, GEMMA4
from tests.serving.fake_runner import FakeRunner
from tests.tiny_tokenizer import write_tokenizer

VOCAB = 600
USER: list[Any] = [{"role": "user", "content": "hello"}]
SAID = "It is the end, é and 😀: STOP here and there."


def write_source(
    folder: Path,
    *,
    family: str = "gemma4",
    template: str | None = None,
    stops: tuple[int, ...] = (1, 106, 50),
) -> Path:
    """A checkpoint folder without weights: configs, tokenizer, template."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, family, VOCAB)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [1, 106], "bos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops)}))
    text = template if template is not None else {"gemma4": GEMMA4, "gemma3": GEMMA3}[family]
    if text:
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    return folder


def write_port(folder: Path, *, verdict: str | None = "works", template: str | None = None) -> Port:
    """A port folder that holds what serving reads, and no graphs."""
    write_source(folder / "source", template=template)
    port = Port(folder)
    port.write_record(
        PortRecord(
            source=SourceRecord(kind="folder", uri="/models/tiny-it"),
            fingerprints=Fingerprints(
                config="c", checkpoint="k", template="t", prompt="f", plan="p"
            ),
            versions={},
        )
    )
    if verdict is not None:
        provenance = {"port_digest": port.record.digest}
        (folder / "validation.json").write_text(
            json.dumps({"verdict": verdict, "provenance": provenance})
        )
    return port


def script_of(assets: ChatAssets, text: str, *, stop: int | None = 106) -> list[int]:
    """Token ids that say `text` and then stop."""
    ids = assets.tokenizer.encode(text)
    return ids if stop is None else [*ids, stop]


@dataclass
class RunningServer:
    url: str
    engine: Engine
    runner: FakeRunner
    assets: ChatAssets
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=options.pop("api_key", "none"),
            max_retries=0,
            **options,
        )
        self.clients.append(client)
        return client


@contextmanager
def running(
    folder: Path,
    runner: FakeRunner | None = None,
    *,
    rules: AccessRules | None = None,
    load: bool = True,
    **info: Any,
) -> Iterator[RunningServer]:
    """The application over a fake runner, in a thread, on a free port."""
    fake = runner or FakeRunner()
    assets = load_chat_assets(folder)
    engine = Engine(
        lambda: fake, tokenizer_file=folder / "tokenizer.json", stop_ids=assets.stop_ids
    )
    known: dict[str, Any] = {"model_id": "tiny", "validated": True, "verdict": "works"}
    facts = ServerInfo(**(known | info))
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(Service(engine, assets, facts), rules),
        log_config=None,
        lifespan="off",
        http=Connection,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    if load:
        engine.start()
        assert engine.wait_loaded(30)
    while not server.started:
        time.sleep(0.005)
    found = RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, fake, assets)
    try:
        yield found
    finally:
        for client in found.clients:
            client.close()
        server.should_exit = True
        thread.join()
        engine.close()
        if assets.template is not None:
            assets.template.close()


def chat(server: RunningServer, **options: Any) -> Any:
    return server.client().chat.completions.create(**({"model": "any", "messages": USER} | options))


def streamed(server: RunningServer, **options: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Text and finish reason by choice, and the usage, of a streamed chat."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    counts = None
    for chunk in chat(server, stream=True, stream_options={"include_usage": True}, **options):
        counts = chunk.usage or counts
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, counts


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
