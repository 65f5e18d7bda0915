"""Every figure of the paper by one command: `python -m benchmarks.reproduce [--quick] [--only FIGURE ...] [--folder FOLDER]`.

    fig1 decode_step decode_ratio   decode steps of whole models, one simulated rank (benchmarks/decode.py; a Hopper GPU)
    fig3 fig5 context sources   numerical fidelity (benchmarks/numerics.py)
    fig6 fig7 probe             the decode kernels, and what the fidelity probe costs (benchmarks/kernel_figures.py; a Hopper GPU)
    table1 table2               quality of the bundled model by cache format (benchmarks/quality.py)

Measures on this machine what FOLDER/results/*.jsonl lack, then draws into FOLDER/figures. Every measurement is appended as it is
made, so a run that was stopped goes on. What is no timing runs first, several processes at once where there are cores enough;
timings follow one after another with nothing beside them. Ends with what was left out and why. The numbers of the README are
in benchmarks/results; `--draw-only --folder benchmarks` draws those. Without a GPU everything is measured that needs none, at
contexts up to 4k with --quick; with one, numerical fidelity runs there too, at 32k and up to 256k tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import plots
from benchmarks.figure_style import Folders
from benchmarks.records import ROOT

WORLDS = ("dp=8,tp=1", "dp=4,tp=2", "dp=1,tp=8")
SHARING = (
    "decode",
    "kernel_figures",
    "numerics",
)  # parts of these share what takes long to make: weights, ceilings, activations
CORES = 4  # of a process that runs beside others
DRAWING = 15  # seconds that all figures take


@dataclass(frozen=True)
class Part:
    """What one figure needs of one module. seconds: (quick, full) as planned on an H200 if `gpu`, else on two cores of a server.

    arguments, quick, full: of every run, of a quick one, of a full one; gpu: True where a Hopper GPU is needed, False where the
    part is made only without one, None where it runs on the CPU anyway; timing: whether nothing may run beside it
    """

    figure: str
    module: str
    only: str
    seconds: tuple[int, int]
    gpu: bool | None
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    full: tuple[str, ...] = ()
    timing: bool = False


CUDA, CPU = ("--device", "cuda"), ("--device", "cpu")
DECODE = ("--shapes", "deepseek_v3.1", "longcat_flash", "--worlds", *WORLDS, "--batches")  # matched and largest batches only
PARTS = (
    Part("fig3", "numerics", "values", (5, 5), True, CUDA, quick=()),
    Part("fig5", "numerics", "layers", (10, 10), True, CUDA, quick=()),
    Part("context", "numerics", "context", (30, 30), True, CUDA, quick=()),
    Part("sources", "numerics", "sources", (10, 10), True, CUDA, quick=()),
    Part("context", "kernel_figures", "context", (10, 10), True),
    Part("table1", "quality", "perplexity", (30, 30), True, (*CUDA, "--rows", "60"), quick=()),
    Part("fig3", "numerics", "values", (15, 60), False, CPU),
    Part("fig5", "numerics", "layers", (40, 600), False, CPU),
    Part("context", "numerics", "context", (120, 3000), False, CPU),
    Part("sources", "numerics", "sources", (60, 900), False, CPU),
    Part("table1", "quality", "perplexity", (70, 300), None, CPU),
    Part("table1", "quality", "recall", (40, 1800), None, CPU),
    Part("table2", "quality", "generation", (50, 150), None, CPU),
    Part("fig7", "kernel_figures", "fig7", (25, 60), True, timing=True),
    Part("fig6", "kernel_figures", "fig6", (10, 10), True, timing=True),
    Part("probe", "kernel_figures", "probe", (35, 60), True, timing=True),
    Part("fig1", "decode", "", (200, 200), True, DECODE, quick=(), timing=True),
    Part("decode_step", "decode", "", (0, 0), True, DECODE, quick=(), timing=True),
    Part("decode_ratio", "decode", "", (0, 0), True, DECODE, quick=(), timing=True),
)


@dataclass(frozen=True)
class Run:
    """One process that measures for several figures."""

    figures: list[str]
    command: list[str]
    seconds: int
    timing: bool


def runs(figures: Sequence[str], quick: bool, gpu: bool, results: Path) -> list[Run]:
    """The processes that measure what the figures need and this machine can, timings last."""
    together: dict[tuple[object, ...], list[Part]] = {}
    for part in sorted(PARTS, key=lambda part: part.timing):
        if part.figure in figures and part.gpu in (None, gpu):
            alone = () if part.module in SHARING else (part.only,)
            chosen = (*part.arguments, *(part.quick if quick else part.full))
            together.setdefault((part.module, part.timing, chosen, alone), []).append(part)
    found = []
    for (module, timing, chosen, _), parts in together.items():
        only = [part.only for part in parts if part.only]
        out = ["--output" if module == "decode" else "--out", str(results / f"{module}.jsonl")]
        command = [f"benchmarks.{module}", *(["--only", *only] if only else []), *chosen, *out]
        seconds = sum(part.seconds[0 if quick else 1] for part in parts)
        found.append(Run(list(dict.fromkeys(part.figure for part in parts)), command, seconds, timing))
    return found


def at_once() -> int:
    """Processes that may run beside each other on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // CORES)


