"""What every HTTP request meets before a route: request id, API key, bounds, access log.

It is plain ASGI, and the chunks of a stream pass none of it.
"""

from __future__ import annotations

import base64
import hmac
import logging
import sys
import time
import uuid
from collections.abc import Callable
from hashlib import sha256
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.metrics import Metrics
from server.protocol import error_body

OPEN_PATHS = ("/health", "/ready")  # what a probe without a key may see
QUIET_PATHS = (*OPEN_PATHS, "/load", "/metrics")  # polled; counted, not logged
MAX_REQUEST_ID_CHARS = 128
_json = msgspec.json.Encoder().encode


class BodyTooLarge(Exception):
    """More body arrived than ServerConfig.max_body_bytes; the app answers 413."""


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
