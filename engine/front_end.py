"""The front end process as its parent, rank 0, sees it: started first, fed its configuration, watched, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict

from engine.config import FrontEndConfig
from engine.errors import EXIT_REFUSED, WorkerFailed
from engine.transport import REPORT, Address

END_WITHIN_S = 10.0


class FrontEndProcess:
    """The server, as a child of rank 0: a new interpreter that never loads torch."""

    def __init__(self, config: FrontEndConfig) -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server"],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
            env={**os.environ, REPORT: str(write)},
        )
        os.close(write)
        self._report = read
        self.orderly = threading.Event()  # the engine agreed to stop; the front end's end is expected
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(config)).encode() + b"\n")
        self.process.stdin.flush()  # and stays open: its end tells the front end that rank 0 is gone
        threading.Thread(target=self._watch, daemon=True).start()

    def address(self) -> Address:
        """Where workers connect. Raises WorkerFailed if the front end ended instead of saying it."""
        with os.fdopen(self._report, "rb") as pipe:
            report = pipe.read()
        if not report:
            raise WorkerFailed(f"the front end ended with status {self.process.wait()} while starting")
        return Address.load(report)

    def _watch(self) -> None:
        """End this process when the front end ends unasked."""
        status = self.process.wait()
        if self.orderly.wait(0.0 if status else END_WITHIN_S):
            return
        if status != EXIT_REFUSED:
            print(f"the front end ended with status {status}; ending the engine", file=sys.stderr, flush=True)
        os._exit(EXIT_REFUSED if status == EXIT_REFUSED else 1)

    def kill(self) -> None:
        """End it and say nothing: this process is about to end as well."""
        self.orderly.set()
        self.process.kill()

    def finish(self) -> int:
        """Wait for an orderly end; its exit status."""
        self.orderly.set()
        try:
            return self.process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return 1
