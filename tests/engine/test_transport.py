"""The internal port: typed messages of this launch get through, everything else is dropped and hurts nobody."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from engine import transport
from engine.errors import EngineError
from engine.messages import AddRequest, Hello, Ping, Pong, ReplicaStats, StepOutput, TokenOutput
from engine.sampling_params import SamplingParams
from engine.transport import Address, FrontEndSocket, WorkerSocket


@pytest.fixture
def front_end() -> Iterator[FrontEndSocket]:
    bound = FrontEndSocket("127.0.0.1")
    yield bound
    bound.close()


def receive(bound: FrontEndSocket, count: int = 1, wait_s: float = 3.0) -> list:
    """Up to count messages."""
    got: list = []
    limit = time.monotonic() + wait_s
    while len(got) < count and time.monotonic() < limit:
        got += bound.receive()
        time.sleep(0.005)
    return got


def test_messages_go_both_ways(front_end: FrontEndSocket) -> None:
    worker = WorkerSocket(front_end.address)
    hello = Hello(0, 0, "steps")
    worker.send(hello)
    ((peer, message),) = receive(front_end)
    assert message == hello
    request = AddRequest("r", list(range(100_000)), SamplingParams(stop=["x"], logit_bias={3: 1.0}), 1.5, [2], salt="s")
    assert front_end.send(peer, request)
    assert worker.receive(3.0) == [request]
    output = StepOutput([TokenOutput("r", [1, 2], finish_reason="stop")], ReplicaStats(num_running=1))
    worker.send(output)
    assert receive(front_end) == [(peer, output)]
    worker.close()


def raw_peer(address: Address, **options: object) -> zmq.Socket:
    """A libzmq socket with a security mechanism of the test's choice."""
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    for name, value in options.items():
        peer.setsockopt(getattr(zmq, name), value)
    peer.connect(address.endpoint)
    return peer


def test_strangers_never_get_through(front_end: FrontEndSocket) -> None:
    """Report X06, X07, X08, X09, X20: without this launch's secret no frame reaches the engine, valid or not."""
    frame = msgspec.msgpack.encode(Hello(0, 0, "steps"))
    open_peer = raw_peer(front_end.address)
    public, private = zmq.curve_keypair()
    wrong_key, _ = zmq.curve_keypair()
    wrong_peer = raw_peer(front_end.address, CURVE_SERVERKEY=wrong_key, CURVE_PUBLICKEY=public, CURVE_SECRETKEY=private)
    open_peer.send(frame)
    wrong_peer.send(frame)
    host, port = front_end.address.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 64)
        assert receive(front_end, wait_s=1.0) == []
    worker = WorkerSocket(front_end.address)  # and the port still works
    worker.send(Hello(1, 0, "heartbeat"))
    assert [message for _, message in receive(front_end)] == [Hello(1, 0, "heartbeat")]
    for peer in (open_peer, wrong_peer):
        peer.close()
    worker.close()


def insider(address: Address) -> zmq.Socket:
    public, private = zmq.curve_keypair()
    secret = address.secret.encode()
    return raw_peer(address, CURVE_SERVERKEY=secret, CURVE_PUBLICKEY=public, CURVE_SECRETKEY=private)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00" * 64],
        [b"\xc1junk"],
        [msgspec.msgpack.encode({"type": "NoSuchMessage"})],
        [msgspec.msgpack.encode({"type": "Pong", "nonce": "text", "last_step_age": 0.0, "busy": False})],
        [msgspec.msgpack.encode({"type": "Pong", "nonce": 1, "last_step_age": 0.0, "busy": False, "extra": 1})],
        [msgspec.msgpack.encode({"type": "Ping", "nonce": 1})],  # a message, but of the other direction
        [b"\xdb\xff\xff\xff\xff"],  # a string that claims 4 GiB
        [b"\x91" * 10_000],  # nested ten thousand deep
        [msgspec.msgpack.encode(Pong(1, 0.0, False)), b"second frame"],
    ],
)
def test_junk_from_inside_is_dropped(front_end: FrontEndSocket, frames: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    peer = insider(front_end.address)
    peer.send_multipart(frames)
    peer.send(msgspec.msgpack.encode(Pong(7, 0.0, True)))
    assert [message for _, message in receive(front_end)] == [Pong(7, 0.0, True)]
    assert len(caplog.records) == 1
    peer.close()


def test_worker_drops_junk_too(front_end: FrontEndSocket, caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerSocket(front_end.address)
    worker.send(Hello(0, 0, "steps"))
    ((peer, _),) = receive(front_end)
    front_end._socket.send_multipart([peer, b"\x00junk"])
    front_end.send(peer, Ping(1))
    assert worker.receive(3.0) == [Ping(1)]
    assert len(caplog.records) == 1
    worker.close()


def test_oversized_frames_end_their_connection_only(front_end: FrontEndSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, worker = insider(front_end.address), WorkerSocket(front_end.address)
    peer.send(b"x" * (transport.MAX_FRAME_BYTES + 1))
    worker.send(Hello(0, 0, "steps"))
    assert [message for _, message in receive(front_end)] == [Hello(0, 0, "steps")]
    assert receive(front_end, wait_s=0.5) == []
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 100)
    with pytest.raises(EngineError, match="frame limit"):
        worker.send(Hello(0, 0, "x" * 200))
    peer.close()
    worker.close()


def test_a_peer_that_left_is_noticed(front_end: FrontEndSocket) -> None:
    worker = WorkerSocket(front_end.address)
    worker.send(Hello(0, 0, "steps"))
    ((peer, _),) = receive(front_end)
    worker.close()
    limit = time.monotonic() + 3.0
    while front_end.send(peer, Ping(1)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not front_end.send(peer, Ping(1))


def test_two_launches_have_ports_and_secrets_of_their_own(front_end: FrontEndSocket) -> None:
    """Report D10: a port is bound and held, never probed and released."""
    other = FrontEndSocket("127.0.0.1")
    assert other.address.endpoint != front_end.address.endpoint and other.address.secret != front_end.address.secret
    assert Address.load(other.address.dump()) == other.address
    other.close()
