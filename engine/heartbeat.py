"""The thread through which every rank shows that it lives, and learns that the front end does.

It has a socket of its own, so a step of any length does not silence it; only a dead or frozen process does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from engine.messages import EngineFailed, FromReplica, Hello, Phase, Ping, Pong, Shutdown
from engine.transport import Address, WorkerSocket

_TICK_S = 0.1
SHUTDOWN_GRACE_S = 5.0


class Heartbeat:
    """limit_s: silence of the front end after which it counts as dead; on_lost: called then, before this process ends."""

    def __init__(self, address: Address, rank: int, dp_rank: int, limit_s: float, on_lost: Callable[[], None]) -> None:
        self._address, self._rank, self._dp_rank = address, rank, dp_rank
        self._limit_s, self._on_lost = limit_s, on_lost
        self._outgoing: SimpleQueue[FromReplica] = SimpleQueue()
        self._stop = threading.Event()
        self._last_step = time.monotonic()
        self._busy = False
        self.shutdown = threading.Event()
        self._phase: tuple[str, float] | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def moved(self, busy: bool) -> None:
        """The engine's loop came round; busy: it has work."""
        self._last_step, self._busy = time.monotonic(), busy

    def enter(self, phase: str) -> None:
        """Start-up entered a phase; the one before is over."""
        now = time.monotonic()
        if self._phase is not None:
            self._outgoing.put(Phase(self._rank, self._phase[0], now - self._phase[1]))
        self._phase = (phase, now)
        self._outgoing.put(Phase(self._rank, phase))

    def report(self, phase: str, seconds: float) -> None:
        """A phase that was over before this heartbeat began."""
        self._outgoing.put(Phase(self._rank, phase, seconds))

    def fail(self, why: str) -> None:
        """Tell the front end that this rank cannot go on."""
        self._outgoing.put(EngineFailed(self._dp_rank, why))
        self.close()

    def close(self) -> None:
        """Send what is waiting and end the thread."""
        self._stop.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        socket = WorkerSocket(self._address)
        socket.send(Hello(self._rank, self._dp_rank, "heartbeat"))
        heard: float | None = None  # counting starts with the first Ping
        asked: float | None = None
        before = time.monotonic()
        while not self._stop.is_set():
            for message in socket.receive(_TICK_S):
                if isinstance(message, Ping):
                    heard = time.monotonic()
                    socket.send(Pong(message.nonce, heard - self._last_step, self._busy))
                elif isinstance(message, Shutdown) and asked is None:
                    asked = time.monotonic()
                    self.shutdown.set()
            self._flush(socket)
            now = time.monotonic()
            if now - before > self._limit_s / 2:  # this process itself was stopped or starved: do not blame the front end
                heard = now if heard is not None else None
            before = now
            if heard is not None and asked is None and now - heard > self._limit_s:
                self._end(f"the front end has been silent for {now - heard:.1f} s: dead or frozen")
            if asked is not None and now - asked > SHUTDOWN_GRACE_S:
                self._end(f"still running {SHUTDOWN_GRACE_S:g} s after the request to shut down")
        self._flush(socket)
        socket.close(linger_s=1.0)

    def _flush(self, socket: WorkerSocket) -> None:
        while True:
            try:
                socket.send(self._outgoing.get_nowait())
            except Empty:
                return

    def _end(self, why: str) -> None:
        """The main thread may be stuck in a collective, so the process ends from here."""
        print(f"rank {self._rank}: {why}", file=sys.stderr, flush=True)
        self._on_lost()
        os._exit(1)
