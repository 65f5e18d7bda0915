"""What a person sees while the engine starts: one line per finished phase, and the ranks that are being waited for."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from engine.messages import Phase

REMIND_AFTER_S = 10.0


class StartupTable:
    """Collects the ranks' phases. A phase is printed when every rank has finished it, with its slowest rank."""

    def __init__(self, world_size: int, waiting_for: Callable[[], dict[str, list[int]]]) -> None:
        self._world_size, self._waiting_for = world_size, waiting_for
        self._began = time.monotonic()
        self._done: dict[str, dict[int, float]] = {}
        self.seconds: dict[str, float] = {}
        self._printed_header = False

    def add(self, phase: Phase) -> None:
        if phase.seconds is None:
            return
        self._began = min(self._began, time.monotonic() - phase.seconds)  # the first phase began before this process did
        ranks = self._done.setdefault(phase.name, {})
        ranks[phase.rank] = phase.seconds
        if len(ranks) == self._world_size:
            slowest = max(ranks, key=lambda rank: ranks[rank])
            self.seconds[phase.name] = ranks[slowest]
            if not self._printed_header:
                self._printed_header = True
                self._print(f"{'start-up phase':<22}{'seconds':>9}  {'at':>7}  slowest of {self._world_size} rank(s)")
            at = time.monotonic() - self._began
            self._print(f"{phase.name:<22}{ranks[slowest]:>9.2f}  {at:>6.1f}s  rank {slowest}")

    async def remind(self) -> None:
        """Say every REMIND_AFTER_S seconds what start-up waits for, until cancelled."""
        while True:
            await asyncio.sleep(REMIND_AFTER_S)
            for phase, ranks in self._waiting_for().items():
                at = time.monotonic() - self._began
                self._print(f"  {phase}, {at:.0f}s: waiting for rank{'s' * (len(ranks) > 1)} {_spans(ranks)}")

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _spans(ranks: list[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
