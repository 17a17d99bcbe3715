"""What people's clients ask of an OpenAI server, each through its own library.

`python -m scripts.clients.ask URL SOURCE` runs where those libraries are, beside the toolkit's sources. SOURCE: the
folder with the model's tokenizer. The bundled model answers questions on capitals and calls tools.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASKED_FOR_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
MODEL = "port"
CLIENTS = ("openai", "curl", "langchain", "litellm", "lm-eval")
Case = tuple[str, Callable[[], object]]


class Wrong(Exception):
    """The client got something else than it should."""


def require(holds: object, found: object) -> object:
    if not holds:
        raise Wrong(f"got {found!r}"[:400])
    return found


def openai_cases(url: str) -> Iterator[Case]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    create: Any = client.chat.completions.create

    def asked(**more: Any) -> Any:
        return create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0} | more)

    def streamed() -> object:
        chunks = [chunk for chunk in asked(stream=True) if chunk.choices]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return require(text == asked().choices[0].message.content, text)

    def tools() -> object:
        message = asked(messages=ASKED_FOR_WEATHER, tools=[WEATHER], tool_choice="required")
        (call,) = message.choices[0].message.tool_calls
        return require("city" in json.loads(call.function.arguments), call.function)

    def schema() -> object:
        text = asked(response_format=FORMAT).choices[0].message.content
        return require(set(json.loads(text)) == {"city"}, text)

    def logprobs() -> object:
        (first, *_) = asked(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        return require(len(first.top_logprobs) == 3 and first.logprob <= 0, first)

    def stop() -> object:
        text = asked(stop=[ANSWER]).choices[0].message.content
        return require(ANSWER not in text and text, text)

    def error() -> object:
        try:
            return require(False, asked(extra_body={"mirostat": 2}))
        except openai.BadRequestError as found:
            return require("mirostat" in str(found), found)

    def chat() -> object:
        text = asked().choices[0].message.content
        return require(ANSWER in text, text)

    for case in (chat, streamed, tools, schema, logprobs, stop, error):
        yield case.__name__, case


def curl_cases(url: str) -> Iterator[Case]:
    def posted(body: dict[str, Any], *flags: str) -> str:
        command = ["curl", "-sS", *flags, f"{url}/v1/chat/completions"]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0}

    def chat() -> object:
        text = json.loads(posted(body))["choices"][0]["message"]["content"]
        return require(ANSWER in text, text)

    def streamed() -> object:
        lines = [line for line in posted(body | {"stream": True}, "-N").splitlines() if line]
        return require(len(lines) > 2 and lines[-1] == "data: [DONE]", lines[-3:])

    def first(**more: Any) -> Any:
        return json.loads(posted(body | more))["choices"][0]

    def tools() -> object:
        asked = {"messages": ASKED_FOR_WEATHER, "tools": [WEATHER], "tool_choice": "required"}
        (call,) = first(**asked)["message"]["tool_calls"]
        return require("city" in json.loads(call["function"]["arguments"]), call)

    def schema() -> object:
        text = first(response_format=FORMAT)["message"]["content"]
        return require(set(json.loads(text)) == {"city"}, text)

    def logprobs() -> object:
        entry = first(logprobs=True, top_logprobs=3)["logprobs"]["content"][0]
        return require(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 3, entry)

    def stop() -> object:
        choice = first(stop=[ANSWER])
        text = choice["message"]["content"]
        return require(ANSWER not in text and choice["finish_reason"] == "stop", choice)

    def error() -> object:
        status = posted(body | {"best_of": 3}, "-o", "/dev/null", "-w", "%{http_code}")
        return require(status == "400", status)

    for case in (chat, streamed, tools, schema, logprobs, stop, error):
        yield case.__name__, case


def langchain_cases(url: str) -> Iterator[Case]:
    import openai
    from langchain_openai import ChatOpenAI

    made: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL}
    model = ChatOpenAI(**made, temperature=0, max_retries=0)

    def chat() -> object:
        text = model.invoke(QUESTION).content
        return require(ANSWER in text, text)

    def streamed() -> object:
        text = "".join(str(chunk.content) for chunk in model.stream(QUESTION))
        return require(text == model.invoke(QUESTION).content, text)

    def tools() -> object:
        bound = model.bind_tools([WEATHER], tool_choice="required")
        (call,) = bound.invoke(ASKED_FOR_WEATHER[0]["content"]).tool_calls
        return require(call["name"] == "get_weather" and "city" in call["args"], call)

    def schema() -> object:
        wanted = SCHEMA | {"title": "city"}
        found = model.with_structured_output(wanted, method="json_schema").invoke(QUESTION)
        return require(isinstance(found, dict) and set(found) == {"city"}, found)

    def logprobs() -> object:
        found = model.bind(logprobs=True).invoke(QUESTION).response_metadata["logprobs"]
        return require(found["content"][0]["logprob"] <= 0, found)

    def stop() -> object:
        text = model.invoke(QUESTION, stop=[ANSWER]).content
        return require(ANSWER not in text and text, text)

    def error() -> object:
        try:
            return require(False, model.bind(extra_body={"mirostat": 2}).invoke(QUESTION))
        except openai.BadRequestError as found:
            return require("mirostat" in str(found), found)

    for case in (chat, streamed, tools, schema, logprobs, stop, error):
        yield case.__name__, case


def litellm_cases(url: str) -> Iterator[Case]:
    import litellm

    litellm.telemetry = False

    def asked(**more: Any) -> Any:
        told = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
        return litellm.completion(**told | {"messages": MESSAGES, "temperature": 0} | more)

    def chat() -> object:
        text = asked().choices[0].message.content
        return require(ANSWER in text, text)

    def streamed() -> object:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in asked(stream=True))
        return require(text == asked().choices[0].message.content, text)

    def tools() -> object:
        wanted = {"messages": ASKED_FOR_WEATHER, "tools": [WEATHER], "tool_choice": "required"}
        (call,) = asked(**wanted).choices[0].message.tool_calls
        return require("city" in json.loads(call.function.arguments), call.function)

    def schema() -> object:
        text = asked(response_format=FORMAT).choices[0].message.content
        return require(set(json.loads(text)) == {"city"}, text)

    def logprobs() -> object:
        entry = asked(logprobs=True, top_logprobs=3).choices[0].logprobs.content[0]
        return require(entry.logprob <= 0 and len(entry.top_logprobs) == 3, entry)

    def stop() -> object:
        text = asked(stop=[ANSWER]).choices[0].message.content
        return require(ANSWER not in text and text, text)

    def error() -> object:
        try:
            return require(False, asked(extra_body={"mirostat": 2}))
        except litellm.BadRequestError as found:
            return require("mirostat" in str(found), found)

    for case in (chat, streamed, tools, schema, logprobs, stop, error):
        yield case.__name__, case


def lm_eval_cases(url: str, source: Path) -> Iterator[Case]:
    from gemma_neuron.validation.tasks import own_tasks, run_tasks

    def tasks() -> object:
        found = run_tasks(url, source, own_tasks(), chat=True, max_context=256, limit=4)
        return require(all(figures["samples"] == 4 for figures in found.values()), found)

    yield tasks.__name__, tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("source", type=Path)
    parser.add_argument("--only", action="append", default=[], choices=CLIENTS)
    asked = parser.parse_args()
    clients: dict[str, Callable[[], Iterator[Case]]] = {
        "openai": lambda: openai_cases(asked.url),
        "curl": lambda: curl_cases(asked.url),
        "langchain": lambda: langchain_cases(asked.url),
        "litellm": lambda: litellm_cases(asked.url),
        "lm-eval": lambda: lm_eval_cases(asked.url, asked.source),
    }
    failed = 0
    for client in asked.only or CLIENTS:
        for name, case in clients[client]():
            try:
                status, shown = "pass", case()
            except Exception as error:  # whatever a client raises is what its user would see
                status, shown, failed = "FAIL", f"{type(error).__name__}: {error}", failed + 1
            print(f"{status}  {client}: {name}  {str(shown)[:160]}", flush=True)
    print(f"{failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
