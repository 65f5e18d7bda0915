"""A run over all GPUs of a host that may be stopped and started again: what it asks for, its lines, its processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import decode
from benchmarks.harness import run_parts
from benchmarks.records import ROOT, Records
from tests.distributed.launched import Launched, torchrun

METHOD = "One host with eight (or four, or two) GPUs: every run that needs them, in one script"
SILENT_S = 300.0  # of ranks that hang: a case takes ten seconds, loading and compiling at the worst a minute or two


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a run asks for; `tiny` is for a dry run on a CPU."""

    prompts: int = 50
    tokens: int = 64
    rows: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    row_width: int = 7168
    rates: tuple[float, ...] = (4.0, 16.0, 64.0, 128.0)
    requests: int = 256
    contexts: tuple[int, ...] = decode.CONTEXTS
    shapes: tuple[str, ...] = ("deepseek_v3.1", "longcat_flash")
    engine: tuple[str, ...] = ("--cache-memory-bytes", str(2 << 30))
    decode: tuple[str, ...] = ("--batches",)  # no others beside the equal and the largest ones

    @staticmethod
    def of(world: int, device: str) -> Sizes:
        if device == "cpu":
            return Sizes.tiny()
        if world >= 4:
            return Sizes()
        # Two GPUs answer how far the simulation is off; they say nothing of Figure 1, so few cases do.
        return Sizes(
            contexts=(16384, 65536), shapes=("deepseek_v3.1",), rates=(16.0, 64.0), decode=("--batches", "--most", "32")
        )

    @staticmethod
    def tiny() -> Sizes:
        return Sizes(
            prompts=50, tokens=8, rows=(1, 3), row_width=64, rates=(2.0,), requests=4, contexts=(256,), shapes=("deepseek_v3.1",),
            engine=("--num-cache-blocks", "128", "--max-model-len", "2048", "--dtype", "float32", "--cache-format", "fp32"),
            decode=("--device", "cpu", "--cache-memory-bytes", str(4 << 20), "--batches", "2", "--most", "3"),
        )  # fmt: skip


class Run:
    """One execution of the script. world: ranks; a line counts as done for this device, revision and world; scratch: of logs
    and shapes made here."""

    def __init__(self, world: int, device: str, sizes: Sizes, folder: Path) -> None:
        self.world, self.device, self.sizes, self.folder = world, device, sizes, folder
        self.scratch = folder / "eight_gpus"
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.decode_results = folder / "eight_gpus_decode.jsonl"
        self.records = Records(folder / "eight_gpus.jsonl", device=device, method=METHOD, seed=0)

    def has(self, **key: Any) -> bool:
        state = self.records.state
        return self.records.has(**key, world=self.world, device=state["device"], git=state["git"])

    def write(self, **fields: Any) -> None:
        transport = "nccl" if self.device == "cuda" else "gloo"
        self.records.write(figure="eight_gpus", world=self.world, transport=transport, **fields)
        print(json.dumps({name: value for name, value in fields.items() if name != "report"}), flush=True)

    def log(self, name: str) -> Path:
        return self.scratch / f"{name}.log"

    def launch(self, dp: int, tp: int, name: str) -> Launched:
        """The user's own command: torchrun starts one process, which supervises the workers."""
        options = ("--dp", str(dp), "--tp", str(tp), "--no-access-log", "--device", self.device, *self.sizes.engine)
        return Launched(torchrun(), *options, log=self.log(name))

    def torchrun(self, name: str, *module: str, environment: Mapping[str, str] | None = None) -> str:
        """Output of a module on all ranks, kept as the log of this name. Raises RuntimeError with its end when a rank fails,
        or when nothing comes for SILENT_S."""
        command = [*torchrun()[:1], "--standalone", "--nproc-per-node", str(self.world), "-m", *module]
        with self.log(name).open("wb") as out:
            ranks = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | (environment or {}), stdout=out, stderr=subprocess.STDOUT
            )
            try:
                while ranks.poll() is None and time.time() - self.log(name).stat().st_mtime < SILENT_S:
                    time.sleep(0.1)
                how = f"ended with {ranks.returncode}" if ranks.poll() is not None else f"said nothing for {SILENT_S:.0f} s"
            finally:
                if ranks.poll() is None:
                    ranks.terminate()  # torchrun ends its ranks, by force after 30 s
                    ranks.wait()
        text = self.log(name).read_text(errors="replace")
        if ranks.returncode:
            raise RuntimeError(f"{' '.join(command)} {how}:\n{text[-3000:]}")
        return text


def each(tasks: Mapping[str, Callable[[], object]]) -> None:
    """All of them, whichever fail. Raises RuntimeError after the last when one did."""
    if not run_parts(tasks):
        raise RuntimeError("not everything went well, see above")
