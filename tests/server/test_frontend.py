"""EngineClient against replicas that speak the real messages over the real sockets, without a model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.config import ServerConfig
from engine.errors import RequestRejected, WorkerFailed
from engine.messages import AddRequest, EngineFailed, Hello
from engine.sampling_params import SamplingParams
from engine.transport import FrontEndSocket, WorkerSocket
from server.frontend import EngineClient, Generation, State
from server.metrics import Metrics
from tests.server.fake_replica import FakeReplica
from tests.server.running import eventually


@asynccontextmanager
async def engine(
    dp: int = 1, heartbeat_s: float = 1.2, **options: object
) -> AsyncIterator[tuple[EngineClient, list[FakeReplica]]]:
    client = EngineClient(FrontEndSocket("127.0.0.1"), dp, dp, ServerConfig(heartbeat_s=heartbeat_s), Metrics("fake"))
    client.start()
    replicas = [FakeReplica(client.socket.address, rank, **options) for rank in range(dp)]  # type: ignore[arg-type]
    await asyncio.wait_for(client.all_ready.wait(), 5)
    yield client, replicas
    for replica in replicas:
        replica.stop()
    client.close()


def add(name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3)) -> AddRequest:
    return AddRequest(name, list(prompt), SamplingParams(max_tokens=max_tokens), time.time())


def submit(client: EngineClient, name: str, max_tokens: int = 5, **options: object) -> Generation:
    return client.submit(name, [[add(name, max_tokens)]], max_tokens, **options)[0]  # type: ignore[arg-type]


async def tokens_of(generation: Generation) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    while True:
        for output in await asyncio.wait_for(generation.outputs(), 10):
            tokens += output.token_ids
            if output.finish_reason is not None:
                return tokens, output.finish_reason


async def test_tokens_arrive_and_books_balance() -> None:
    async with engine(dp=2) as (client, replicas):
        generations = [submit(client, f"r{i}", max_tokens=4 + i) for i in range(20)]
        results = await asyncio.gather(*map(tokens_of, generations))
        assert [len(tokens) for tokens, _ in results] == [4 + i for i in range(20)]
        assert {reason for _, reason in results} == {"length"}
        counts = [len(replica.received) for replica in replicas]
        assert abs(counts[0] - counts[1]) <= 2 and client.router.reserved == {0: 0, 1: 0}
        assert client.metrics.open_requests == 0 and sum(client.metrics.finished.values()) == 20


async def test_refusals() -> None:
    """Report S18: a live id is refused, its first owner is untouched; a free id can be used again."""
    async with engine(queue_limit=1) as (client, replicas):
        replicas[0].paused.set()
        first = submit(client, "same")
        with pytest.raises(RequestRejected) as refused:
            submit(client, "same")
        assert refused.value.code == "duplicate_request_id"
        with pytest.raises(RequestRejected, match="data_parallel_rank"):
            submit(client, "other", dp_rank=3)
        await eventually(lambda: replicas[0].live)
        full = submit(client, "full")
        with pytest.raises(RequestRejected) as refused:
            await full.outputs()
        assert refused.value.code == "queue_full" and client.metrics.rejected == {"queue_full": 1}
        replicas[0].paused.clear()
        assert (await tokens_of(first))[1] == "length"
        assert (await tokens_of(submit(client, "same")))[1] == "length"


async def test_abort_and_stop_string() -> None:
    """Report O06, S13: aborts reach the replica and are counted; a stop string counts as a finished request."""
    async with engine() as (client, replicas):
        generation, stopped = submit(client, "a", 4000), submit(client, "b", 4000)
        await generation.outputs()
        client.abort(generation)
        assert (await tokens_of(generation))[1] == "abort"
        await stopped.outputs()
        client.stop(stopped, 2)
        assert (await tokens_of(stopped))[1] == "stop"
        assert replicas[0].aborted == [("a", "abort"), ("b", "stop")] and not replicas[0].live
        assert client.metrics.finished == {(0, "abort"): 1, (0, "stop"): 1}
        client.abort(generation)  # no effect once it ended
        assert client.abort_group("a") == 0


async def test_choices_share_a_replica_and_a_group() -> None:
    async with engine(dp=2) as (client, replicas):
        replicas[0].paused.set()
        replicas[1].paused.set()
        client.submit("g", [[add("g-0", 1000), add("g-1", 1000), add("g-2", 1000)]], 1000)
        await eventually(lambda: len(replicas[0].received) + len(replicas[1].received) == 3)
        assert {len(replicas[0].received), len(replicas[1].received)} == {0, 3}
        assert client.abort_group("g") == 3
        await eventually(lambda: client.metrics.open_requests == 0)


async def test_a_silent_rank_fails_what_is_open() -> None:
    """Report D04: a dead worker is noticed, open requests fail, health says why, new requests are refused."""
    died: list[bool] = []
    async with engine(heartbeat_s=1.0) as (client, replicas):
        client.on_failure = lambda: died.append(True)
        assert client.check() == (True, "ready")
        generation = submit(client, "r", 4000)
        await generation.outputs()
        replicas[0].stop()
        with pytest.raises(WorkerFailed, match="dead or frozen"):
            await tokens_of(generation)
        healthy, why = client.check()
        assert not healthy and "rank 0" in why and died == [True]
        with pytest.raises(RequestRejected):
            submit(client, "late")


async def test_a_long_step_is_no_freeze() -> None:
    """Report D06: a replica that computes for longer than the heartbeat limit stays healthy, as its heartbeat answers."""
    async with engine(heartbeat_s=1.0, step_s=2.5) as (client, _):
        generation = submit(client, "r", 1)
        await asyncio.sleep(2.0)
        assert client.check()[0]
        assert (await tokens_of(generation)) == ([4], "length")


async def test_a_front_end_that_was_held_up_blames_nobody_and_forgives_nothing() -> None:
    """A rank that answered before a pause of the front end and died in it is noticed within the limit, not within the pause."""
    async with engine(heartbeat_s=1.0) as (client, replicas):
        pings = client._nonce
        while client._nonce == pings:
            await asyncio.sleep(0)
        threading.Timer(1.0, replicas[0].stop).start()
        time.sleep(4.0)  # the whole process stands still; the rank's last answer waits in the socket
        await asyncio.sleep(0.05)
        assert client.check()[0]
        await eventually(lambda: not client.check()[0], limit_s=3.0)


async def test_a_reported_failure_ends_everything_at_once() -> None:
    async with engine() as (client, replicas):
        generation = submit(client, "r", 4000)
        replicas[0]._link.send(EngineFailed(0, "device error"))
        with pytest.raises(WorkerFailed, match="device error"):
            await tokens_of(generation)
        assert client.state is State.FAILED


async def test_draining_lets_open_requests_finish() -> None:
    """Report O09: SIGTERM stops admission, not the replies that are running; after the limit they are aborted."""
    async with engine() as (client, _):
        short, endless = submit(client, "s", 50), submit(client, "e", 4000)
        draining = asyncio.create_task(client.drain(0.5))
        await asyncio.sleep(0)
        with pytest.raises(RequestRejected) as refused:
            submit(client, "late")
        assert refused.value.code == "shutting_down"
        assert (await tokens_of(short))[1] == "length"
        tokens, reason = await tokens_of(endless)
        assert reason == "abort" and tokens
        await draining


async def test_messages_of_nobody_are_dropped() -> None:
    async with engine() as (client, _replicas):
        stranger = WorkerSocket(client.socket.address)
        stranger.send(EngineFailed(0, "from a peer without hello"))
        stranger.send(Hello(0, 0, "steps"))  # taken
        stranger.send(Hello(5, 0, "heartbeat"))  # no such rank
        stranger.send(EngineFailed(0, "still nobody"))
        await asyncio.sleep(0.3)
        assert client.check()[0]
        assert (await tokens_of(submit(client, "r", 3)))[1] == "length"
        stranger.close()
