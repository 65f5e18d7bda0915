"""Speculation changes how fast tokens come, never which: drafts of a real head, of an oracle, of a liar, and none at all."""

from __future__ import annotations

import itertools

import pytest

from engine.hub import resolve_model
from engine.sampling_params import SamplingParams
from engine.speculative import Drafter
from engine.tokenizer import Tokenizer
from tests.engine.fake_graphs import FakePool
from tests.engine.speculation import Outcome, assert_equal, engine, oracle, run, workload
from tests.reference_checkpoints import reference_checkpoint

FAMILIES = ["deepseek_v3-tiny", "longcat_flash-tiny"]


@pytest.mark.parametrize("variant", FAMILIES)
def test_same_tokens_with_the_model_s_own_head(variant: str) -> None:
    """Reports M07, M08, M10, M11, M12, M14, M15, M16: counts, minimum, penalties and logprobs are those of the plain path."""
    requests = workload()
    plain = run(engine(str(reference_checkpoint(variant)), 0), requests)
    for depth, asynchronous in ((1, False), (3, True)):
        core = engine(str(reference_checkpoint(variant)), depth, asynchronous=asynchronous)
        assert_equal(run(core, requests), plain, requests)
        assert core.stats().spec_draft_tokens > 0


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize(
    "scheduler",
    [
        dict(max_num_seqs=6, max_num_batched_tokens=64),
        dict(num_cache_blocks=16, max_num_batched_tokens=48),
        dict(speculative_max_batch=4),
        dict(toggle=3),
    ],
    ids=["chunks", "preemption", "small batches", "toggled"],
)
def test_same_tokens_when_most_drafts_are_right(variant: str, scheduler: dict[str, int]) -> None:
    """Long accepted runs cross block borders, stop tokens, max_tokens and preemptions. Reports M02, M13: ends at the same
    token, and no slot of a rejected draft is lost."""
    requests, scheduler = workload(seed=1), dict(scheduler)
    toggle = scheduler.pop("toggle", 0)
    without_drafts = {name: value for name, value in scheduler.items() if name != "speculative_max_batch"}
    plain = run(engine(str(reference_checkpoint(variant)), 0, **without_drafts), requests)
    for depth, wrong_every, asynchronous in ((1, 1000, False), (3, 4, True)):
        core = engine(str(reference_checkpoint(variant)), depth, asynchronous=asynchronous, **scheduler)
        if toggle:  # drafts come and go every few steps, as they do where they stop to pay
            steps = itertools.count()
            core._scheduler._depth.choose = lambda _, depth=depth, steps=steps: depth * (next(steps) // toggle % 2)
        oracle(core, requests, plain, wrong_every)
        got = run(core, requests)
        assert_equal(got, plain, requests)
        stats = core.stats()
        least = 0.1 if "speculative_max_batch" in scheduler else 0.4  # there only the last few sequences draft
        assert sum(stats.spec_accepted_per_pos) > stats.spec_draft_tokens * least, "the oracle's drafts were not accepted"
        if wrong_every == 1000:
            assert stats.num_steps < core_steps(plain), "right drafts save no steps"


@pytest.mark.parametrize("variant", FAMILIES)
def test_the_first_draft_does_not_depend_on_the_depth(variant: str) -> None:
    """Report M17: behind the same tokens the first draft is the same at every depth, since rejected drafts of a deeper one
    leave nothing behind in the draft layer's cache."""
    requests = {name: request for name, request in workload(seed=2).items() if request[1].temperature == 0.0}
    made: dict[int, dict[tuple[str, int], int]] = {1: {}, 3: {}}
    for depth, first in made.items():
        core = engine(str(reference_checkpoint(variant)), depth)
        drafter, running = core._executor._runner._drafter, core._scheduler._running

        def draft(batch, hidden, next_ids, accepted, rows, *, depth, first=first, drafter=drafter, running=running) -> None:
            Drafter.draft(drafter, batch, hidden, next_ids, accepted, rows, depth=depth)
            by_row = {request.row: request.request_id for _, request in running}
            for row, position in zip(rows.rows.tolist(), rows.positions.tolist()):
                first[by_row[row], position] = int(drafter.tokens[row, 0])

        drafter.draft = draft
        run(core, requests)
    common = made[1].keys() & made[3].keys()
    assert len(common) > 100
    assert {key: made[1][key] for key in common} == {key: made[3][key] for key in common}


@pytest.mark.parametrize("toggle", [0, 3])
def test_graphs_and_overlapped_steps(toggle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that only the device knows reach the graphs; drafts that come and go mix graphs and eager passes."""
    pool = FakePool()
    monkeypatch.setattr("engine.cuda_graph.GraphPool", lambda: pool)
    folder = resolve_model("demo")
    tokenizer = Tokenizer.load(folder)
    requests = {
        text: (tokenizer.encode(text), SamplingParams(temperature=index % 2, seed=index, max_tokens=14 + 4 * index, ignore_eos=True))
        for index, text in enumerate(("In the beginning", "It was a fine day, and the", "def add(a, b):\n    return"))
    }  # fmt: skip
    plain = run(engine(str(folder), 0, num_cache_blocks=12, max_num_seqs=3), requests)
    core = engine(str(folder), 3, asynchronous=True, num_cache_blocks=12, max_num_seqs=3)
    core._executor._runner.capture_graphs(show_progress=False, sizes=[1, 3])
    if toggle:
        steps = itertools.count()
        core._scheduler._depth.choose = lambda _: 3 * (next(steps) // toggle % 2)
    assert_equal(run(core, requests), plain, requests)
    assert sum(core.stats().spec_accepted_per_pos) > 5
    assert sum(graph.replays for graph in pool.graphs) > 10


def core_steps(plain: dict[str, Outcome]) -> int:
    return sum(len(outcome.token_ids) for outcome in plain.values())
