"""The HTTP face: routes, server-sent events, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from gemma_neuron.serving import openai_chat, openai_completions
from gemma_neuron.serving.access import AccessGuard, AccessRules
from gemma_neuron.serving.api_types import ChatBody, CompletionBody
from gemma_neuron.serving.errors import ApiError
from gemma_neuron.serving.metrics import CONTENT_TYPE
from gemma_neuron.serving.page import add_page
from gemma_neuron.serving.service import Service, unless_gone
from gemma_neuron.serving.status import add_status
from gemma_neuron.serving.streams import EventStream

UNVALIDATED_NOTE = (
    "unvalidated: this port's answers have not been compared with the reference model's"
)

RETRY = {"retry-after": "1"}
UNION_MEMBER = re.compile(r"body|(constrained-)?(str|int)|(list|function-after)\[.*\]", re.DOTALL)


def create_app(service: Service, rules: AccessRules | None = None) -> FastAPI:
    """The application over an engine that may still be loading."""
    app = FastAPI(title="gemma-neuron", docs_url=None, redoc_url=None)
    _add_error_handlers(app, service)
    _add_health(app, service)
    _add_completions(app, service)
    add_status(app, service)
    add_page(app)
    app.add_middleware(AccessGuard, rules=rules or AccessRules(), refused=service.meter.refused)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        good = service.engine.phase == "ready"
        return JSONResponse(readiness(service), 200 if good else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.meter.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_entry(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.info.model_id:
            raise ApiError(
                404,
                f"There is no model {name[:200]!r} here; this server has {service.info.model_id!r}.",
                param="model",
                code="model_not_found",
            )
        return model_entry(service)


def replicas(service: Service) -> list[dict[str, int]]:
    """The processes that hold the model now."""
    states = service.engine.states()
    return [{"index": s.index, "pid": s.pid} for s in states if s.phase == "ready"]


def readiness(service: Service) -> dict[str, Any]:
    """Phase and progress: how many replicas serve, and what each is doing for how long."""
    phase, states = service.engine.phase, service.engine.states()
    return {
        "status": "ready" if phase == "ready" else "not ready",
        "phase": phase,
        "replicas": replicas(service),
        "validated": service.info.validated,
        "progress": {
            "ready": sum(state.phase == "ready" for state in states),
            "replicas": len(states),
            "states": [
                {
                    "index": state.index,
                    "phase": state.phase,
                    "seconds": state.seconds,
                    "restarts": state.restarts,
                }
                for state in states
            ],
        },
    }


def model_entry(service: Service) -> dict[str, Any]:
    info = service.info
    limits = service.engine.limits
    entry: dict[str, Any] = {
        "id": info.model_id,
        "object": "model",
        "created": info.created,
        "owned_by": "gemma-neuron",
        "validated": info.validated,
        "verdict": info.verdict,
        "max_model_len": None if limits is None else limits.max_context,
    }
    if not info.validated:
        entry["note"] = UNVALIDATED_NOTE
    return entry


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        # Rendering waits for the template's process and tokenising is work: neither may stall streams.
        requests = await asyncio.to_thread(openai_chat.chat_requests, service, body)
        prompt_tokens = len(requests[0].prompt_ids)
        stream = service.open(requests)
        if body.stream:
            return EventsResponse(openai_chat.chunks(service, body, stream, prompt_tokens), stream)
        work = openai_chat.whole(service, body, stream, prompt_tokens)
        return JSONResponse(await unless_gone(work, request.receive))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        prepared = await asyncio.to_thread(openai_completions.prepare, service, body)
        stream = service.open(prepared.requests)
        if body.stream:
            return EventsResponse(
                openai_completions.chunks(service, body, stream, prepared), stream
            )
        work = openai_completions.whole(service, body, stream, prepared)
        return JSONResponse(await unless_gone(work, request.receive))


class EventsResponse(StreamingResponse):
    """Server-sent events that end their requests however the response ends: read, left or never begun."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], stream: EventStream) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_lines(chunks), media_type="text/event-stream", headers=headers)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _lines(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    good = True
    async for chunk in chunks:
        good = "error" not in chunk
        yield b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
    if good:
        yield b"data: [DONE]\n\n"


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        service.meter.refused(error.status)
        return JSONResponse(error.body(), error.status, RETRY if error.status == 503 else None)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            ApiError(error.status_code, str(error.detail)).body(), error.status_code
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        service.meter.refused(400)
        return JSONResponse(validation_error(error.errors()).body(), 400)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        text = f"Internal error: {type(error).__name__}."
        return JSONResponse(ApiError(500, text).body(), 500)


def validation_error(found: Sequence[Any]) -> ApiError:
    """OpenAI's 400 for a body: a parameter that is not implemented first, else the most specific error."""
    unknown = [e for e in found if e["type"] == "extra_forbidden"]
    # Of a union's members, the one that got furthest or at least had the right type says what is wrong.
    error = unknown[0] if unknown else max(found, key=_depth)
    # Pydantic puts the tried member of a union into the place: `content.list[TextPart].0.type`.
    place = [str(part) for part in error["loc"] if not UNION_MEMBER.fullmatch(str(part))]
    name = ".".join(place)
    if unknown:
        text = f"The parameter {name!r} is not implemented by this server."
        return ApiError(400, text, param=name, code="unsupported_parameter")
    if error["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {error['ctx']['error']}.")
    words = error["msg"].removeprefix("Value error, ")
    text = f"{name}: {words}." if name else f"{words}."
    return ApiError(400, text, param=name or None)


def _depth(error: Any) -> tuple[int, bool]:
    return len(error["loc"]), not error["type"].endswith("_type")
