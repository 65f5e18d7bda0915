"""The protocol below the application: uvicorn's over a parser in C, with the bounds and the corrections that it lacks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sized
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.config import ServerConfig

MOST_PIPELINED = 8  # requests of a connection that wait for the one that runs, beyond which nothing more is read


def error_body(message: str, kind: str, code: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


class _Parser(httptools.HttpRequestParser):
    """The parser in C, for a server that changes to no other protocol: it drops the body of a request that offers one (Java's
    client offers h2c with every first request), so the head is parsed again without the offer."""

    def __init__(self, protocol: BoundedHttp) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        parser = self
        while True:
            try:
                super(_Parser, parser).feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._protocol.offered:
                    raise
                data = self._protocol.head_without_offer() + data[offer.args[0] :]
                parser = self._protocol.parser = _Parser(self._protocol)  # this one may be at the connection's last request


class _Flow(FlowControl):
    """uvicorn reads on whenever a response ends or a body is wanted, however many requests it has read already."""

    def __init__(self, transport: asyncio.Transport, behind: Sized) -> None:
        """behind: the requests that were read and do not run yet"""
        super().__init__(transport)
        self._behind = behind

    def resume_reading(self) -> None:
        if len(self._behind) < MOST_PIPELINED:
            super().resume_reading()


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol over a parser in C, with what that lacks: bounds on the bytes that are no body (request line, headers,
    chunk sizes, trailers) since the last piece of a body, and on the requests read ahead; requests that offer another protocol;
    streams for HTTP/1.0; word of a client's leaving for the request that runs while a later one waits behind it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._loose = 0
        self._cycles: deque[RequestResponseCycle] = deque()  # the running request and those behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)

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
        self.flow.resume_reading()  # uvicorn reads nothing behind a waiting request, and would not see the client leave
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
