"""Draws every figure from results/*.jsonl, without a GPU: `python -m benchmarks.plots [--only fig5 ...] [--folder FOLDER]`.

Each figure goes to FOLDER/figures as PNG and SVG, tables as Markdown. A figure whose lines are missing is left out and named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.figure_style import Folders
from benchmarks.plot_decode import decode_ratio, decode_step
from benchmarks.plot_numerics import context, fig3, fig5, sources
from benchmarks.plot_probe import probe
from benchmarks.plot_quality import table1, table2
from benchmarks.plot_speed import fig1, fig6, fig7

DRAWN: dict[str, Callable[[Folders], str | None]] = {
    "fig1": fig1, "fig3": fig3, "fig5": fig5, "context": context, "sources": sources, "fig6": fig6, "fig7": fig7, "table1": table1,
    "table2": table2, "probe": probe, "decode_step": decode_step, "decode_ratio": decode_ratio,
}  # fmt: skip


def draw(names: Iterable[str], folders: Folders) -> dict[str, str]:
    """Draw figures by name; returns what was left out, with the reason."""
    folders.figures.mkdir(parents=True, exist_ok=True)
    reasons = {name: DRAWN[name](folders) for name in names}
    return {name: reason for name, reason in reasons.items() if reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(DRAWN), default=list(DRAWN))
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="holds results and gets figures")
    args = parser.parse_args()
    left_out = draw(args.only, Folders(args.folder / "results", args.folder / "figures"))
    for name in args.only:
        print(f"{name}: left out, {left_out[name]}" if name in left_out else f"{name}: drawn")


if __name__ == "__main__":
    main()