def planned(todo: Sequence[Run], beside: int) -> int:
    """Seconds that it should take: timings one after another, the others on `beside` places, longest first, and drawing."""
    places = [0] * beside
    for seconds in sorted((run.seconds for run in todo if not run.timing), reverse=True):
        places[places.index(min(places))] += seconds
    return max(places) + sum(run.seconds for run in todo if run.timing) + (DRAWING if todo else 0)


def measure(run: Run, beside: int) -> bool:
    """Whether the run's process ended well."""
    started, label = time.perf_counter(), ", ".join(run.figures)
    print(f"{label}: {' '.join(run.command)}, {run.seconds} s planned", flush=True)
    threads = {} if run.timing or beside == 1 else {"OMP_NUM_THREADS": str(CORES)}
    code = subprocess.run([sys.executable, "-m", *run.command], cwd=ROOT, env=os.environ | threads).returncode
    ended = "done" if code == 0 else f"FAILED with status {code}"
    print(f"{label}: {ended} after {time.perf_counter() - started:.0f} s ({run.command[0]})", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    parser.add_argument("--only", nargs="+", choices=list(plots.DRAWN), default=list(plots.DRAWN), metavar="FIGURE")
    parser.add_argument("--folder", type=Path, default=ROOT / "reproduced", help="of results and figures (default: reproduced)")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing, draw what results there are")
    args = parser.parse_args()
    folders = Folders(args.folder.resolve() / "results", args.folder.resolve() / "figures")
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    todo = [] if args.draw_only else runs(args.only, args.quick, gpu, folders.results)
    beside, began = at_once(), time.perf_counter()
    seconds = planned(todo, beside)
    print(f"{len(todo)} runs{' with' if gpu else ' without'} a Hopper GPU, {seconds} s planned", flush=True)
    others = sorted((run for run in todo if not run.timing), key=lambda run: -run.seconds)
    timings = [run for run in todo if run.timing]
    with ThreadPoolExecutor(beside) as pool:
        well = list(pool.map(lambda run: measure(run, beside), others))
    well += [measure(run, 1) for run in timings]
    left_out = plots.draw(args.only, folders)
    for figure in args.only:
        print(f"{figure}: {'left out, ' + left_out[figure] if figure in left_out else f'drawn in {folders.figures}'}")
    if todo:
        print(f"all of it took {time.perf_counter() - began:.0f} s, {seconds} s were planned")
    for run, ended_well in zip(others + timings, well):
        if not ended_well:
            print("failed:", " ".join(run.command))
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
