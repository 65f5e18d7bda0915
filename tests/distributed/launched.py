"""A launch of the whole engine as a user starts it, and a look at its process tree."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--num-cache-blocks", "128", "--max-model-len", "2048")  # a gigabyte of cache a rank is too much for a test
START_LIMIT_S = 240.0


def torchrun(*options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("torchrun")), *options, "-m", "engine.launch"]


PYTHON = [sys.executable, "-m", "engine.launch"]


class Launched:
    """Context manager; whatever happens, nothing of the tree is left when it ends."""

    def __init__(self, command: list[str], *options: str, log: Path, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *options, "--port", str(self.port)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: set[int] = set()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.tree(), *self._seen]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    # ---- processes

    def tree(self) -> list[int]:
        """The launcher and all its descendants that live."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            if self.process.poll() is None or pid != self.process.pid:
                found.append(pid)
            queue += children.get(pid, [])
        self._seen |= set(found)
        return found

    def rank(self, number: int) -> int:
        """Process id of a worker."""
        return next(pid for pid in self.tree() if environment(pid).get("RANK") == str(number) and "launch" in command(pid))

    def front_end(self) -> int:
        return next(pid for pid in self.tree() if command(pid).endswith("-m server"))

    def left(self) -> list[int]:
        """Processes of this launch that still live, however they were orphaned."""
        return [pid for pid in self._seen if Path(f"/proc/{pid}").exists() and state(pid) not in ("Z", "")]

    def wait(self, limit_s: float) -> int:
        """Exit status of the launcher."""
        return self.process.wait(limit_s)

    # ---- HTTP

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text()}"
            try:
                if self.get("/ready", timeout=5)["status"] == "ready":
                    self.tree()
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"not ready within {limit_s} s: {self.text()}")

    def get(self, path: str, timeout: float = 30) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as response:
            return json.load(response)

    def _post(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=timeout)

    def post(self, path: str, timeout: float = 240, **body: Any) -> dict[str, Any]:
        with self._post(path, body, timeout) as response:
            return json.load(response)

    def stream(self, path: str, timeout: float = 240, **body: Any) -> Iterator[dict[str, Any]]:
        with self._post(path, body | {"stream": True}, timeout) as response:
            for line in response:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    yield json.loads(line[6:])

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def posted(body: dict[str, Any], version: str = "1.1", headers: str = "") -> bytes:
    """A completion request as it travels. headers: more of them, each with its end of line."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def free_port() -> int:
    """A port nobody listens on now; the server under test takes it a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
