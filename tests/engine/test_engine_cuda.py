"""The core's equalities on a GPU: kernels, graphs and asynchronous steps leave the bundled model's tokens as they are.

BF16 cache, which no feature rounds anew; greedy continuations of held-out text. Where a feature leaves every row's sums as
they are, the noise is that of the eager engine when the prompts run alone instead of together, which may be none; where it
computes tokens in other chunks, that of the kernels against the reference operations.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest

import models
from engine.config import EngineConfig, SchedulerConfig
from engine.executor import Executor
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.worker import WorkerInfo, build_worker
from kernels import ops
from models.parallel import ParallelContext
from tests.comparator import Differences, Generation, assert_same_generations
from tests.engine.test_core import Engine

pytestmark = pytest.mark.hopper

DEMO = Path(models.__file__).parent / "demo"
HELDOUT = Path(models.__file__).parent.parent / "benchmarks" / "demo_model" / "heldout.jsonl"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=2)
NUM_BLOCKS, MOST_SEQS = 300, 32


@functools.cache
def prompts() -> list[list[int]]:
    """17 texts of 60 to 400 tokens, four of which begin alike."""
    text = " ".join(json.loads(line)["text"] for line in HELDOUT.read_text().splitlines())
    ids = Tokenizer.load(DEMO).encode(text, add_special_tokens=False)
    own = [ids[i * 500 : i * 500 + 60 + 26 * i] for i in range(13)]
    return own + [ids[:200] + ids[7000 + 90 * i : 7000 + 90 * i + 30 + i] for i in range(4)]


def new_worker(graphs: bool, cache_format: str = "bf16") -> tuple[Executor, WorkerInfo]:
    return build_worker(
        EngineConfig(
            model=str(DEMO), device="cuda", cache_format=cache_format, num_cache_blocks=NUM_BLOCKS, max_model_len=1024,
            cuda_graphs=graphs, scheduler=SchedulerConfig(max_num_seqs=MOST_SEQS),
        ),
        ParallelContext.single(),
    )  # fmt: skip


@functools.cache
def worker(graphs: bool, cache_format: str = "bf16") -> tuple[Executor, WorkerInfo]:
    """Built once: between tests its tables are empty, whatever the cache still holds."""
    return new_worker(graphs, cache_format)


def engine(graphs: bool, cache_format: str = "bf16", **features: int | bool) -> Engine:
    executor, info = worker(graphs, cache_format)
    options = {"num_blocks": NUM_BLOCKS, "max_num_seqs": MOST_SEQS, "prefix_cache": False} | features
    return Engine(executor, vocab_size=info.model_config.vocab_size, max_model_len=1024, **options)  # type: ignore[arg-type]


def generations(served: Engine) -> list[Generation]:
    return [
        Generation(outcome.token_ids, [{e.token_id: e.logprob, **dict(e.top)} for e in outcome.logprobs])
        for outcome in served.outcomes.values()
    ]


@functools.cache
def eager() -> tuple[list[Generation], Differences]:
    together, alone = engine(False), engine(False, max_num_seqs=1)
    together.run(prompts(), GREEDY)
    alone.run(prompts(), GREEDY)
    return generations(together), Differences.between(generations(alone), generations(together))


@functools.cache
def rounding() -> Differences:
    """Of the same sums in another order: the reference operations against the kernels."""
    reference = engine(False)
    with ops.backend("reference"):
        reference.run(prompts(), GREEDY)
    return Differences.between(generations(reference), eager()[0])


FEATURES: dict[str, dict[str, int | bool]] = {
    "graphs": {},
    "asynchronous": {"asynchronous": True},
    "chunks of 64": {"asynchronous": True, "prefill_chunk": 64},
    "preemption": {"asynchronous": True, "num_blocks": 24},
    "preemption with prefix cache": {"asynchronous": True, "num_blocks": 24, "prefix_cache": True},
    "waits for rows": {"asynchronous": True, "max_num_seqs": 5},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_leave_greedy_tokens_as_they_were(features: dict) -> None:
    served = engine(True, **features)
    served.run(prompts(), GREEDY)
    want, noise = eager()
    assert_same_generations(generations(served), want, rounding() if {"num_blocks", "prefill_chunk"} & set(features) else noise)
    assert ("num_blocks" in features) == (sum(o.num_preemptions for o in served.outcomes.values()) > 0)


def test_prefixes_are_found_and_change_nothing() -> None:
    served = engine(True, asynchronous=True, prefix_cache=True)
    for _ in range(2):
        served.outcomes.clear()
        served.run(prompts(), GREEDY)
        assert_same_generations(generations(served), eager()[0], rounding())
    assert all(outcome.num_cached_tokens >= len(prompt) - 65 for prompt, outcome in zip(prompts(), served.outcomes.values()))


def test_aborts_leave_the_others_alone() -> None:
    served = engine(True, asynchronous=True)
    want, noise = eager()
    for i, prompt in enumerate(prompts()):
        served.add(str(i), prompt, GREEDY)
    for step in range(12):
        served.step()
        if step % 3 == 2:
            served.core.abort(str(step))
            served.outcomes[str(step)].finish_reason = "abort"
    while served.core.has_work:
        served.step()
    ended = [i for i in range(len(want)) if served.outcomes[str(i)].finish_reason == "length"]
    assert len(ended) == len(want) - 4
    got = generations(served)
    assert_same_generations([got[i] for i in ended], [want[i] for i in ended], noise)
    served.blocks.check_invariants()


def test_fp8_cache_with_prefixes_chunks_and_preemption_at_once() -> None:
    """Report K17: three rounds with little memory. Every request ends with its tokens, and a repeated round finds its prefixes."""
    served = engine(True, "fp8", asynchronous=True, prefix_cache=True, prefill_chunk=64, num_blocks=24)
    for _ in range(3):
        served.outcomes.clear()
        served.run(prompts(), GREEDY)
        for outcome in served.outcomes.values():
            assert outcome.finish_reason == "length" and len(outcome.token_ids) == GREEDY.max_tokens
            assert all(math.isfinite(entry.logprob) for entry in outcome.logprobs)
        assert sum(outcome.num_preemptions for outcome in served.outcomes.values()) > 0
        served.blocks.check_invariants()
    assert any(outcome.num_cached_tokens for outcome in served.outcomes.values())
