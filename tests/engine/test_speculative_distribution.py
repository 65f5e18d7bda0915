"""Speculation samples from the model's own distribution: chi-square on the joint of three tokens, vocabulary of 8."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from engine.block_manager import BlockManager
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.executor import Executor
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from kernels.layout import CacheFormat
from kernels.reference import lines, sampling
from models.batch import ForwardBatch
from models.parallel import ParallelContext
from tests.engine.speculation import run
from tests.engine.stub_model import stub_config

VOCAB, RUNS, DEPTH = 8, 20_000, 2
PLAIN = SamplingParams(temperature=1.0)
_generator = torch.Generator().manual_seed(4)
LOGITS = torch.randn(VOCAB, VOCAB, generator=_generator) * 1.5  # of the next token, by the last one
DRAFT_LOGITS = LOGITS + torch.randn(VOCAB, VOCAB, generator=_generator) * 0.7  # what the draft head takes them for


class MarkovModel:
    """The next token depends on the last one; the draft head knows a similar table. Hidden states: the last token, one-hot,
    in the model's half or in the draft head's."""

    def __init__(self) -> None:
        self.mtp = SimpleNamespace(forward=lambda next_ids, hidden, batch: self._one_hot(next_ids + VOCAB))

    def _one_hot(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids, 2 * VOCAB).float()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self._one_hot(batch.input_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.cat((LOGITS, DRAFT_LOGITS))

    def expert_load(self) -> None:
        """No experts."""


def markov_core(depth: int, ratio: bool = False, asynchronous: bool = False) -> EngineCore:
    config = stub_config(vocab_size=VOCAB)
    cache = KVCache.allocate(config, CacheFormat.FP32, 1200, torch.device("cpu"), depth)
    runner = ModelRunner(
        MarkovModel(), config, cache, ParallelContext.single(), max_num_seqs=1000, max_model_len=128,  # type: ignore[arg-type]
        device=torch.device("cpu"), num_speculative_tokens=depth, ratio_acceptance=ratio,
    )  # fmt: skip
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1000, max_queued_requests=0),
        BlockManager(1200, False),
        max_model_len=128,
        vocab_size=VOCAB,
        num_speculative_tokens=depth,
    )
    return EngineCore(scheduler, Executor(runner, ParallelContext.single()), asynchronous=asynchronous)


def exact_next(last: int, params: SamplingParams, seen: tuple[int, ...] = ()) -> torch.Tensor:
    """[VOCAB] probabilities after presence penalty, temperature and top-p, from the definition; seen: the output so far."""
    logits = LOGITS[last].double().clone()
    logits[list(set(seen))] -= params.presence_penalty
    probabilities = (logits / params.temperature).softmax(-1)
    kept = torch.zeros_like(probabilities)
    mass = 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if mass >= params.top_p:
            break
        kept[token] = probabilities[token]
        mass += float(probabilities[token])
    return kept / kept.sum()


def p_value(params: SamplingParams, ratio: bool, asynchronous: bool = False) -> tuple[float, float]:
    """Chi-square p of the joint of three tokens after token 3, cells expected under 5 pooled; and the part of the first
    drafts that was accepted."""
    core, runs = markov_core(DEPTH, ratio, asynchronous), RUNS
    requests = {
        str(index): ([3], msgspec.structs.replace(params, seed=index, max_tokens=3, ignore_eos=True)) for index in range(runs)
    }
    outcomes = run(core, requests, arrivals=[1000])
    counts: dict[tuple[int, ...], int] = {}
    for outcome in outcomes.values():
        key = tuple(outcome.token_ids)
        counts[key] = counts.get(key, 0) + 1
    cells, pooled = [], [0.0, 0.0]
    follow = functools.cache(lambda last, seen: exact_next(last, params, seen if params.presence_penalty else ()).tolist())
    for a, b, c in itertools.product(range(VOCAB), repeat=3):
        joint = follow(3, ())[a] * follow(a, (a,))[b] * follow(b, (a, b))[c]
        expected, observed = runs * joint, counts.get((a, b, c), 0)
        if expected == 0:
            assert observed == 0, f"{(a, b, c)} cannot be drawn"
        elif expected < 5:
            pooled = [pooled[0] + expected, pooled[1] + observed]
        else:
            cells.append((expected, observed))
    if pooled[0]:
        cells.append((pooled[0], pooled[1]))
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    stats = core.stats()
    return float(torch.special.gammaincc(half[0], half[1])), stats.spec_accepted_per_pos[0] / stats.spec_drafts


@pytest.mark.parametrize("ratio,asynchronous", [(False, False), (True, True)])
@pytest.mark.parametrize("params", [PLAIN, SamplingParams(temperature=0.7, top_p=0.9)], ids=["1.0", "0.7 with top-p 0.9"])
def test_joint_of_three_tokens(params: SamplingParams, ratio: bool, asynchronous: bool) -> None:
    """Report M04: drafts are accepted at every temperature. Report M05: drafts come from the head's distribution, and either
    way of accepting them reaches what it promises for that distribution."""
    p, accepted = p_value(params, ratio, asynchronous)
    assert p > 0.01, p
    # The first draft follows the first token, which follows token 3.
    target = torch.stack([exact_next(last, params) for last in range(VOCAB)])
    drafted = (DRAFT_LOGITS.double() / params.temperature).softmax(-1)
    common = torch.minimum(target, drafted).sum(-1)  # one minus the total variation distance
    if ratio:
        assert accepted == pytest.approx(float((target[3] * common).sum()), abs=0.02)
    else:
        assert accepted > float((target[3] * common / (2 - common)).sum()) - 0.01
        assert accepted > float((target[3] * target[range(VOCAB), DRAFT_LOGITS.argmax(-1)]).sum()) + 0.05, "as greedy drafts"


@pytest.mark.parametrize("ratio", [False, True])
def test_joint_of_three_tokens_under_a_penalty(ratio: bool) -> None:
    """Report M08: what came before counts at every position of a step, accepted drafts included."""
    p, accepted = p_value(SamplingParams(temperature=1.0, presence_penalty=1.5), ratio)
    assert p > 0.01, p
    assert accepted > 0.3


def test_wrong_ratios_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaces a rejected draft must come from the residual; the model's own distribution would be wrong."""
    accept = sampling._accept_by_ratio

    def replace_from_target(scaled: torch.Tensor, drawn: torch.Tensor, *rest: Any) -> torch.Tensor:
        tokens, (*_, lines, drafts) = accept(scaled, drawn, *rest), rest
        verified = torch.nn.functional.pad(drafts.tokens, (0, 1), value=-1).flatten()
        verified = torch.nn.functional.pad(verified, (0, int(lines.max()) + 1), value=-1)[lines]
        return torch.where(tokens == verified, tokens, drawn)

    monkeypatch.setattr(sampling, "_accept_by_ratio", replace_from_target)
    p, _ = p_value(PLAIN, ratio=True)
    assert p < 1e-6, p


