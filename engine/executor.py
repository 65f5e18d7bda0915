"""From plans to results on all ranks of a replica.

The leader agrees with the other replicas on the step's shape, sends the plan to its followers and runs it; followers run
what they receive.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from engine.model_runner import ModelRunner, PendingStep
from engine.plan import Agreement, StepPlan, StepResult
from engine.staging import HostCopy
from models.parallel import ParallelContext

IDLE = Agreement(rows=0, sequences=0, query_len=1, decode_only=True, any_work=False)
_SERVING_PER_CAPTURE = 9.0  # seconds of serving between two graphs of a fast start, for each second that the last one took
_COUNTING_SECONDS = 5.0  # between two readings of the experts' counters


class Executor:
    """Runs the plans of one replica. `submit` and `collect` are the leader's, `follow` is the other ranks'.

    agreement: what the replicas agreed on for the plan submitted last
    """

    def __init__(self, runner: ModelRunner, parallel: ParallelContext) -> None:
        self.agreement = IDLE
        self._runner = runner
        self._capture_after = 0.0  # time.perf_counter() from which a busy engine may capture one more graph
        self._count_after = time.perf_counter() + _COUNTING_SECONDS
        self._counted: HostCopy | None = None
        self._parallel = parallel
        self._pending: deque[PendingStep] = deque()
        self._stop = False
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def submit(self, plan: StepPlan) -> None:
        """Agree with the other leaders, tell the followers, and enqueue the plan without waiting for its result."""
        self.agreement = self._agree(plan)
        plan = msgspec.structs.replace(plan, agreement=self.agreement)
        self._tell_followers(plan)
        self._pending.append(self._runner.run(plan))
        self._after_step()

    def take_expert_load(self) -> list[list[int]] | None:
        """Rows of every expert since start, [MoE layers, experts], each reading once; only rank 0 ever has one."""
        if self._counted is None or not self._counted.done:
            return None
        (counts,), self._counted = self._counted.wait(), None
        return counts.tolist()

    def idle(self) -> None:
        """Use a moment without a step. With other ranks there is none: they must do the same, as an empty step tells them."""
        if not self._parallel.has_peers:
            self._capture()

    def collect(self) -> StepResult:
        """Wait for the result of the oldest plan submitted and not collected."""
        return self._pending.popleft().wait()

    def request_stop(self) -> None:
        """End the followers: at once with one replica, else with the next plan, when all replicas learn of it."""
        if self._parallel.dp == 1 and not self._stop:
            self.agreement = msgspec.structs.replace(IDLE, stop=True)
            self._tell_followers(StepPlan(step=-1, agreement=self.agreement))
        self._stop = True

    def follow(self) -> None:
        """Run the leader's plans until it says stop."""
        while True:
            plan = self._decoder.decode(self._parallel.tp_broadcast_bytes(None))
            assert plan.agreement is not None
            self.agreement = plan.agreement
            if plan.agreement.stop:
                return
            self._runner.run(plan)
            self._after_step()

    def _after_step(self) -> None:
        """What the agreement asks of every rank between two steps."""
        if self.agreement.count_experts:
            counted = self._runner.expert_load()
            self._counted = counted if self._parallel.rank == 0 else None
            self._count_after = time.perf_counter() + _COUNTING_SECONDS
        if self.agreement.capture:
            self._capture()

    def _capture(self) -> None:
        """Add a graph after a fast start. A busy engine spends a tenth of its time on this, an idle one all of it."""
        started = time.perf_counter()
        self._runner.capture_next_graph(self.agreement.sequences, self.agreement.query_len)
        ended = time.perf_counter()
        self._capture_after = ended + _SERVING_PER_CAPTURE * (ended - started)

    def _agree(self, plan: StepPlan) -> Agreement:
        prefill_tokens = sum(step.num_tokens for step in plan.prefills)
        mine = [
            len(plan.decodes),
            plan.query_len,
            prefill_tokens,
            not plan.is_empty,
            self._stop,
            plan.draft_depth,
            plan.wants_prefill,
            time.perf_counter() >= self._capture_after,
            time.perf_counter() >= self._count_after,
        ]
        decodes, query_lens, prefills, work, stops, depths, wants, captures, counts = zip(
            *self._parallel.leaders_all_gather([int(value) for value in mine])
        )
        query_len, stop = max(query_lens), any(stops)
        return Agreement(
            rows=max(sequences * query_len + tokens for sequences, tokens in zip(decodes, prefills)),
            sequences=max(decodes),
            query_len=query_len,
            decode_only=not any(prefills),
            # Once anybody stops nothing is run any more: the ranks that stop would be missing in its collectives.
            any_work=any(work) and not stop,
            stop=stop,
            draft_depth=max(depths),
            prefill_next=any(wants),
            # In the way of nobody's first token, and of nothing where nobody has work.
            capture=not self._runner.graphs_complete and not stop and not any(prefills) and (all(captures) or not any(work)),
            count_experts=bool(counts[0]) and any(work) and not stop,  # by the clock of the one that reports them
        )

    def _tell_followers(self, plan: StepPlan) -> None:
        if self._parallel.tp > 1:
            self._parallel.tp_broadcast_bytes(msgspec.msgpack.encode(plan))
