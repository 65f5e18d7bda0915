"""CPU time of scheduler and block manager per step: `python -m benchmarks.scheduler`.

A replica's sequences are prefilled by empty results (no device, no model), then decode in steady state; the time of
`schedule`, `update` and both is taken per step as process CPU time. Repeated over context lengths, because the cost must
not depend on them. Appends one JSON line per case, with the machine's state, to results/scheduler.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

from benchmarks.records import RESULTS, append, machine_state
from engine.block_manager import BLOCK_SIZE, BlockManager
from engine.config import SchedulerConfig
from engine.messages import AddRequest
from engine.plan import RowResult, StepPlan, StepResult
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

VOCAB = 100_000


def answer(plan: StepPlan, accepted: int) -> StepResult:
    """The result of a device that accepts up to `accepted` drafts in every row."""
    rows = [RowResult(step.row, [plan.step % VOCAB] * (1 + min(accepted, step.num_drafts))) for step in plan.decodes]
    rows += [RowResult(step.row, [1]) for step in plan.prefills if step.sample]
    return StepResult(plan.step, rows)


def measure(num_seqs: int, context: int, steps: int, num_drafts: int, prefix_cache: bool) -> dict[str, object]:
    """CPU milliseconds per step, median and 99th percentile, of num_seqs decoding sequences of `context` tokens."""
    length = context + (steps + 1024) * (1 + num_drafts)  # the first to be prefilled decode meanwhile
    blocks = BlockManager(num_seqs * (-(-length // BLOCK_SIZE) + 1), prefix_cache)
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=1 << 18, max_num_seqs=num_seqs),
        blocks,
        max_model_len=length,
        vocab_size=VOCAB,
        num_speculative_tokens=num_drafts,
    )
    for index in range(num_seqs):
        # Lengths are spread over a block, or all sequences would cross their block borders in the same step.
        tokens = [(index * 131 + position) % VOCAB for position in range(context - index % BLOCK_SIZE)]
        scheduler.add(AddRequest(f"request-{index}", tokens, SamplingParams(ignore_eos=True), time.time()))
    while True:
        plan = scheduler.schedule()
        scheduler.update(plan, answer(plan, 0))
        if len(plan.decodes) == num_seqs:
            break
    planning, updating, whole = [], [], []
    gc.collect()
    for _ in range(steps):
        start = time.process_time_ns()
        plan = scheduler.schedule()
        planned = time.process_time_ns()
        result = answer(plan, num_drafts // 2)
        answered = time.process_time_ns()
        outputs = scheduler.update(plan, result)
        end = time.process_time_ns()
        assert len(plan.decodes) == len(outputs) == num_seqs
        planning.append((planned - start) / 1e6)
        updating.append((end - answered) / 1e6)
        whole.append(planning[-1] + updating[-1])
    blocks.check_invariants()

    def figures(times: list[float]) -> dict[str, float]:
        return {"median_ms": round(statistics.median(times), 4), "p99_ms": round(sorted(times)[len(times) * 99 // 100], 4)}

    return {
        "benchmark": "scheduler",
        "sequences": num_seqs,
        "context_tokens": context,
        "num_drafts": num_drafts,
        "prefix_cache": prefix_cache,
        "steps": steps,
        "step": figures(whole),
        "schedule": figures(planning),
        "update": figures(updating),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 65536])
    parser.add_argument("--steps", type=int, default=640, help="timed steps; ten blocks a sequence by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "scheduler.jsonl")
    args = parser.parse_args()
    for context in args.contexts:
        for num_drafts, prefix_cache in ((0, True), (0, False), (1, True)):
            line = measure(args.sequences, context, args.steps, num_drafts, prefix_cache) | {"machine": machine_state("cpu")}
            print(json.dumps({key: value for key, value in line.items() if key != "machine"}))
            append(args.output, line)


if __name__ == "__main__":
    main()
