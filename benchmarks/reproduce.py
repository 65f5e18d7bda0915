"""Every figure of the paper by one command: `python -m benchmarks.reproduce [--quick] [--only FIGURE ...] [--folder FOLDER]`.

    fig1 decode_step decode_ratio   decode steps of whole models, one simulated rank (benchmarks/decode.py; a Hopper GPU)
    fig3 fig5 context sources   numerical fidelity (benchmarks/numerics.py)
    fig6 fig7                   the decode kernels (benchmarks/kernel_figures.py; a Hopper GPU)
    table1 table2               quality of the bundled model by cache format (benchmarks/quality.py)

Measures on this machine what FOLDER/results/*.jsonl lack, then draws into FOLDER/figures. Every measurement is appended as it is
made, so a run that was stopped goes on. Ends with what was left out and why. The numbers of the README are in benchmarks/results;
`--draw-only --folder benchmarks` draws those. Without a GPU everything is measured that needs none, at contexts up to 4k with
--quick; with one, numerical fidelity runs there too, at 32k and up to 256k tokens, and context shows the kernels' own errors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import plots
from benchmarks.figure_style import Folders
from benchmarks.records import ROOT

WORLDS = ("dp=8,tp=1", "dp=4,tp=2", "dp=1,tp=8")


@dataclass(frozen=True)
class Part:
    """What one figure needs of one module. seconds: (quick, full) as planned on an H200 if `gpu`, else on two cores of a server.

    arguments, quick, full: of every run, of a quick one, of a full one; gpu: True where a Hopper GPU is needed, False where the
    part is made only without one, None where it runs on the CPU anyway
    """

    figure: str
    module: str
    only: str
    seconds: tuple[int, int]
    gpu: bool | None
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    full: tuple[str, ...] = ()


CUDA, CPU = ("--device", "cuda"), ("--device", "cpu")
DECODE = ("--shapes", "deepseek_v3.1", "longcat_flash", "--worlds", *WORLDS, "--batches")
PARTS = (
    Part("fig1", "decode", "", (130, 240), True, DECODE, quick=("--contexts", "32768", "131072")),
    Part("decode_step", "decode", "", (0, 0), True, DECODE, quick=("--contexts", "32768", "131072")),
    Part("decode_ratio", "decode", "", (0, 0), True, DECODE, quick=("--contexts", "32768", "131072")),
    *(
        Part(name, "decode", "", (0, 0), True, DECODE, quick=("--contexts", "32768", "131072"))
        for name in ("decode_step", "decode_ratio")
    ),
    Part("fig7", "kernel_figures", "fig7", (60, 150), True),
    Part("fig6", "kernel_figures", "fig6", (20, 35), True),
    Part("context", "kernel_figures", "context", (15, 25), True),
    Part("context", "kernel_figures", "probe", (25, 60), True),
    Part("fig3", "numerics", "values", (10, 10), True, CUDA, quick=()),
    Part("fig5", "numerics", "layers", (15, 15), True, CUDA, quick=()),
    Part("context", "numerics", "context", (30, 30), True, CUDA, quick=()),
    Part("sources", "numerics", "sources", (15, 15), True, CUDA, quick=()),
    Part("fig3", "numerics", "values", (15, 60), False, CPU),
    Part("fig5", "numerics", "layers", (40, 600), False, CPU),
    Part("context", "numerics", "context", (120, 3000), False, CPU),
    Part("sources", "numerics", "sources", (60, 900), False, CPU),
    Part("table1", "quality", "perplexity", (15, 30), True, CUDA),
    Part("table1", "quality", "perplexity", (40, 300), None),
    Part("table1", "quality", "recall", (40, 1800), None),
    Part("table2", "quality", "generation", (50, 150), None),
)


@dataclass(frozen=True)
class Run:
    """One process that measures for several figures."""

    figures: list[str]
    command: list[str]
    seconds: int


def runs(figures: Sequence[str], quick: bool, gpu: bool, results: Path) -> list[Run]:
    """The processes that measure what the figures need and this machine can. Parts of a module with equal arguments share one."""
    together: dict[tuple[str, ...], list[Part]] = {}
    for part in PARTS:
        if part.figure in figures and part.gpu in (None, gpu):
            together.setdefault((part.module, *part.arguments, *(part.quick if quick else part.full)), []).append(part)
    found = []
    for (module, *arguments), parts in together.items():
        only = [part.only for part in parts if part.only]
        out = ["--output" if module == "decode" else "--out", str(results / f"{module}.jsonl")]
        command = [f"benchmarks.{module}", *(["--only", *only] if only else []), *arguments, *out]
        seconds = sum(part.seconds[0 if quick else 1] for part in parts)
        found.append(Run(list(dict.fromkeys(part.figure for part in parts)), command, seconds))
    return found


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
    planned = sum(run.seconds for run in todo)
    print(f"{len(todo)} runs{' with' if gpu else ' without'} a Hopper GPU, {planned} s planned", flush=True)
    failed, began = [], time.perf_counter()
    for run in todo:
        started, label = time.perf_counter(), ", ".join(run.figures)
        print(f"{label}: {' '.join(run.command)}, {run.seconds} s planned", flush=True)
        code = subprocess.run([sys.executable, "-m", *run.command], cwd=ROOT).returncode
        ended = "done" if code == 0 else f"FAILED with status {code}"
        print(f"{label}: {ended} after {time.perf_counter() - started:.0f} s", flush=True)
        if code:
            failed.append(" ".join(run.command))
    left_out = plots.draw(args.only, folders)
    for figure in args.only:
        print(f"{figure}: {'left out, ' + left_out[figure] if figure in left_out else f'drawn in {folders.figures}'}")
    if todo:
        print(f"all of it took {time.perf_counter() - began:.0f} s, {planned} s were planned")
    for command_line in failed:
        print("failed:", command_line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
