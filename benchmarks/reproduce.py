"""Every figure of the paper by one command: `python -m benchmarks.reproduce [--quick] [--only FIGURE ...]`.

    fig3 fig5 context sources   numerical fidelity (benchmarks/numerics.py)
    table1 table2               quality of the bundled model by cache format (benchmarks/quality.py)
    fig6 fig7                   the decode kernels (benchmarks/kernel_figures.py; a Hopper GPU)

Measures what results/*.jsonl lack, then draws. Every measurement is appended as it is made, so a run that was stopped goes
on; a figure is drawn from whatever lines there are, on any machine. Ends with what was left out and why. On a CPU alone use
--quick, which keeps contexts at 4k; with a GPU the numerics run there too, at 32k and up to 256k.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

from benchmarks import plots
from benchmarks.records import ROOT

MEASURED_BY = {
    "fig3": ("numerics", "values"), "fig5": ("numerics", "layers"), "context": ("numerics", "context"), "sources": ("numerics", "sources"),
    "table1": ("quality", "perplexity", "recall"), "table2": ("quality", "generation"),
    "fig7": ("kernel_figures", "fig7"), "fig6": ("kernel_figures", "fig6"),
}  # fmt: skip
ON_THE_CHIP = ("context", "probe")  # parts of kernel_figures beside fig6 and fig7


def commands(figures: list[str], quick: bool, gpu: bool) -> list[list[str]]:
    """Module and arguments of every measurement that the figures need and this machine can make."""
    parts: dict[str, list[str]] = {}
    for figure in figures:
        module, *names = MEASURED_BY[figure]
        parts.setdefault(module, []).extend(names)
    if gpu and "context" in figures:
        parts.setdefault("kernel_figures", []).extend(ON_THE_CHIP)
    found = []
    for module, names in parts.items():
        if module == "kernel_figures" and not gpu:
            continue
        found.append([f"benchmarks.{module}", "--only", *names, *(["--quick"] if quick else [])])
        if module == "quality" and gpu and "perplexity" in names:
            found.append(["benchmarks.quality", "--only", "perplexity", "--device", "cuda", *(["--quick"] if quick else [])])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    parser.add_argument("--only", nargs="+", choices=list(MEASURED_BY), default=list(MEASURED_BY), metavar="FIGURE")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing, draw what results/*.jsonl hold")
    args = parser.parse_args()
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    failed = []
    for command in [] if args.draw_only else commands(args.only, args.quick, gpu):
        started = time.perf_counter()
        print("measuring:", " ".join(command), flush=True)
        code = subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode
        print(
            f"  {'done' if code == 0 else f'failed with status {code}'} after {time.perf_counter() - started:.0f} s", flush=True
        )
        if code:
            failed.append(command[0])
    left_out = plots.draw(args.only)
    for figure in args.only:
        print(f"{figure}: {'left out, ' + left_out[figure] if figure in left_out else 'drawn'}")
    if not gpu:
        print("fig6 and fig7: not measured here, no Hopper GPU; drawn from earlier lines where there are any")
    print("fig1: left out, end-to-end throughput is measured by real or simulated ranks, not by this script yet")
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
