"""Routes: what a path means. What every request meets first is in http.py, how text is generated in serving.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from engine.config import ServerConfig
from engine.errors import EngineError, RequestRejected
from engine.openai_responses import model_list
from engine.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    parse_request,
)
from server import VERSION
from server.frontend import EngineClient, State
from server.http import AccessLog, BodyTooLarge, Door
from server.protocol import error_body
from server.serving import JsonResponse, Serving, prepare, read_json, rejection

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"style.css": "text/css", "page.js": "text/javascript"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
CLIENT_LEFT = 499  # before its body was read
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "refused: the message names the field"},
    401: {"description": "no valid API key"},
    404: {"description": "no such model"},
    413: {"description": "body too large"},
    415: {"description": "the body is not declared as JSON"},
    431: {"description": "headers too large"},
    500: {"description": "the engine failed"},
    503: {"description": "full, starting or shutting down"},
}


class AbortRequest(BaseModel):
    """POST /abort_request: one request by the id its response carries, or all."""

    model_config = ConfigDict(extra="forbid", strict=True)
    request_id: str | None = None
    rid: str | None = None
    abort_all: bool = False


BODIES = (CompletionRequest, ChatCompletionRequest, GenerateRequest, TokenizeRequest, DetokenizeRequest, AbortRequest)


def create_app(serving: Serving, config: ServerConfig, access_log: AccessLog) -> ASGIApp:
    """The whole HTTP side. Loads nothing and starts nothing."""
    app = FastAPI(title="snapmla", version=VERSION, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    client, model = serving.client, serving.model
    _add_error_handlers(app)
    _add_generation(app, serving)
    _add_health(app, client)

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse(model_list(model))

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def one_model(name: str) -> Response:
        if name != model.name:
            raise RequestRejected(f"model: {name!r} is not served here; use {model.name!r}", "model_not_found", "model")
        return JsonResponse(model_list(model)["data"][0])

    @app.post("/tokenize", **_takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        client.refuse_unless_ready()
        body = await read_json(request)
        return JsonResponse(await prepare(lambda: model.tokenize(parse_request(TokenizeRequest, body)), body))

    @app.post("/detokenize", **_takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read_json(request)
        return JsonResponse(await prepare(lambda: model.detokenize(parse_request(DetokenizeRequest, body)), body))

    @app.post("/abort_request", **_takes(AbortRequest))
    async def abort_request(request: Request) -> Response:
        wanted = parse_request(AbortRequest, await read_json(request))
        name = wanted.request_id or wanted.rid
        if (name is None) != wanted.abort_all:
            raise RequestRejected("request_id: give the id of a request, or abort_all: true", param="request_id")
        return JsonResponse({"aborted": client.abort_group(name)})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        client.reset_prefix_cache()
        return JsonResponse({"status": "ok"})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404)
        return FileResponse(PAGE / name, media_type=PAGE_FILES[name], headers=PAGE_HEADERS)

    schema = _openapi(app)
    app.openapi = lambda: schema  # type: ignore[method-assign]
    return Door(
        app,
        api_keys=config.api_keys,
        max_body_bytes=config.max_body_bytes,
        max_header_bytes=config.max_header_bytes,
        metrics=client.metrics,
        access_log=access_log,
    )


def _add_generation(app: FastAPI, serving: Serving) -> None:
    model = serving.model

    @app.post("/v1/completions", **_takes(CompletionRequest, streams=True))
    async def completions(request: Request) -> Response:
        return await serving.respond(request, CompletionRequest, model.completion)

    @app.post("/v1/chat/completions", **_takes(ChatCompletionRequest, streams=True))
    async def chat_completions(request: Request) -> Response:
        return await serving.respond(request, ChatCompletionRequest, model.chat)

    @app.post("/generate", **_takes(GenerateRequest, streams=True))
    async def generate(request: Request) -> Response:
        return await serving.respond(request, GenerateRequest, model.generate)


def _add_health(app: FastAPI, client: EngineClient) -> None:
    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> Response:
        """Every rank answered a heartbeat lately. Independent of how long steps take."""
        healthy, why = client.check()
        return JsonResponse({"status": "ok"} if healthy else {"status": "unhealthy", "reason": why}, 200 if healthy else 503)

    @app.get("/ready", responses={503: _ERRORS[503]})
    async def ready() -> Response:
        """New requests are taken."""
        return JsonResponse({"status": client.state.value}, 200 if client.state is State.READY else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(client.metrics.exposition(), media_type=METRICS_TYPE)

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": VERSION})

    @app.get("/load")
    async def load() -> Response:
        return JsonResponse(client.load())


def _add_error_handlers(app: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        return rejection(error)

    async def unknown(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(error.status_code, error.detail, headers=dict(error.headers or {}))

    async def too_large(_: Request, error: Exception) -> Response:
        return _error(413, str(error), "body_too_large")

    async def left(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)  # for the log; nobody reads it

    app.add_exception_handler(EngineError, refused)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(BodyTooLarge, too_large)


def _error(status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(message, "invalid_request_error", code), status, headers, media_type=JsonResponse.media_type)


def _takes(kind: type[BaseModel], streams: bool = False) -> dict[str, Any]:
    """Route options that describe a JSON body; it is parsed by `parse_request`, whose messages name the fix."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answers: dict[str, Any] = {"application/json": {}} | ({"text/event-stream": {}} if streams else {})
    responses = {200: {"description": "the answer", "content": answers}, **_ERRORS}
    return {"responses": responses, "openapi_extra": {"requestBody": body}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description of the routes, with the schemas of the bodies that it does not parse itself."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for kind in BODIES:
        described = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= described.pop("$defs", {})
        schemas[kind.__name__] = described
    return schema
