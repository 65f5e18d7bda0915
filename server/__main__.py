"""The front end process. Rank 0 starts it and writes a FrontEndConfig as one JSON line to its standard input.

It binds the HTTP port first (a taken port ends the launch before weights are read), then the workers' socket, whose
address it reports on the descriptor named by SNAPMLA_REPORT. When its standard input closes, rank 0 is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from engine.config import FrontEndConfig
from engine.errors import EXIT_REFUSED, EngineError
from engine.served_model import ServedModel
from engine.transport import REPORT, FrontEndSocket
from server.app import create_app
from server.frontend import EngineClient, State
from server.http import AccessLog
from server.metrics import Metrics
from server.protocol import http_server_config
from server.serving import Serving
from server.startup import StartupTable

EXIT_FAILED = 1
FLUSH_ERRORS_S = 1.0
BACKLOG = 2048
GC_THRESHOLD = 20_000  # new objects before the youngest generation is collected
log = logging.getLogger("server")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals mean draining here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_http(host: str, port: int) -> socket.socket:
    """The HTTP socket, held from now on. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
    bound.listen(BACKLOG)
    return bound


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


class FrontEnd:
    """Runs the HTTP server beside the engine client, from start-up to the end of either."""

    def __init__(self, config: FrontEndConfig, http: socket.socket, report: int) -> None:
        self._config, self._http = config, http
        self._ending: asyncio.Task[None] | None = None
        self._status = 0
        self._rank_0 = os.getppid()
        parallel, server = config.engine.parallel, config.server
        self._model = ServedModel.load(
            Path(config.model_folder),
            name=config.engine.api_name,
            max_model_len=config.engine.max_model_len,
            chat_template=server.chat_template,
            reasoning_parser=server.reasoning_parser,
            tool_call_parser=server.tool_call_parser,
        )
        workers = FrontEndSocket(config.bind)
        with os.fdopen(report, "wb") as pipe:
            pipe.write(workers.address.dump().encode())
        self._metrics = Metrics(self._model.name)
        self._client = EngineClient(workers, parallel.dp, parallel.world_size, server, self._metrics, self._engine_died)
        self._table = StartupTable(parallel.world_size, self._client.waiting_for)
        self._client.on_phase = self._table.add
        self._access_log = AccessLog(server.access_log)
        app = create_app(Serving(self._model, self._client), server, self._access_log)
        self._server = _Server(http_server_config(app, server))

    async def run(self) -> int:
        """Exit status of the process."""
        loop = asyncio.get_running_loop()
        self._client.start()
        self._access_log.start()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        await loop.connect_read_pipe(lambda: _Lifeline(self._leader_gone), sys.stdin)
        starting = loop.create_task(self._start_up())
        await self._server.serve(sockets=[self._http])
        starting.cancel()
        if self._ending is not None:
            await self._ending
        self._client.close()
        self._access_log.close()
        return self._status

    async def _start_up(self) -> None:
        reminding = asyncio.create_task(self._table.remind())
        try:
            await self._client.all_ready.wait()
        finally:
            reminding.cancel()
        self._metrics.start_up = self._table.seconds
        ready = self._client.ready[0]
        self._model.max_model_len = ready.max_model_len
        # what start-up made stays; the collector need not look at a vocabulary again for every few hundred tokens
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        host, port = self._http.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(
            f"{len(self._client.ready)} replica(s) of {self._metrics.model_name}: {ready.max_model_len} tokens of context, "
            f"{ready.num_blocks} {ready.cache_format} cache blocks each\nready on {url}",
            file=sys.stderr,
            flush=True,
        )

    def _stop(self) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._server.force_exit = self._server.should_exit = True

    async def _drain(self) -> None:
        started = self._client.state is State.READY
        print("stopping: open requests may finish, new ones are refused", file=sys.stderr, flush=True)
        await self._client.drain(self._config.server.drain_s if started else 0.1)
        self._client.shut_down_engine()
        await asyncio.sleep(0.2)  # responses that ended just now leave their sockets
        self._server.should_exit = True

    def _engine_died(self) -> None:
        self._status = EXIT_FAILED
        self._ending = asyncio.get_running_loop().create_task(self._give_up())

    async def _give_up(self) -> None:
        self._client.shut_down_engine()
        await asyncio.sleep(FLUSH_ERRORS_S)  # open streams get their error, probes see 503
        if self._client.silent_rank == 0 and os.getppid() == self._rank_0:
            os.kill(self._rank_0, signal.SIGKILL)  # a frozen parent cannot end itself when this process ends
        self._server.should_exit = True

    def _leader_gone(self) -> None:
        if self._ending is None:
            self._client.fail("rank 0 has ended")


class _Lifeline(asyncio.Protocol):
    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to rank 0 as well, which passes on SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # rank 0 blocked them for itself
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its start and end are told in other words
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontEndConfig)
    server = config.server
    try:
        http = bind_http(server.host, server.port)
    except OSError as error:
        print(
            f"error: cannot listen on {server.host}:{server.port}: {error.strerror}; choose another --host or --port",
            file=sys.stderr,
        )
        return EXIT_REFUSED
    if not server.api_keys and not is_loopback(server.host):
        log.warning("listening on %s without an API key: anyone who can reach it may use it; set --api-key", server.host)
    try:
        front_end = FrontEnd(config, http, int(os.environ[REPORT]))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return uvloop.run(front_end.run())


if __name__ == "__main__":
    sys.exit(main())
