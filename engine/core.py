"""The engine loop of one replica: the scheduler's plans go to the executor, its results come back as messages.

Asynchronous: one plan stays in flight, so that the host schedules step n + 1 and handles the tokens of step n - 1 while
the device computes step n. Synchronous: each step's result is awaited. Both give the same tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine.errors import WorkerFailed
from engine.messages import AddRequest, ReplicaStats, RequestFailed, TokenOutput
from engine.plan import Agreement, StepPlan, StepResult
from engine.scheduler import Scheduler

logger = logging.getLogger(__name__)
_DRAFTS_EVERY = 30.0  # seconds between two log lines about the drafts
FIDELITY_LIMIT = 0.25  # FP8 attention lies within 0.02 to 0.1 of exact attention on sound data


class Executor(Protocol):
    """What runs plans. engine/executor.py has the real one, which host files cannot import.

    agreement: what the replicas agreed on for the plan submitted last; read in lockstep only
    """

    agreement: Agreement

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan without waiting for its result."""

    def collect(self) -> StepResult:
        """Wait for the result of the oldest plan that was submitted and not collected."""


@dataclass
class Fidelity:
    """What the fidelity probe found since start: relative L2 errors of attention, summed and largest, by layer."""

    steps: int = 0
    sums: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)

    def add(self, errors: list[float]) -> None:
        """Take one step's errors; a layer beyond FIDELITY_LIMIT is reported the first time."""
        self.sums = self.sums or [0.0] * len(errors)
        self.worst = self.worst or [0.0] * len(errors)
        self.steps += 1
        for layer, error in enumerate(errors):
            error = error if math.isfinite(error) else float("inf")
            if self.worst[layer] <= FIDELITY_LIMIT < error:
                logger.warning("attention of layer %d is off by %.3g of its size from exact attention", layer, error)
            self.sums[layer] += error
            self.worst[layer] = max(self.worst[layer], error)


class EngineCore:
    """Not thread-safe: one loop calls everything. A failure of the executor passes through and ends the engine.

    lockstep: several replicas step together, so empty plans are executed too and `step` is called without work as well
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, asynchronous: bool, lockstep: bool = False) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = 2 if asynchronous else 1  # plans in flight before one must be collected
        self._lockstep = lockstep
        self._plans: deque[StepPlan] = deque()
        self._step_seconds = 0.0
        self._in_step = False  # still true when a step did not end: the scheduler and the ranks have parted
        self._leak_reported = False
        self._drafts_reported = (time.perf_counter(), ReplicaStats())  # when, and the totals of then
        self._fidelity = Fidelity()

    def add(self, request: AddRequest) -> None:
        """Queue a request. Raises RequestRejected: the caller then owes the terminal message."""
        self._scheduler.add(request)

    def abort(self, request_id: str, reason: str = "abort") -> TokenOutput | None:
        """Drop a request. Returns its terminal output, None if it is not live (any more)."""
        return self._scheduler.abort(request_id, reason)

    def abort_all(self) -> list[TokenOutput]:
        """Drop every live request and return their terminal outputs."""
        return self._scheduler.abort_all()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no live request uses."""
        self._scheduler.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        """Whether a request is live or a step that is no mere lockstep is in flight."""
        return self._scheduler.has_work or any(not plan.is_empty for plan in self._plans)

    def step(self) -> list[TokenOutput | RequestFailed]:
        """Submit the next plan and return the outputs of the oldest result that is due, if any.

        Raises WorkerFailed after a step that failed or was interrupted: nothing can be computed any more.
        """
        if self._in_step:
            raise WorkerFailed("an earlier step failed or was interrupted half way: this engine has ended, make a new one")
        self._in_step = True
        started = time.perf_counter()
        submitted = False
        plan = self._scheduler.schedule(prefill=not self._lockstep or self._executor.agreement.prefill_next)
        if self._lockstep or not plan.is_empty:
            self._executor.submit(plan)
            self._plans.append(plan)
            submitted = True
        outputs: list[TokenOutput | RequestFailed] = []
        if self._plans and (len(self._plans) >= self._depth or not submitted):
            result = self._executor.collect()
            outputs = self._scheduler.update(self._plans.popleft(), result)
            if result.attention_errors:
                self._fidelity.add(result.attention_errors)
        if not self._scheduler.has_work:
            self._report_leak()
        if started - self._drafts_reported[0] >= _DRAFTS_EVERY:
            self._report_drafts(started)
        self._step_seconds += time.perf_counter() - started
        self._in_step = False
        return outputs

    def stats(self) -> ReplicaStats:
        """Load now and totals since start; step_seconds is the time spent in `step`."""
        seen = self._fidelity
        mean = [total / seen.steps for total in seen.sums]
        return msgspec.structs.replace(
            self._scheduler.stats(),
            step_seconds=self._step_seconds,
            fidelity_steps=seen.steps,
            fidelity_mean=mean,
            fidelity_worst=list(seen.worst),
        )

    def _report_drafts(self, now: float) -> None:
        """Say how many drafts were accepted since the last time, if there were any."""
        before, stats = self._drafts_reported[1], self._scheduler.stats()
        self._drafts_reported = (now, stats)
        verified = stats.spec_drafts - before.spec_drafts
        if verified:
            old = before.spec_accepted_per_pos or [0] * len(stats.spec_accepted_per_pos)
            parts = [(new - then) / verified for new, then in zip(stats.spec_accepted_per_pos, old)]
            logger.info(
                "speculation: %s of the drafts accepted by position, %.2f tokens of a sequence in a step, depth now %d",
                " ".join(f"{part:.3f}" for part in parts), 1 + sum(parts), stats.spec_depth,
            )  # fmt: skip

    def _report_leak(self) -> None:
        """Without requests no block may be in use. If one is, say so once and go on: a leak is no reason to stop serving."""
        stats = self._scheduler.stats()
        used = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        if used and not self._leak_reported:
            self._leak_reported = True
            logger.error("cache leak: %d of %d blocks are in use without a request", used, stats.num_blocks)
