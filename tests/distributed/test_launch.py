"""Launches as users make them: the literal command, faults of every process, ports, signals. CPU, gloo, the demo model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.config import ParallelConfig
from engine.launch import wrong_world_size
from tests.distributed.launched import PYTHON, ROOT, SMALL, Launched, is_free, state, torchrun

PROMPT = "In the beginning"
NOTICE_S = 5.0  # the promise: a dead or frozen process is noticed within
END_S = 20.0  # and the tree is gone a moment later


def ends_clean(launched: Launched, nonzero: bool, limit_s: float = END_S) -> None:
    status = launched.wait(limit_s)
    assert (status != 0) is nonzero, f"status {status}: {launched.text()}"
    limit = time.monotonic() + 5
    while launched.left() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not launched.left(), "processes are left"
    assert is_free(launched.port)


@pytest.mark.timeout(420)
def test_the_literal_command(tmp_path: Path) -> None:
    """Report D01, D09, D11, O09: `torchrun -m engine.launch --dp 4 --tp 2` serves the demo model with the same tokens on every
    replica while the others are idle, lets a stream finish after SIGTERM, and leaves nothing behind."""
    with Launched(torchrun(), "--dp", "4", "--tp", "2", *SMALL, "--cache-format", "fp32", log=tmp_path / "log") as launched:
        launched.wait_ready()
        assert launched.text().startswith("serving the bundled demo model")
        assert all(phase in launched.text() for phase in ("process groups", "pre-flight", "weights", "cache"))
        answers = {
            launched.post("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0, data_parallel_rank=rank)["choices"][
                0
            ]["text"]
            for rank in range(4)
        }
        assert len(answers) == 1
        tokens, refused = [], threading.Event()

        def read() -> None:
            for chunk in launched.stream("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0):
                tokens.append(chunk["choices"][0]["text"])
                if len(tokens) == 1:
                    launched.process.send_signal(signal.SIGTERM)
                    refused.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert refused.wait(120)
        ends_clean(launched, nonzero=True, limit_s=60)  # torchrun's own status after a signal is not 0
        reader.join(10)
        assert "".join(tokens) == answers.pop()


def test_a_pause_is_no_signal_to_stop() -> None:
    """Ctrl-Z and fg, or a laptop that sleeps: a launch that was paused goes on, and still ends when it is asked to."""
    code = """if True:
        import signal
        from engine.config import ServerConfig
        from engine.launch import STOP_SIGNALS, Supervisor

        class Worker:
            returncode = None

            def poll(self):
                return self.returncode

            def send_signal(self, what):
                self.returncode = 0

        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        supervisor = Supervisor([], 1, ServerConfig())
        supervisor._workers.append(Worker())
        print("watching", flush=True)
        raise SystemExit(supervisor._watch())
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "watching\n"
    for _ in range(4):
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        process.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


