"""A server on a real socket in the test's own event loop, with the demo model's tokenizer and replicas without a model."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from engine.config import ServerConfig
from engine.hub import resolve_model
from engine.served_model import ServedModel
from engine.transport import FrontEndSocket
from server.app import create_app
from server.frontend import EngineClient
from server.http import AccessLog
from server.metrics import Metrics
from server.protocol import http_server_config
from server.serving import Serving
from tests.server.fake_replica import FakeReplica

VOCAB_SIZE = 2048


class KeptLog(AccessLog):
    """An access log that the test reads."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.lines: list[dict[str, Any]] = []

    def write(self, fields: dict[str, Any]) -> None:
        self.lines.append(fields)


@dataclass
class Running:
    http: httpx.AsyncClient
    client: EngineClient
    model: ServedModel
    replicas: list[FakeReplica]
    log: KeptLog
    address: tuple[str, int]

    def ids(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text, add_special_tokens=False, allow_special=True)

    async def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        response = await self.http.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, which must end with [DONE]."""
        chunks = []
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            chunks.append(json.loads(line.removeprefix("data: ")))
        return chunks

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        total = 0.0
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith((f"snapmla:{name}{{", f"snapmla:{name} ")) and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                total += float(line.rpartition(" ")[2])
        return total


async def eventually(check: Callable[[], object], limit_s: float = 5.0) -> None:
    for _ in range(int(limit_s / 0.01)):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen in time")


def demo_folder() -> Path:
    return resolve_model("demo")


@asynccontextmanager
async def running(
    *, dp: int = 1, replicas: dict[str, Any] | None = None, script: str | None = None, max_model_len: int = 512, **server: Any
) -> AsyncIterator[Running]:
    """replicas: options of FakeReplica; script: text whose tokens every request gets; server: fields of ServerConfig"""
    config = ServerConfig(**server)
    client = EngineClient(FrontEndSocket("127.0.0.1"), dp, dp, config, Metrics("demo"))
    client.start()
    model = ServedModel.load(demo_folder(), name="demo", max_model_len=max_model_len)
    options = {"vocab_size": VOCAB_SIZE, "max_model_len": max_model_len} | (replicas or {})
    if script is not None:
        options["script"] = model.tokenizer.encode(script, add_special_tokens=False, allow_special=True)
    fakes = [FakeReplica(client.socket.address, rank, **options) for rank in range(dp)]
    await asyncio.wait_for(client.all_ready.wait(), 10)
    log = KeptLog()
    bound = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(http_server_config(create_app(Serving(model, client), config, log), config))
    serving = asyncio.create_task(web._serve([bound]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=30) as http:
            yield Running(http, client, model, fakes, log, bound.getsockname())
    finally:
        web.should_exit = True
        await serving
        for fake in fakes:
            fake.stop()
        client.close()