def test_ratio_acceptance_repeats_for_a_seed_whatever_the_batch() -> None:
    """Noise is keyed by seed and position here too; only depth and preemption change what is drawn how."""
    params = SamplingParams(temperature=0.9, seed=77, max_tokens=60, ignore_eos=True)
    alone = run(markov_core(DEPTH, ratio=True), {"a": ([3], params)})["a"].token_ids
    others = {f"b{i}": ([i % VOCAB], SamplingParams(seed=i, max_tokens=3 + i, ignore_eos=True)) for i in range(30)}
    for asynchronous in (False, True):
        beside = run(markov_core(DEPTH, ratio=True, asynchronous=asynchronous), {**others, "a": ([3], params)})["a"]
        assert beside.token_ids == alone
        assert 0 < beside.accepted < beside.drafted
    assert run(markov_core(0), {"a": ([3], params)})["a"].token_ids != alone, "the plain path's tokens are others"


def test_the_test_notices_wrong_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_all(targets: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
        targets[:, :-1] = torch.where(torch.arange(drafts.shape[1]) < num_drafts[:, None], drafts, targets[:, :-1])
        return num_drafts

    monkeypatch.setattr(lines, "count_accepted", accept_all)
    p, _ = p_value(PLAIN, ratio=False)
    assert p < 1e-6, p
