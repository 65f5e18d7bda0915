"""EngineClient: the front end's view of the engine. It routes requests, collects their tokens, aborts and judges health.

It runs in the server's event loop and knows messages only. Every request that was sent gets exactly one terminal
message; when the engine dies the client writes it itself, so nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.config import ServerConfig
from engine.errors import RequestRejected, WorkerFailed
from engine.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    ExpertLoad,
    FromReplica,
    Hello,
    Phase,
    Ping,
    Pong,
    Ready,
    RequestFailed,
    ResetPrefixCache,
    Shutdown,
    StepOutput,
    ToReplica,
    Wake,
)
from engine.transport import FrontEndSocket
from server.generation import Generation
from server.metrics import Metrics
from server.routing import Router

PING_INTERVAL_S = 0.25
START_HEARTBEAT_S = 120.0  # while a rank loads, one long call may hold its interpreter
STEPS, HEARTBEAT = "steps", "heartbeat"
log = logging.getLogger("server.frontend")


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass
class _Rank:
    dp_rank: int
    peer: bytes
    heard: float
    phase: str = ""
    ready: bool = False


@dataclass
class EngineClient:
    """socket: bound and not yet read; world_size: ranks that must answer; on_failure: called once when the engine dies."""

    socket: FrontEndSocket
    dp: int
    world_size: int
    config: ServerConfig
    metrics: Metrics
    on_failure: Callable[[], None] = lambda: None
    on_phase: Callable[[Phase], None] = lambda phase: None
    state: State = State.STARTING
    failure: str = ""
    silent_rank: int | None = None  # the rank whose silence was the failure
    ready: dict[int, Ready] = field(default_factory=dict)
    all_ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.router = Router(list(range(self.dp)))
        self._leaders: dict[int, bytes] = {}
        self._ranks: dict[int, _Rank] = {}
        self._peers: dict[bytes, tuple[int, str]] = {}
        self._open: dict[str, Generation] = {}
        self._groups: dict[str, int] = {}  # id the client knows -> its open choices
        self._written: list[tuple[Generation, float | None]] = []
        self._delivery = self.metrics.histograms["frontend_delivery_seconds"]
        self._idle = asyncio.Event()
        self._idle.set()
        self._nonce = 0
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life

    def start(self) -> None:
        """Listen to the workers; call inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.socket.fileno(), self._receive)
        self._tasks.append(self._loop.create_task(self._heartbeat()))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self.socket.fileno())
        self.socket.close()

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, let open ones finish for up to limit_s seconds, then abort them."""
        if self.state is not State.FAILED:
            self.state = State.DRAINING
        try:
            await asyncio.wait_for(self._idle.wait(), limit_s)
        except TimeoutError:
            log.warning("aborting %d requests that did not finish within %g s", len(self._open), limit_s)
            self.abort_group(None)
            try:
                await asyncio.wait_for(self._idle.wait(), 5.0)
            except TimeoutError:
                self._fail_open("the server is shutting down")

    def shut_down_engine(self) -> None:
        """Ask every rank to end; they agree on it after the running step."""
        for peer in [*self._leaders.values(), *(rank.peer for rank in self._ranks.values())]:
            self._send(peer, Shutdown())

    # ---- requests

    def refuse_unless_ready(self) -> None:
        """Raises RequestRejected when new requests are not taken; before that it is not even known how long they may be."""
        if self.state is not State.READY:
            code = "shutting_down" if self.state is State.DRAINING else "not_ready"
            raise RequestRejected(f"the engine is {self.state.value}", code=code)

    def submit(
        self, group: str, prompts: list[list[AddRequest]], max_tokens: int, dp_rank: int | None = None
    ) -> list[Generation]:
        """Send one request: per prompt its choices, which go to one replica. Returns the choices in order.

        group: the id the client knows; max_tokens: of each choice, for the load estimate; dp_rank: a replica the client names
        Raises RequestRejected when not serving, when the id is in use, or when dp_rank names no replica.
        """
        self.refuse_unless_ready()
        if dp_rank is not None and dp_rank not in self.router.reserved:
            raise RequestRejected(
                f"data_parallel_rank: must lie in 0..{self.dp - 1}, got {dp_rank}", param="data_parallel_rank"
            )
        if group in self._groups:
            raise RequestRejected(f"request_id: {group!r} is in use", "duplicate_request_id", "request_id")
        generations: list[Generation] = []
        self._groups[group] = sum(map(len, prompts))
        for adds in prompts:
            choice = self.router.choose(adds[0].prompt_token_ids, adds[0].salt, max_tokens, len(adds), dp_rank)
            share, rest = divmod(choice.cost, len(adds))
            for index, add in enumerate(adds):
                cost = share + (rest if index == 0 else 0)
                generation = Generation(add.request_id, group, choice.dp_rank, cost, add.arrival, index == 0)
                self._open[add.request_id] = generation
                generations.append(generation)
        self._idle.clear()
        self.metrics.open_requests = len(self._open)
        self._dispatch([add for adds in prompts for add in adds], generations)
        return generations

    def _dispatch(self, adds: list[AddRequest], generations: list[Generation]) -> None:
        for add, generation in zip(adds, generations, strict=True):
            if not self._send(self._leaders[generation.dp_rank], add):
                self.fail(f"the connection to replica {generation.dp_rank} is gone")
                return
        busy = {generation.dp_rank for generation in generations}
        for dp_rank, peer in self._leaders.items():
            if dp_rank not in busy:
                self._send(peer, Wake())

    def abort(self, generation: Generation) -> None:
        """Drop a request; its terminal output still comes. No effect once it ended or was stopped."""
        if not generation.terminal and generation.stopped_at is None:
            self._send(self._leaders[generation.dp_rank], AbortRequest(generation.request_id))

    def stop(self, generation: Generation, num_tokens: int) -> None:
        """A stop string ended the text after num_tokens tokens: the request is finished, not aborted."""
        if not generation.terminal:
            generation.stopped_at = num_tokens
            self._send(self._leaders[generation.dp_rank], AbortRequest(generation.request_id, "stop"))

    def abort_group(self, group: str | None) -> int:
        """Abort the choices of one request (None: of all requests); how many were open."""
        matching = [generation for generation in self._open.values() if group is None or generation.group == group]
        for generation in matching:
            self.abort(generation)
        return len(matching)

    def delivered(self, generation: Generation, num_tokens: int, arrived: float | None = None) -> None:
        """num_tokens more tokens of a request are on their way to its client.

        arrived: time.time() of the oldest of them, for tokens that were written to a stream. The event loop empties its
        write buffers at the end of a turn, so the clock is read in the next one, once for all streams.
        """
        self.metrics.counters["generation_tokens"][generation.dp_rank] += num_tokens
        if not self._written:
            self._loop.call_soon(self._flushed)
        self._written.append((generation, arrived))

    def _flushed(self) -> None:
        now = time.time()
        for generation, arrived in self._written:
            if arrived is not None:
                self._delivery[generation.dp_rank].observe(now - arrived)
            if not generation.shown and generation.first_token is not None:
                generation.shown = True
                self.metrics.first_token(generation.dp_rank, now - generation.arrival)
        self._written.clear()

    def reset_prefix_cache(self) -> None:
        for peer in self._leaders.values():
            self._send(peer, ResetPrefixCache())

    # ---- health

    def check(self) -> tuple[bool, str]:
        """(healthy, why not). Cheap: heartbeats are collected all the time, so the answer is at most as old as one."""
        if self.state is State.FAILED:
            return False, self.failure
        if self.state is State.STARTING:
            return False, "starting"
        return True, self.state.value

    def load(self) -> dict[str, Any]:
        """Figures over all replicas, for routers and the try-out page."""
        stats = list(self.metrics.stats.values())
        blocks = sum(s.num_blocks for s in stats)
        return {
            "state": self.state.value,
            "num_replicas": self.dp,
            "num_open": len(self._open),
            "num_running": sum(s.num_running for s in stats),
            "num_waiting": sum(s.num_waiting for s in stats),
            "reserved_tokens": sum(self.router.reserved.values()),
            "cache_usage": 1.0 - sum(s.num_free_blocks + s.num_cached_blocks for s in stats) / blocks if blocks else 0.0,
            "generation_tokens": int(sum(self.metrics.counters["generation_tokens"].values())),
            "prefix_queries": sum(s.prefix_queries for s in stats),
            "prefix_hits": sum(s.prefix_hits for s in stats),
            "num_speculative_tokens": max((r.num_speculative_tokens for r in self.ready.values()), default=0),
            "spec_draft_tokens": sum(s.spec_draft_tokens for s in stats),
            "spec_accepted_tokens": sum(sum(s.spec_accepted_per_pos) for s in stats),
        }

    def waiting_for(self) -> dict[str, list[int]]:
        """Phases of start-up that are not over, and the ranks that are in them."""
        phases: dict[str, list[int]] = {}
        for number in range(self.world_size):
            rank = self._ranks.get(number)
            if rank is None or not rank.ready:
                phases.setdefault("connecting" if rank is None else rank.phase or "connecting", []).append(number)
        return phases

    async def _heartbeat(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            self._receive()  # answers that wait in the socket count
            now = time.monotonic()
            late, before = now - before - PING_INTERVAL_S, now
            self._nonce += 1
            for number, rank in self._ranks.items():
                self._send(rank.peer, Ping(self._nonce))
                if late > PING_INTERVAL_S:
                    rank.heard = min(now, rank.heard + late)  # this process was held up itself: do not blame the rank
                limit = self.config.heartbeat_s if self.state is not State.STARTING else START_HEARTBEAT_S
                if self.state is not State.FAILED and now - rank.heard > limit:
                    self.silent_rank = number
                    self.fail(f"rank {number} has been silent for {now - rank.heard:.1f} s: dead or frozen")

    # ---- messages

    def _send(self, peer: bytes, message: ToReplica) -> bool:
        sent = self.socket.send(peer, message)
        self._loop.call_soon(self._receive)  # the socket's descriptor is edge-triggered; a send may have eaten the edge
        return sent

    def _receive(self) -> None:
        for peer, message in self.socket.receive():
            self._handle(peer, message)

    def _handle(self, peer: bytes, message: FromReplica) -> None:
        if isinstance(message, Hello):
            self._greet(peer, message)
            return
        if peer not in self._peers:
            log.warning("dropped a %s from a peer that did not say hello", type(message).__name__)
            return
        number, channel = self._peers[peer]
        rank = self._ranks.get(number)
        if rank is not None:
            rank.heard = time.monotonic()
        match message:
            case StepOutput() if channel == STEPS:
                self._step(message)
            case ExpertLoad() if channel == STEPS:
                self.metrics.expert_load = message.counts
            case Pong() if rank is not None:
                if message.busy and message.last_step_age > self.config.stall_s:
                    self.fail(f"rank {number} has finished no step for {message.last_step_age:.0f} s")
            case RequestFailed() if channel == STEPS:
                self._request_failed(message)
            case Phase() if rank is not None:
                if message.seconds is None:
                    rank.phase = message.name
                rank.ready = message.name == "ready"
                self.on_phase(message)
                self._maybe_ready()
            case Ready() if channel == STEPS:
                self.ready[message.dp_rank] = message
                self.metrics.replicas[message.dp_rank] = message
                self._maybe_ready()
            case EngineFailed():
                self.fail(f"rank {number}: {message.message}")
            case _:
                log.warning("dropped a %s on the %s channel of rank %d", type(message).__name__, channel, number)

    def _greet(self, peer: bytes, hello: Hello) -> None:
        known = hello.channel in (STEPS, HEARTBEAT) and 0 <= hello.rank < self.world_size and 0 <= hello.dp_rank < self.dp
        taken = any(owner == (hello.rank, hello.channel) for owner in self._peers.values())
        if not known or taken or (hello.channel == STEPS and hello.dp_rank in self._leaders):
            log.warning("dropped a hello of rank %d on channel %r", hello.rank, hello.channel)
            return
        self._peers[peer] = (hello.rank, hello.channel)
        if hello.channel == STEPS:
            self._leaders[hello.dp_rank] = peer
        else:
            self._ranks[hello.rank] = _Rank(hello.dp_rank, peer, time.monotonic())

    def _maybe_ready(self) -> None:
        ranks_ready = len(self._ranks) == self.world_size and all(rank.ready for rank in self._ranks.values())
        if self.state is State.STARTING and len(self.ready) == self.dp and ranks_ready:
            self.state = State.READY
            self.all_ready.set()

    def _step(self, message: StepOutput) -> None:
        self.metrics.step(message.stats)
        now = time.time()
        for output in message.outputs:
            generation = self._open.get(output.request_id)
            if generation is None:
                continue
            count = len(output.token_ids)
            if count:
                if generation.first_token is None:
                    generation.first_token = now
                    if generation.first_choice:
                        self.metrics.prompt(generation.dp_rank, output)
                    if count > 1:
                        self.metrics.tokens(generation.dp_rank, count - 1, 0.0)
                elif generation.last_token is not None:
                    self.metrics.tokens(generation.dp_rank, count, now - generation.last_token)
                generation.last_token = now
            if output.finish_reason is not None:
                if generation.stopped_at is not None:
                    output = msgspec.structs.replace(output, finish_reason="stop", num_output_tokens=generation.stopped_at)
                self.metrics.finish(generation.dp_rank, output, generation.arrival, generation.first_token, now)
                generation.terminal = True
                self._forget(generation)
            generation.push(output, now)

    def _request_failed(self, message: RequestFailed) -> None:
        generation = self._open.get(message.request_id)
        if generation is None:
            return
        self._forget(generation)
        if message.code == "internal":
            self.metrics.finished[generation.dp_rank, "error"] += 1
            generation.fail(WorkerFailed(message.message))
        else:
            self.metrics.rejected[message.code] += 1
            generation.fail(RequestRejected(message.message, message.code, message.param))

    def _forget(self, generation: Generation) -> None:
        del self._open[generation.request_id]
        self._groups[generation.group] -= 1
        if not self._groups[generation.group]:
            del self._groups[generation.group]
        self.router.release(generation.dp_rank, generation.cost)
        self.metrics.open_requests = len(self._open)
        if not self._open:
            self._idle.set()

    def fail(self, why: str) -> None:
        """The engine is gone or cannot go on: everybody who waits gets an error."""
        if self.state is State.FAILED:
            return
        log.error("the engine failed: %s", why)
        self.state, self.failure = State.FAILED, why
        self._fail_open(f"the engine failed: {why}")
        self.on_failure()

    def _fail_open(self, why: str) -> None:
        for generation in list(self._open.values()):
            self._forget(generation)
            self.metrics.finished[generation.dp_rank, "error"] += 1
            generation.fail(WorkerFailed(why))
