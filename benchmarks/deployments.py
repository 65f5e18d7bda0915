"""Published shapes with dummy weights over all ranks of a host, case by case beside one simulated rank of the same."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, newest, read
from benchmarks.several_gpus import Run, each
from benchmarks.workloads import SHAPES, cut_layers, tiny_shape
from models.config import load_model_config

PUBLISHED_RANKS = 8  # the published shapes fill eight devices; fewer ranks take fewer layers of them
PAIRED = ("shape", "dp", "tp", "format", "context", "batch")  # what a case and its simulation have in common


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A shape over all ranks; its cases are measured by benchmarks/decode.py, once really and once as one simulated rank."""

    run: Run
    folder: Path
    dp: int
    tp: int

    def __str__(self) -> str:
        return f"{self.folder.name}_dp{self.dp}_tp{self.tp}"

    def command(self) -> list[str]:
        cases = ["--shapes", str(self.folder), "--contexts", *map(str, self.run.sizes.contexts), *self.run.sizes.decode]
        return ["benchmarks.decode", *cases, "--output", str(self.run.decode_results), "--worlds", f"dp={self.dp},tp={self.tp}"]

    def lines(self, figure: str, simulated: bool) -> list[dict[str, Any]]:
        """Of this device and revision."""
        wanted = {"figure": figure, "shape": self.folder.name, "dp": self.dp, "tp": self.tp, "simulated": simulated}
        wanted |= {name: self.run.records.state[name] for name in ("device", "git")}
        return [line for line in read(self.run.decode_results) if all(line.get(key) == value for key, value in wanted.items())]

    def is_done(self, simulated: bool) -> bool:
        return self.run.has(part="ranks", shape=self.folder.name, dp=self.dp, tp=self.tp, simulated=simulated)

    def mark_done(self, simulated: bool, seconds: float) -> None:
        """Every case has its line; some say that the case failed."""
        failed = {(line["format"], line["context"], line["batch"]) for line in self.lines("decode_failed", simulated)}
        key = {"part": "ranks", "shape": self.folder.name, "dp": self.dp, "tp": self.tp, "simulated": simulated}
        self.run.write(**key, seconds=seconds, cases_failed=sorted(failed))


def measure(run: Run) -> None:
    """Real ranks of every deployment in turn, then each one's simulation, all of them at once on a device of their own."""
    layouts = list(dict.fromkeys([(run.world, 1), (run.world // 2, 2), (1, run.world)]))

    def one(name: str) -> None:
        folder = shape_for(name, run.world, run.scratch) if run.device == "cuda" else tiny_shape(run.scratch)
        deployments = [Deployment(run, folder, dp, tp) for dp, tp in layouts]
        real = {str(deployment): functools.partial(real_ranks, deployment) for deployment in deployments}
        try:
            each(real | {f"{folder.name} simulated": functools.partial(simulated_ranks, deployments)})
        finally:
            for pair in pairs(run.decode_results):
                if not run.has(part="shapes", **{name: pair[name] for name in PAIRED}):
                    run.write(part="shapes", **pair)

    each({name: functools.partial(one, name) for name in run.sizes.shapes})


def real_ranks(deployment: Deployment) -> None:
    """A case that ended its ranks has a line that says so: the others go on without it. Every deployment starts ranks of its
    own, since communicators of an earlier one would keep their memory."""
    if deployment.is_done(simulated=False):
        return
    start = time.perf_counter()
    while True:
        before = len(deployment.lines("decode_failed", simulated=False))
        try:
            print(deployment.run.torchrun(str(deployment), *deployment.command(), "--real")[-4000:], flush=True)
            break
        except RuntimeError as error:
            if len(deployment.lines("decode_failed", simulated=False)) == before:
                raise
            print(f"{deployment}: a case failed, on with the others: {error}", flush=True)
    deployment.mark_done(simulated=False, seconds=time.perf_counter() - start)


def simulated_ranks(deployments: Sequence[Deployment]) -> None:
    """One rank of each deployment that ran, with the bytes of cache that the real ranks had, so that batches are the same."""
    processes: dict[Deployment, subprocess.Popen[bytes]] = {}
    start = time.perf_counter()
    try:
        for device, deployment in enumerate(deployments):
            if deployment.is_done(simulated=True) or not (lines := deployment.lines("decode", simulated=False)):
                continue
            held = ["--cache-memory-bytes", str(lines[-1]["cache_bytes"])]
            with deployment.run.log(f"{deployment}_simulated").open("wb") as out:
                processes[deployment] = subprocess.Popen(
                    [sys.executable, "-m", *deployment.command(), *held],
                    cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": str(device)}, stdout=out, stderr=subprocess.STDOUT,
                )  # fmt: skip
        failed = [str(deployment) for deployment, process in processes.items() if process.wait()]
    finally:
        for process in processes.values():
            process.kill()
    for deployment in processes:
        print(deployment.run.log(f"{deployment}_simulated").read_text(errors="replace")[-3000:], flush=True)
        if str(deployment) not in failed:
            deployment.mark_done(simulated=True, seconds=time.perf_counter() - start)
    if failed:
        raise RuntimeError(f"simulations failed, see above: {', '.join(failed)}")


def shape_for(name: str, ranks: int, folder: Path) -> Path:
    """A published shape with so many of its layers that `ranks` devices hold what eight hold of the whole; its folder tells."""
    if ranks >= PUBLISHED_RANKS:
        return SHAPES / name
    return cut_layers(name, load_model_config(SHAPES / name).num_decoder_layers * ranks // PUBLISHED_RANKS, folder)


def pairs(path: Path) -> list[dict[str, Any]]:
    """Real cases beside their simulation: prediction error = simulated step / real step - 1. With the collectives' share, which the
    simulation lacks, and the experts' time alone, which depends on how many of them the sequences choose."""
    found: dict[tuple[Any, ...], dict[bool, dict[str, Any]]] = {}
    for line in newest((line for line in read(path) if line["figure"] == "decode"), *PAIRED, "simulated"):
        found.setdefault(tuple(line[key] for key in PAIRED), {})[line["simulated"]] = line
    return [
        dict(zip(PAIRED, key))
        | {
            "kind": both[False]["kind"],
            "step_us": both[False]["step_us"],
            "simulated_step_us": both[True]["step_us"],
            "tokens_per_s_per_gpu": both[False]["tokens_per_s_per_gpu"],
            "simulated_tokens_per_s_per_gpu": both[True]["tokens_per_s_per_gpu"],
            "collectives_share": both[False]["collectives_share"],
            "experts_us": both[False]["parts"]["experts"]["us"],
            "simulated_experts_us": both[True]["parts"]["experts"]["us"],
            "prediction_error": both[True]["step_us"] / both[False]["step_us"] - 1,
        }
        for key, both in found.items()
        if len(both) == 2
    ]