FAULTS = [
    pytest.param("rank 1", signal.SIGKILL),
    pytest.param("rank 1", signal.SIGSTOP, marks=pytest.mark.slow),
    pytest.param("rank 0", signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param("rank 0", signal.SIGSTOP, marks=pytest.mark.slow),
    pytest.param("front end", signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param("front end", signal.SIGSTOP, marks=pytest.mark.slow),
]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("who", "what"), FAULTS)
def test_a_dead_or_frozen_process_ends_the_tree(tmp_path: Path, who: str, what: signal.Signals) -> None:
    """Report D04, D05, D08, O08: noticed within five seconds, the open stream gets an error, the tree ends with a non-zero
    status, no process and no port is left."""
    with Launched(PYTHON, "--dp", "2", *SMALL, log=tmp_path / "log") as launched:
        launched.wait_ready()
        events: list[dict[str, object]] = []
        broken, first = threading.Event(), threading.Event()

        def read() -> None:
            try:
                for chunk in launched.stream("/v1/completions", prompt=PROMPT, max_tokens=1500, ignore_eos=True):
                    events.append(chunk)
                    first.set()
            except OSError:
                pass  # the front end itself was hit
            broken.set()

        threading.Thread(target=read, daemon=True).start()
        assert first.wait(120)
        victim = launched.front_end() if who == "front end" else launched.rank(int(who.split()[1]))
        os.kill(victim, what)
        hit = time.monotonic()
        if who != "front end":
            assert broken.wait(NOTICE_S)
            print(f"{what.name} of {who}: noticed after {time.monotonic() - hit:.1f} s")
            assert "error" in events[-1], events[-1]
        ends_clean(launched, nonzero=True)
        print(f"{what.name} of {who}: tree gone after {time.monotonic() - hit:.1f} s")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_frozen_single_process_ends(tmp_path: Path) -> None:
    """Report D05: without a supervisor the front end ends the rank that froze, and itself."""
    with Launched(PYTHON, *SMALL, log=tmp_path / "log") as launched:
        launched.wait_ready()
        os.kill(launched.process.pid, signal.SIGSTOP)
        ends_clean(launched, nonzero=True)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_killed_supervisor_takes_its_workers_along(tmp_path: Path) -> None:
    """Report O08."""
    with Launched(PYTHON, "--dp", "2", *SMALL, log=tmp_path / "log") as launched:
        launched.wait_ready()
        launched.process.kill()
        limit = time.monotonic() + END_S
        while launched.left() and time.monotonic() < limit:
            time.sleep(0.1)
        assert not launched.left() and is_free(launched.port)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_interrupt_while_loading(tmp_path: Path) -> None:
    """Report D08: Ctrl-C before the engine is ready ends every child."""
    with Launched(PYTHON, "--dp", "2", *SMALL, log=tmp_path / "log") as launched:
        limit = time.monotonic() + 120
        while "process groups" not in launched.text() and time.monotonic() < limit:
            time.sleep(0.05)
        launched.tree()
        launched.process.send_signal(signal.SIGINT)
        launched.wait(END_S)
        assert not launched.left() and is_free(launched.port)


@pytest.mark.timeout(300)
def test_taken_port_ends_the_launch_before_weights_are_read(tmp_path: Path) -> None:
    with (
        Launched(PYTHON, *SMALL, log=tmp_path / "first") as first,
        Launched(PYTHON, *SMALL, log=tmp_path / "second", port=first.port) as second,
    ):
        # whichever binds first serves; the other ends at once and says why
        limit = time.monotonic() + 120
        while first.process.poll() is None and second.process.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
        winner, loser = (first, second) if second.process.poll() is not None else (second, first)
        assert loser.process.returncode not in (0, None)
        assert f"cannot listen on 127.0.0.1:{first.port}" in loser.text() and "--port" in loser.text()
        assert "weights" not in loser.text()
        winner.wait_ready()
        winner.process.send_signal(signal.SIGTERM)
        assert winner.wait(60) == 0, winner.text()
        assert not winner.left() and not loser.left()


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_two_servers_at_once(tmp_path: Path) -> None:
    """Report D10, D16: no port but HTTP's is fixed, so engines share a host; each SIGTERM ends its own with status 0."""
    with (
        Launched(PYTHON, "--dp", "2", *SMALL, log=tmp_path / "a") as a,
        Launched(PYTHON, "--tp", "2", *SMALL, log=tmp_path / "b") as b,
    ):
        a.wait_ready()
        b.wait_ready()
        for launched in (a, b):
            launched.post("/v1/completions", prompt=PROMPT, max_tokens=2)
        a.process.send_signal(signal.SIGTERM)
        ends_clean(a, nonzero=False, limit_s=60)
        b.post("/v1/completions", prompt=PROMPT, max_tokens=2)
        b.process.send_signal(signal.SIGTERM)
        ends_clean(b, nonzero=False, limit_s=60)


@pytest.mark.timeout(300)
def test_a_worker_that_fails_while_loading(tmp_path: Path) -> None:
    """Report D18, D19: the reason is on the screen once, the tree ends by itself with the status of a wrong argument."""
    with Launched(PYTHON, "--tp", "2", "--num-cache-blocks", str(10**9), log=tmp_path / "log") as launched:
        ends_clean(launched, nonzero=True, limit_s=120)
        assert launched.process.returncode == 2 and launched.text().count("num_cache_blocks: 1000000000 blocks") == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dp", "2", "--max-model-len", "99999999"), "error: max_model_len: the model's positions end at"),
        pytest.param(("--tp", "3"), "error: tp: 8 heads cannot be split over 3; valid: [1, 2, 4, 8]", marks=pytest.mark.slow),
        (("--reasoning-parser", "none such"), "error: reasoning_parser: 'none such'"),
    ],
)
def test_what_the_model_rules_out_is_said_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    """Report D18: one line that names the option, and the status of a wrong argument."""
    with Launched(PYTHON, *SMALL[:2], *options, log=tmp_path / "log") as launched:
        ends_clean(launched, nonzero=True, limit_s=240)
        first, *lines = launched.text().splitlines()
        assert launched.process.returncode == 2 and first.startswith("serving the bundled demo model")
        assert len(lines) == 1 and lines[0].startswith(message), lines


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_sigterm_under_load(tmp_path: Path) -> None:
    """Report O09: open streams finish within the drain limit, later requests get 503, the status is 0."""
    with Launched(PYTHON, "--dp", "2", *SMALL, "--drain-s", "60", log=tmp_path / "log") as launched:
        launched.wait_ready()
        done: list[str] = []

        def one() -> None:
            chunks = list(launched.stream("/v1/completions", prompt=PROMPT, max_tokens=24, ignore_eos=True))
            done.append(chunks[-1]["choices"][0]["finish_reason"])

        readers = [threading.Thread(target=one) for _ in range(8)]
        for reader in readers:
            reader.start()
        limit = time.monotonic() + 60
        while launched.get("/load")["num_open"] < 8 and time.monotonic() < limit:
            time.sleep(0.05)
        launched.process.send_signal(signal.SIGTERM)
        for reader in readers:
            reader.join(90)
        ends_clean(launched, nonzero=False, limit_s=60)
        assert done == ["length"] * 8


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_idle_engine_sleeps(tmp_path: Path) -> None:
    """Report D03: all replicas idle take next to no processor time, and the first request after a pause is served."""
    with Launched(PYTHON, "--dp", "2", *SMALL, log=tmp_path / "log") as launched:
        launched.wait_ready()
        time.sleep(1)
        before = {pid: _cpu_s(pid) for pid in launched.tree()}
        time.sleep(10)
        used = sum(_cpu_s(pid) - before[pid] for pid in before if state(pid))
        print(f"idle: {used / 10:.3f} cores")
        assert used < 2.0  # of ten seconds, over four processes
        launched.post("/v1/completions", prompt=PROMPT, max_tokens=2)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_wrong_process_counts_are_explained() -> None:
    """Report D11: a WORLD_SIZE that does not fit prints the command that does."""
    one_host = wrong_world_size(ParallelConfig(4, 2), 3, 3, ["--dp", "4", "--tp", "2"])
    assert "torchrun --nproc-per-node 8 -m engine.launch --dp 4 --tp 2" in one_host
    assert "--nnodes 2 --nproc-per-node 4" in wrong_world_size(ParallelConfig(4, 2), 2, 1, [])
    assert "do not spread evenly" in wrong_world_size(ParallelConfig(3, 1), 2, 1, [])


@pytest.mark.timeout(120)
def test_wrong_process_count_ends_at_once(tmp_path: Path) -> None:
    with Launched(torchrun("--nproc-per-node", "2"), "--dp", "4", "--tp", "2", log=tmp_path / "log") as launched:
        assert launched.wait(100) != 0
        assert "torchrun --nproc-per-node 8 -m engine.launch" in launched.text()
