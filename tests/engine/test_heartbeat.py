"""The heartbeat thread: answers while the main thread is busy, reports phases, ends the process when the front end dies."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from engine.heartbeat import Heartbeat
from engine.messages import EngineFailed, FromReplica, Hello, Phase, Ping, Pong, Shutdown
from engine.transport import FrontEndSocket

ROOT = Path(__file__).resolve().parents[2]


def receive(socket: FrontEndSocket, count: int, limit_s: float = 5.0) -> list[tuple[bytes, FromReplica]]:
    got: list[tuple[bytes, FromReplica]] = []
    limit = time.monotonic() + limit_s
    while len(got) < count and time.monotonic() < limit:
        got += socket.receive()
        time.sleep(0.005)
    return got


def test_phases_pings_and_failure() -> None:
    """Report D05, D06: a Ping is answered from the thread, with the age of the last step and whether there is work."""
    front_end = FrontEndSocket("127.0.0.1")
    heartbeat = Heartbeat(front_end.address, 3, 1, 60.0, lambda: None)
    heartbeat.report("interpreter", 1.5)
    heartbeat.enter("model")
    heartbeat.enter("ready")
    messages = receive(front_end, 5)
    peer = messages[0][0]
    assert [message for _, message in messages[:3]] == [
        Hello(3, 1, "heartbeat"),
        Phase(3, "interpreter", 1.5),
        Phase(3, "model"),
    ]
    done = messages[3][1]
    assert isinstance(done, Phase) and done.name == "model" and done.seconds is not None
    heartbeat.moved(busy=True)
    time.sleep(0.3)  # a long step
    front_end.send(peer, Ping(7))
    ((_, pong),) = receive(front_end, 1)
    assert isinstance(pong, Pong) and pong.nonce == 7 and pong.busy and pong.last_step_age >= 0.25
    front_end.send(peer, Shutdown())
    assert heartbeat.shutdown.wait(3)
    heartbeat.fail("device error")
    assert [message for _, message in receive(front_end, 1)] == [EngineFailed(1, "device error")]
    front_end.close()


CHILD = """
import sys, time
from engine.heartbeat import Heartbeat
from engine.transport import Address
Heartbeat(Address.load(sys.argv[1]), 0, 0, 1.0, lambda: print("lost", flush=True))
time.sleep(60)
"""


def test_a_silent_front_end_ends_the_worker() -> None:
    """Report O08: the main thread may be stuck; the process ends all the same, and first tells whoever has to know."""
    front_end = FrontEndSocket("127.0.0.1")
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, front_end.address.dump()], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    ((peer, _),) = receive(front_end, 1, limit_s=30)
    for nonce in range(10):  # alive, so the worker stays
        front_end.send(peer, Ping(nonce))
        time.sleep(0.2)
    assert child.poll() is None
    output, _ = child.communicate(timeout=20)  # and now silent
    assert child.returncode == 1 and output == "lost\n"
    front_end.close()
