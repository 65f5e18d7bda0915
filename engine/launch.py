"""`torchrun -m engine.launch --dp 4 --tp 2 --model M`: start the workers of an engine and the server in front of them.

Three cases, told apart by WORLD_SIZE: equal to dp * tp, this process is one worker; one process for dp * tp > 1, it
supervises dp * tp workers of its own on this host; anything else is an error that prints the right command.
Nothing imports this module, so it may run as __main__. The supervisor never loads torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from engine.arguments import add_engine_arguments, add_server_arguments, engine_config, server_config
from engine.config import EngineConfig, FrontEndConfig, ParallelConfig, ServerConfig
from engine.errors import EXIT_REFUSED, EngineError
from engine.front_end import FrontEndProcess
from engine.hub import DEMO_MODEL, resolve_model
from engine.place import LIFELINE, RUN_FOLDER, Place

API_KEY = "SNAPMLA_API_KEY"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
AFTER_RANK_0_S = 1.0
SAME_SIGNAL_S = 1.0  # a terminal's Ctrl-C may arrive twice: from the terminal and from torchrun
TERMINATE_AFTER_S = 1.0
_POLL_S = 0.05


def wrong_world_size(parallel: ParallelConfig, world_size: int, local_world_size: int, argv: Sequence[str]) -> str:
    """The message for a WORLD_SIZE that is neither 1 nor dp * tp, with the command that is right."""
    nodes = max(1, world_size // local_world_size)
    arguments = " ".join(argv)
    text = f"--dp {parallel.dp} --tp {parallel.tp} needs {parallel.world_size} processes, but WORLD_SIZE is {world_size}."
    if parallel.world_size % nodes:
        return f"{text} {parallel.world_size} processes do not spread evenly over {nodes} nodes; change --nnodes."
    per_node = parallel.world_size // nodes
    if nodes == 1:
        return f"{text} Run: torchrun --nproc-per-node {per_node} -m engine.launch {arguments}"
    return f"{text} Run on each node: torchrun --nnodes {nodes} --nproc-per-node {per_node} ... -m engine.launch {arguments}"


def asked_to_stop() -> bool:
    """Whether one of STOP_SIGNALS, which are blocked, has come since the last call. `signal.sigtimedwait` would not do: in a
    process that was paused and goes on (Ctrl-Z and fg, a laptop's lid) it may return a signal that nobody sent."""
    if signal.sigpending().isdisjoint(STOP_SIGNALS):
        return False
    signal.sigwait(STOP_SIGNALS)
    return True


class Supervisor:
    """Starts one worker process per rank and ends them all when one ends.

    Workers lead sessions of their own, so that a terminal's Ctrl-C reaches only the supervisor and a whole family
    (rank 0 and its front end) can be killed at once.
    """

    def __init__(self, argv: Sequence[str], world_size: int, server: ServerConfig) -> None:
        self._argv, self._world_size = list(argv), world_size
        self._grace_s = server.heartbeat_s + 2.0
        self._workers: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Exit status: 0 after an orderly stop, EXIT_REFUSED for a configuration that cannot work, else 1."""
        folder = tempfile.mkdtemp(prefix="snapmla-")
        lifeline, ours = os.pipe()
        try:
            for rank in range(self._world_size):
                self._workers.append(self._start(rank, folder, lifeline))
            os.close(lifeline)
            return self._watch()
        finally:
            self._kill()
            os.close(ours)
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, rank: int, folder: str, lifeline: int) -> subprocess.Popen[bytes]:
        # the agent's own variables would make torch join the agent's store instead of ours
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "MASTER_"))}
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            RUN_FOLDER: folder,
            LIFELINE: str(lifeline),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "engine.launch", *self._argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(lifeline,),
            start_new_session=True,
        )

    def _watch(self) -> int:
        """Forward signals; when a worker ends, give the others a moment to end by themselves, then make them."""
        first_signal = deadline = float("inf")
        running = dict(enumerate(self._workers))
        while running:
            time.sleep(_POLL_S)
            if asked_to_stop():
                now = time.monotonic()
                if now - first_signal > SAME_SIGNAL_S:
                    print("second signal: ending at once", file=sys.stderr, flush=True)
                    return 1
                first_signal = min(first_signal, now)
                self._workers[0].send_signal(signal.SIGTERM)
            for rank, worker in [pair for pair in running.items() if pair[1].poll() is not None]:
                del running[rank]
                if worker.returncode not in (0, EXIT_REFUSED) and deadline == float("inf"):
                    print(
                        f"rank {rank} ended with {_status(worker.returncode)}; ending the others", file=sys.stderr, flush=True
                    )
                # the front end notices a dead rank by itself and answers its open requests; with rank 0 it is gone
                grace = AFTER_RANK_0_S if rank == 0 else self._grace_s
                deadline = min(deadline, time.monotonic() + grace)
            if running and time.monotonic() > deadline:
                break
        statuses = [worker.returncode for worker in self._workers]
        return EXIT_REFUSED if EXIT_REFUSED in statuses else int(any(status != 0 for status in statuses))

    def _kill(self) -> None:
        """SIGTERM, then SIGKILL, to every process of every worker's session."""
        alive = [worker for worker in self._workers if worker.poll() is None]
        for worker in alive:
            worker.send_signal(signal.SIGTERM)
        limit = time.monotonic() + (TERMINATE_AFTER_S if alive else 0.0)
        while time.monotonic() < limit and any(worker.poll() is None for worker in alive):
            time.sleep(_POLL_S)
        for worker in self._workers:
            try:
                os.killpg(worker.pid, signal.SIGKILL)  # the leader may be gone and a child of it still here
            except ProcessLookupError:
                continue
            worker.wait()


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser(
        prog="python -m engine.launch",
        description="Serve a model over an OpenAI-compatible HTTP API.",
    )
    add_engine_arguments(parser)
    add_server_arguments(parser)
    args = parser.parse_args(argv)
    return engine_config(args), server_config(args, environment.get(API_KEY))


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        place = Place.read(os.environ)
        config, server = parse(argv, os.environ)
        wanted = config.parallel.world_size
        if place.world_size not in (1, wanted):
            raise EngineError(wrong_world_size(config.parallel, place.world_size, place.local_world_size, argv))
        if place.rank == 0 and not place.run_folder and config.model == DEMO_MODEL:
            print("serving the bundled demo model; --model takes a folder or a hub id", flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        folder = resolve_model(config.model)
        if place.world_size != wanted:
            return Supervisor(argv, wanted, server).run()
        # a taken port ends the launch now, and the front end loads while torch does
        front_end = (
            FrontEndProcess(FrontEndConfig(config, server, str(folder), place.bind_address())) if place.rank == 0 else None
        )
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    from engine.replica import run_worker  # loads torch

    return run_worker(config, server, folder, place, front_end, began)


if __name__ == "__main__":
    sys.exit(main())
