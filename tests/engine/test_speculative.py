"""Speculation changes how fast tokens come, never which: drafts of a real head, of an oracle, of a liar, and none at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.llm import build_core
from engine.messages import AddRequest, RequestFailed, TokenLogprob
from engine.sampling_params import SamplingParams
from engine.speculative import DecodeLines, count_accepted
from tests.comparator import assert_same_tokens
from tests.reference_checkpoints import reference_checkpoint

FAMILIES = ["deepseek_v3-tiny", "longcat_flash-tiny"]


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    drafted: int = 0
    accepted: int = 0


def engine(variant: str, depth: int, *, asynchronous: bool = False, **scheduler: int) -> EngineCore:
    blocks = scheduler.pop("num_cache_blocks", 0)
    config = EngineConfig(
        model=str(reference_checkpoint(variant)), dtype="float32", cache_format="fp32", device="cpu", max_model_len=640,
        num_cache_blocks=blocks, num_speculative_tokens=depth, scheduler=SchedulerConfig(**scheduler),
    )  # fmt: skip
    core, _ = build_core(config)
    # A CPU runs its steps at once and never needs to overlap them; that plans come before results is what counts here.
    return EngineCore(core._scheduler, core._executor, asynchronous=asynchronous)


def run(core: EngineCore, requests: dict[str, tuple[Sequence[int], SamplingParams]], arrivals: int = 4) -> dict[str, Outcome]:
    """Serve all requests, a few more joining each step, and check that every one ends exactly once."""
    outcomes = {name: Outcome() for name in requests}
    waiting = list(requests.items())
    for _ in range(5000):
        for name, (prompt, params) in waiting[:arrivals]:
            core.add(AddRequest(name, list(prompt), params, 0.0, eos_token_ids=[1]))
        waiting = waiting[arrivals:]
        for output in core.step():
            assert not isinstance(output, RequestFailed), output
            outcome = outcomes[output.request_id]
            assert outcome.finish_reason is None, "a token after the end"
            outcome.token_ids += output.token_ids
            outcome.logprobs += output.logprobs or []
            outcome.finish_reason, outcome.stop_reason = output.finish_reason, output.stop_reason
            outcome.drafted, outcome.accepted = output.spec_drafted, output.spec_accepted
        if not waiting and not core.has_work:
            break
    assert all(outcome.finish_reason for outcome in outcomes.values())
    core._scheduler._blocks.check_invariants()
    stats = core.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, "a leak"
    return outcomes


def oracle(core: EngineCore, truth: dict[int, Sequence[int]], prompts: dict[int, int], wrong_every: int) -> None:
    """Make the runner's drafts the true continuation by position of each row's sequence, wrong at every n-th position."""
    runner = core._executor._runner
    drafter, running = runner._drafter, core._scheduler._running
    assert drafter is not None
    real = drafter.draft

    def draft(batch, hidden, next_ids, accepted, rows, *, depth: int) -> None:
        real(batch, hidden, next_ids, accepted, rows, depth=depth)
        by_row = {request.row: request for _, request in running}
        for row, position in zip(rows.rows.tolist(), rows.positions.tolist()):
            tokens = truth[by_row[row].request_id]
            for index in range(depth):
                at = position + 2 + index - prompts[by_row[row].request_id]
                right = tokens[at] if 0 <= at < len(tokens) else 0
                drafter.tokens[row, index] = (right + 1) % 384 if (position + index) % wrong_every == 0 else right

    drafter.draft = draft


def workload(seed: int = 0, count: int = 16) -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 200 tokens, shared beginnings, two that part right behind a block border, all kinds of sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(8, 384) for _ in range(128)]
    kinds = [
        dict(temperature=0.0),
        dict(temperature=0.8, seed=5),
        dict(temperature=1.0, top_p=0.9, seed=6),
        dict(temperature=0.7, top_k=20, min_p=0.02, seed=7),
        dict(temperature=0.0, repetition_penalty=1.3),
        dict(temperature=0.9, presence_penalty=0.6, frequency_penalty=0.5, seed=8),
        dict(temperature=0.0, logit_bias={17: 4.0, 30: -100.0}, min_tokens=8, stop_token_ids=[44, 90, 91, 92]),
        dict(temperature=1.0, seed=9, allowed_token_ids=list(range(100, 200)), logprobs=2),
    ]
    requests = {}
    for index in range(count):
        prompt = [rng.randrange(8, 384) for _ in range(rng.choice([1, 5, 63, 64, 65, 127, 128, 129, 200]))]
        if index % 3 == 0:
            prompt = shared[: rng.choice([64, 100, 128])] + prompt[:30]
        params = SamplingParams(
            max_tokens=rng.randrange(12, 40) if index % 5 else 1 + index % 8,
            ignore_eos=index % 2 == 0,
            **kinds[index % len(kinds)],
        )
        requests[f"r{index}"] = (prompt, params)
    requests["border a"] = ([*shared, 11, 12], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    requests["border b"] = ([*shared, 21, 12], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    return requests


def assert_equal(got: dict[str, Outcome], want: dict[str, Outcome], requests) -> None:
    for name, reference in want.items():
        outcome, params = got[name], requests[name][1]
        assert_same_tokens(outcome.token_ids, reference.token_ids, label=f"{name}: ")
        assert (outcome.finish_reason, outcome.stop_reason) == (reference.finish_reason, reference.stop_reason), name
        if params.logprobs is not None:
            assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
            gaps = [abs(a.logprob - b.logprob) for a, b in zip(outcome.logprobs, reference.logprobs)]
            assert max(gaps) < 1e-3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("variant", FAMILIES)
def test_same_tokens_with_the_model_s_own_head(variant: str, asynchronous: bool) -> None:
    """Reports M07, M08, M10, M11, M12, M14, M15, M16: counts, minimum, penalties and logprobs are those of the plain path."""
    requests = workload()
    plain = run(engine(variant, 0), requests)
    for depth in (1, 3):
        core = engine(variant, depth, asynchronous=asynchronous)
        assert_equal(run(core, requests), plain, requests)
        assert core.stats().spec_draft_tokens > 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize(
    "scheduler",
    [
        dict(max_num_seqs=6, max_num_batched_tokens=64),
        dict(num_cache_blocks=16, max_num_batched_tokens=48),
        dict(speculative_max_batch=4),
    ],
    ids=["chunks", "preemption", "adaptive"],
)
def test_same_tokens_when_most_drafts_are_right(variant: str, scheduler: dict[str, int], asynchronous: bool) -> None:
    """Long accepted runs cross block borders, stop tokens, max_tokens and preemptions. Reports M02, M13: ends at the same
    token, and no slot of a rejected draft is lost."""
    requests = workload(seed=1)
    plain = run(engine(variant, 0, **scheduler), requests)
    truth = {name: outcome.token_ids for name, outcome in plain.items()}
    for depth, wrong_every in ((1, 1000), (3, 4)):
        core = engine(variant, depth, asynchronous=asynchronous, **scheduler)
        oracle(core, truth, {name: len(prompt) for name, (prompt, _) in requests.items()}, wrong_every)
        got = run(core, requests)
        assert_equal(got, plain, requests)
        stats = core.stats()
        least = 0.1 if "speculative_max_batch" in scheduler else 0.4  # there only the last few sequences draft
        assert sum(stats.spec_accepted_per_pos) > stats.spec_draft_tokens * least, "the oracle's drafts were not accepted"
        if wrong_every == 1000:
            assert stats.num_steps < core_steps(plain), "right drafts save no steps"


def core_steps(plain: dict[str, Outcome]) -> int:
    return sum(len(outcome.token_ids) for outcome in plain.values())


def test_lines_of_sequences_that_may_have_ended() -> None:
    """Lines behind a sequence's slots are padding, and a sequence that starts behind them writes nothing."""
    table = torch.tensor([[7, 3], [5, 9], [8, 2]], dtype=torch.int32)
    starts, slots = torch.tensor([62, 126, 130]), torch.tensor([128, 128, 128])
    at = DecodeLines.at(starts, torch.tensor([2, 2, 2]), slots, table, 3)
    assert at.num_drafts.tolist() == [2, 1, 0] and at.seq_lens.tolist() == [65, 128, 128]
    assert at.positions.tolist() == [[62, 63, 64], [126, 127, 127], [127, 127, 127]]
    assert at.slots.tolist() == [[7 * 64 + 62, 7 * 64 + 63, 3 * 64], [9 * 64 + 62, 9 * 64 + 63, -1], [-1, -1, -1]]
    assert at.live.tolist() == [[True, True, True], [True, True, False], [False, False, False]]


def test_accepted_counts() -> None:
    targets = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [-1, 6, 7], [5, 6, 7]])
    drafts = torch.tensor([[5, 6], [5, 9], [4, 6], [5, 6], [5, 6]])
    assert count_accepted(targets, drafts, torch.tensor([2, 2, 2, 2, 1])).tolist() == [2, 1, 0, 0, 1]
