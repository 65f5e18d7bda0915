"""What every HTTP request meets before a route: the protocol and its bounds, request id, API key, access log.

Apart from the protocol it is plain ASGI, and the chunks of a stream pass none of it.
"""

from __future__ import annotations

import base64
import hmac
import logging
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.config import ServerConfig
from server.metrics import Metrics

OPEN_PATHS = ("/health", "/ready")  # what a probe without a key may see
QUIET_PATHS = (*OPEN_PATHS, "/load", "/metrics")  # polled; counted, not logged
MAX_REQUEST_ID_CHARS = 128
MOST_PIPELINED = 8  # requests of a connection that are read while the first one runs
_json = msgspec.json.Encoder().encode


def error_body(message: str, kind: str, code: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}})


class BodyTooLarge(Exception):
    """More body arrived than ServerConfig.max_body_bytes; the app answers 413."""


class _Parser(httptools.HttpRequestParser):
    """The parser in C, for a server that changes to no other protocol: it drops the body of a request that offers one (Java's
    client offers h2c with every first request), so the head is parsed again without the offer."""

    def __init__(self, protocol: BoundedHttp) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._protocol.offered:
                    raise
                data = self._protocol.head_without_offer() + data[offer.args[0] :]


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol over a parser in C, with what that lacks: a bound on the bytes that are no body (request line, headers,
    chunk sizes, trailers) since the last piece of a body; requests that offer another protocol; streams for HTTP/1.0; word of
    a client's leaving for the request that runs while a later one waits behind it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._loose = 0
        self._cycles: deque[RequestResponseCycle] = deque()  # the running request and those behind it

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._loose += len(data)
        super().data_received(data)
        limit = self.config.h11_max_incomplete_event_size or 0
        if self._loose > limit and not self.transport.is_closing():
            self._end(b"431 Request Header Fields Too Large", f"more than {limit} bytes are no body", "headers_too_large")

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP."""
        self._end(b"400 Bad Request", msg)

    def _end(self, status: bytes, message: str, code: str | None = None) -> None:
        """Close the connection, with an answer unless it would stand in the middle of another one."""
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            body = error_body(message, "invalid_request_error", code)
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        self._loose = 0
        super().on_message_begin()
        self.scope["state"]["arrival"] = time.time()  # before it waits for other requests of the same turn of the loop

    def on_headers_complete(self) -> None:
        if self.offered:
            return
        super().on_headers_complete()
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)
        if len(self._cycles) <= MOST_PIPELINED:  # uvicorn reads nothing more, and would not see the client leave
            self.flow.resume_reading()
        if self.scope["http_version"] in ("0.9", "1.0"):
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        self._loose = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.offered:
            super().on_message_complete()

    @property
    def offered(self) -> bool:
        """Whether the request at hand offers another protocol, so that it will be parsed again."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def head_without_offer(self) -> bytes:
        """The head of the request at hand, without its Upgrade header."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _without_chunks(cycle: RequestResponseCycle) -> Send:
    """`cycle.send` for HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection."""
    send, open_end = cycle.send, False

    async def sends(message: Any) -> None:
        nonlocal open_end
        if message["type"] == "http.response.start":
            open_end = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if open_end else None
        elif open_end:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return sends


def http_server_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """uvicorn as every server of ours runs it."""
    return uvicorn.Config(
        app,
        http=BoundedHttp,
        h11_max_incomplete_event_size=config.max_header_bytes * 2,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )


class AccessLog:
    """One JSON line per finished request, written by a thread so that a slow terminal never slows a token."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        queue: SimpleQueue[Any] = SimpleQueue()
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._listener = QueueListener(queue, handler)
        self._log = logging.getLogger("server.access")
        self._log.propagate = False
        self._log.setLevel(logging.INFO)
        self._log.handlers = [QueueHandler(queue)]

    def start(self) -> None:
        if self.enabled:
            self._listener.start()

    def close(self) -> None:
        if self.enabled:
            self._listener.stop()

    def write(self, fields: dict[str, Any]) -> None:
        if self.enabled:
            self._log.info(_json({name: value for name, value in fields.items() if value is not None}).decode())


class Door:
    """The outermost ASGI layer.

    api_keys: any of them opens every path but OPEN_PATHS; compared by digest, so time tells nothing about a key
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: tuple[str, ...],
        max_body_bytes: int,
        max_header_bytes: int,
        metrics: Metrics,
        access_log: AccessLog,
    ) -> None:
        self._app = app
        self._keys = [sha256(key.encode("utf-8", "surrogateescape")).digest() for key in api_keys]
        self._max_body_bytes, self._max_header_bytes = max_body_bytes, max_header_bytes
        self._metrics, self._access_log = metrics, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        began: float = scope["state"]["arrival"]
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        notes: dict[str, Any] = {}
        scope["state"] |= {"notes": notes, "request_id": _request_id(headers), "send": send}
        status = 500

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", scope["state"]["request_id"].encode())]
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await _respond(reply, *refusal)
            else:
                await self._app(scope, self._bounded(receive), reply)
        finally:
            path = scope["path"]
            self._metrics.http[getattr(scope.get("route"), "path", "other"), str(status)] += 1
            if path not in QUIET_PATHS:
                client = scope.get("client")
                self._access_log.write(
                    {
                        "time": round(began, 3),
                        "request_id": scope["state"]["request_id"],
                        "client": client[0] if client else None,
                        "method": scope["method"],
                        "path": path[:256],
                        "status": status,
                        "seconds": round(time.time() - began, 4),
                        **notes,
                    }
                )

    def _refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes] | None:
        size = sum(len(name) + len(value) for name, value in headers)
        if size > self._max_header_bytes:
            text = f"the headers have {size} bytes; at most {self._max_header_bytes} are taken"
            return 431, error_body(text, "invalid_request_error", "headers_too_large")
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body_bytes:
            text = f"the body is larger than {self._max_body_bytes} bytes"
            return 413, error_body(text, "invalid_request_error", "body_too_large")
        if self._keys and path not in OPEN_PATHS:
            digest = sha256(_given_key(headers)).digest()
            right = [hmac.compare_digest(digest, known) for known in self._keys]  # all of them, whatever the first says
            if not any(right):
                return 401, error_body(
                    "a valid API key is needed: Authorization: Bearer KEY", "authentication_error", "invalid_api_key"
                )
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` that stops a body without a Content-Length at the same limit."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._max_body_bytes:
                    raise BodyTooLarge(f"the body is larger than {self._max_body_bytes} bytes")
            return message

        return bounded


def _given_key(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The key of a bearer token, or the password of Basic credentials, which is how a browser asks for one."""
    scheme, _, value = next((value for name, value in headers if name == b"authorization"), b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's X-Request-Id if it is short and plain, else a new one."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"").decode("latin-1")
    if 0 < len(given) <= MAX_REQUEST_ID_CHARS and all(c.isalnum() or c in "-_.:" for c in given) and given.isascii():
        return given
    return uuid.uuid4().hex


async def _respond(send: Callable[[Message], Any], status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer, Basic realm="snapmla", charset="UTF-8"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
