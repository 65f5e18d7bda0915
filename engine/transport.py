"""ZeroMQ sockets that carry only the typed messages of engine/messages.py between the front end and the workers.

The front end binds one ROUTER and makes a CURVE key pair for this launch. The public half never goes over the network
in the clear (it travels through a pipe and the launch's own store), so it is the launch's secret: a peer that does not
know it fails the handshake, and libzmq drops the connection before one of its bytes reaches us. Traffic is encrypted
and the peers know whom they talk to. Frames above MAX_FRAME_BYTES end the connection that sent them. A frame that is
no message is dropped with a warning. Nothing is pickled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import zmq

from engine.errors import EngineError
from engine.messages import FromReplica, ToReplica

REPORT = "SNAPMLA_REPORT"  # names the descriptor on which the front end says where workers connect
MAX_FRAME_BYTES = 64 << 20  # a 128k prompt is half a MiB; prompt log probabilities of one are about 40 MiB
HANDSHAKE_LIMIT_MS = 10_000
log = logging.getLogger("engine.transport")
Received = TypeVar("Received", ToReplica, FromReplica)

_encode = msgspec.msgpack.Encoder().encode
_decode_to_replica = msgspec.msgpack.Decoder(ToReplica).decode
_decode_from_replica = msgspec.msgpack.Decoder(FromReplica).decode


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the front end listens, and the secret that lets a worker in."""

    endpoint: str
    secret: str

    def dump(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def load(data: bytes | str) -> Address:
        return msgspec.json.decode(data, type=Address)


def _frame(message: ToReplica | FromReplica) -> bytes:
    frame = _encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise EngineError(f"{type(message).__name__} of {len(frame)} bytes is above the frame limit of {MAX_FRAME_BYTES}")
    return frame


def _decoded(frames: list[bytes], decode: Callable[[bytes], Received]) -> Received | None:
    """The message that one frame holds, None for anything else."""
    try:
        if len(frames) != 1:
            raise msgspec.DecodeError(f"{len(frames)} frames")
        return decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("dropped a frame that is no message: %s", error)
        return None


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the number of open requests, not here: a dropped message would hang one
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)


class FrontEndSocket:
    """The front end's end: many peers, told apart by the identity libzmq gave each connection."""

    def __init__(self, host: str) -> None:
        """Bind a free port of `host` (an address, not a name) and hold it."""
        public, private = zmq.curve_keypair()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:0")
        self.address = Address(self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode(), public.decode())

    def fileno(self) -> int:
        """For an event loop: readable means `receive` may have something. Edge-triggered: drain it, also after sends."""
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, peer: bytes, message: ToReplica) -> bool:
        """Queue a message; False if the peer is gone."""
        try:
            self._socket.send_multipart([peer, _frame(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def receive(self) -> Iterator[tuple[bytes, FromReplica]]:
        """All messages that are here, without waiting."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (message := _decoded(frames[1:], _decode_from_replica)) is not None:
                yield frames[0], message

    def close(self) -> None:
        self._socket.close()


class WorkerSocket:
    """A worker's end. One thread uses it at a time; a worker has one for its steps and one for its heartbeat."""

    def __init__(self, address: Address) -> None:
        public, private = zmq.curve_keypair()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, address.secret.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self._socket.setsockopt(zmq.IPV6, "[" in address.endpoint)
        self._socket.connect(address.endpoint)

    def send(self, message: FromReplica) -> None:
        self._socket.send(_frame(message))

    def receive(self, wait_s: float = 0.0) -> list[ToReplica]:
        """All messages that are here; waits up to wait_s seconds for the first."""
        if wait_s > 0 and not self._socket.poll(max(1, int(wait_s * 1000))):
            return []
        messages: list[ToReplica] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            if (message := _decoded(frames, _decode_to_replica)) is not None:
                messages.append(message)

    def close(self, linger_s: float = 0.0) -> None:
        """Close; linger_s seconds are allowed for what was sent to leave."""
        self._socket.close(linger=int(linger_s * 1000))
