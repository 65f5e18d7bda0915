"""Requests of every kind served with and without speculation, and what came of them: for tests, and for benchmarks/mtp.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.llm import build_core
from engine.messages import AddRequest, RequestFailed, TokenLogprob
from engine.sampling_params import SamplingParams
from tests.comparator import assert_same_tokens

Requests = dict[str, tuple[Sequence[int], SamplingParams]]


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


def engine(model: str, depth: int, *, asynchronous: bool = False, **options: Any) -> EngineCore:
    """An engine on a CPU with the exact cache, unless `options` (fields of EngineConfig and SchedulerConfig) say otherwise."""
    names = set(SchedulerConfig.__dataclass_fields__)
    scheduler = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    exact = {"dtype": "float32", "cache_format": "fp32", "device": "cpu", "max_model_len": 640}
    if depth:
        exact["speculative_depth"] = "fixed"
    config = EngineConfig(
        model=model, num_speculative_tokens=depth, scheduler=SchedulerConfig(**scheduler), **{**exact, **rest}
    )  # fmt: skip
    core, _ = build_core(config)
    # A CPU runs its steps at once and never needs to overlap them; that plans come before results is what counts here.
    return EngineCore(core._scheduler, core._executor, asynchronous=asynchronous)


def run(core: EngineCore, requests: Requests, arrivals: Sequence[int] = (4,)) -> dict[str, Outcome]:
    """Serve all requests and check that every one ends exactly once.

    arrivals: how many more join before each step, over and over
    """
    outcomes = {name: Outcome() for name in requests}
    waiting = list(requests.items())
    for count in cycle(arrivals):
        for name, (prompt, params) in waiting[:count]:
            core.add(AddRequest(name, list(prompt), params, 0.0, eos_token_ids=[1]))
        waiting = waiting[count:]
        for output in core.step():
            assert not isinstance(output, RequestFailed), output
            outcome = outcomes[output.request_id]
            assert outcome.finish_reason is None, "a token after the end"
            outcome.token_ids += output.token_ids
            outcome.logprobs += output.logprobs or []
            outcome.finish_reason, outcome.stop_reason = output.finish_reason, output.stop_reason
            outcome.drafted, outcome.accepted = output.spec_drafted, output.spec_accepted
            outcome.preemptions = output.num_preemptions
        if not waiting and not core.has_work:
            break
        assert core.stats().num_steps < 100_000, "no end in sight"
    assert all(outcome.finish_reason for outcome in outcomes.values())
    core._scheduler._blocks.check_invariants()
    stats = core.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, "a leak"
    return outcomes


def workload(seed: int = 0, count: int = 18, vocab_size: int = 384) -> Requests:
    """Prompts of 1 to 200 tokens, shared beginnings, two that part right behind a block border, all kinds of sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(8, vocab_size) for _ in range(128)]
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=0.8),
        dict(temperature=1.0, top_p=0.9),
        dict(temperature=0.7, top_k=20, min_p=0.02),
        dict(temperature=0.0, repetition_penalty=1.3),
        dict(temperature=0.9, presence_penalty=0.6, frequency_penalty=0.5),
        dict(temperature=0.0, logit_bias={17: 4.0, 30: -100.0}, min_tokens=8, stop_token_ids=[44, 90, 91, 92]),
        dict(temperature=1.0, allowed_token_ids=list(range(100, 200)), logprobs=2),
    ]
    requests: Requests = {}
    for index in range(count - 2):
        prompt = [rng.randrange(8, vocab_size) for _ in range(rng.choice([1, 5, 63, 64, 65, 127, 128, 129, 200]))]
        if index % 3 == 0:
            prompt = shared[: rng.choice([64, 100, 128])] + prompt[:30]
        max_tokens = rng.randrange(12, 40) if index % 5 else 1 + index % 8
        if index % 32 == 31:
            max_tokens = 100  # grows over a block border in any case
        kind = kinds[index % len(kinds)]
        kind = kind | {"min_tokens": min(kind.get("min_tokens", 0), max_tokens)}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=index % 2 == 0, seed=index, **kind)
        requests[f"r{index}"] = (prompt, params)
    return requests | border_pair(shared)


def border_pair(shared: Sequence[int], **params: Any) -> Requests:
    """Two requests whose prompts part at the first token of the third block."""
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | params
    ends = {"border a": 11, "border b": 21}
    return {name: ([*shared[:128], end, 12], SamplingParams(**params)) for name, end in ends.items()}


def oracle(core: EngineCore, requests: Requests, truth: dict[str, Outcome], wrong_every: int) -> None:
    """Make the runner's drafts the continuation that `truth` has, wrong at every n-th position; not for captured graphs."""
    runner = core._executor._runner  # type: ignore[attr-defined]
    drafter, running = runner._drafter, core._scheduler._running
    real, vocab_size = drafter.draft, runner._vocab_size

    def draft(batch: Any, hidden: Any, next_ids: Any, accepted: Any, rows: Any, *, depth: int) -> None:
        real(batch, hidden, next_ids, accepted, rows, depth=depth)
        by_row = {request.row: request.request_id for _, request in running}
        for row, position in zip(rows.rows.tolist(), rows.positions.tolist()):
            name = by_row[row]
            tokens = truth[name].token_ids
            for index in range(depth):
                at = position + 2 + index - len(requests[name][0])
                right = tokens[at] if 0 <= at < len(tokens) else 0
                wrong = (position + index) % wrong_every == 0
                drafter.tokens[row, index] = (right + wrong) % vocab_size

    drafter.draft = draft


def assert_equal(got: dict[str, Outcome], want: dict[str, Outcome], requests: Requests) -> None:
    """Every token, end and log probability of `want`."""
    for name, reference in want.items():
        outcome, params = got[name], requests[name][1]
        assert_same_tokens(outcome.token_ids, reference.token_ids, label=f"{name}: ")
        assert (outcome.finish_reason, outcome.stop_reason) == (reference.finish_reason, reference.stop_reason), name
        if params.logprobs is not None:
            assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
            gaps = [abs(a.logprob - b.logprob) for a, b in zip(outcome.logprobs, reference.logprobs)]
            assert max(gaps) < 1e-3
