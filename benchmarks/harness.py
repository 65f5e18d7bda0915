"""Timing in the steady, power-limited state: CUDA-graph replays over rotated inputs, warmed up, medians.

Heavy kernels on an H200 run at the power cap, so a time means little without the state it was taken in: every case here is
warmed with its own work for WARM_MS before MEASURE_MS of replays count, and every result carries the clocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.records import RESULTS, append, machine_state

__all__ = ["RESULTS", "Log", "Timing", "copy_rate", "eager", "matmul_rate", "run_parts", "sm_clock", "steady"]

WARM_MS, MEASURE_MS = 120.0, 60.0


class Timing:
    """Steady time of one call. us: median over replays; low, high: quartiles; clock_mhz: SM clock right behind the last."""

    def __init__(self, samples: list[float], clock_mhz: int | None) -> None:
        self.us = statistics.median(samples)
        ordered = sorted(samples)
        self.low, self.high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
        self.clock_mhz = clock_mhz


def steady(calls: Sequence[Callable[[], object]]) -> Timing:
    """Time one graph that makes every call of `calls` once, per call.

    calls: the same operation on different inputs, together larger than the L2 cache where it must not help.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    replay()
    once = max(replay(), 1e-3)
    _until(replay, WARM_MS, once)
    samples = _until(replay, MEASURE_MS, once)
    clock = sm_clock()
    return Timing([1e3 * s / len(calls) for s in samples], clock)


def _until(replay: Callable[[], float], budget_ms: float, once_ms: float) -> list[float]:
    return [replay() for _ in range(max(3, int(budget_ms / once_ms)))]


def sm_clock() -> int | None:
    """SM clock in MHz, or None where the driver does not say."""
    try:
        return torch.cuda.clock_rate()
    except Exception:  # needs the optional nvidia-ml-py; a missing clock is no reason to lose a timing
        return None


class Log:
    """JSON lines in a results file; every line repeats the device's state."""

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, machine_state("cuda") | {"warm_ms": WARM_MS, "measure_ms": MEASURE_MS}

    def write(self, **fields: object) -> None:
        append(self.path, fields | self.state)


def matmul_rate(dtype: torch.dtype, size: int = 8192) -> float:
    """TFLOP/s of one large matrix product of random data: BF16, or FP8 with per-tensor scales and fast accumulation."""
    if dtype is torch.bfloat16:
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        timing = steady([lambda: torch.matmul(a, b)])
    else:
        x, y = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        one = torch.ones((), device="cuda")
        timing = steady([lambda: torch._scaled_mm(x, y.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)])
    return 2 * size**3 / timing.us * 1e-6


def copy_rate(size: int = 4 << 30) -> float:
    """TB/s of an elementwise copy kernel, bytes read plus bytes written."""
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / steady([lambda: torch.neg(source, out=target)]).us * 1e-6


def eager(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of a call launched from Python one after another, for what cannot be captured; launch gaps included."""
    for call in calls:
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / len(calls)


def run_parts(parts: Mapping[str, Callable[[], object]]) -> bool:
    """Run each part and say how long it took. Returns whether all went well: one part's failure is printed and hides no
    other's findings."""
    well = True
    for name, part in parts.items():
        started = time.perf_counter()
        try:
            part()
        except Exception as error:
            well = False
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:3000]}", flush=True)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    return well
