"""The sampler against definitions written out in plain Python, and its independence of batch, row and neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.logprobs import score
from engine.plan import NewSequence
from engine.sampling_params import SamplingParams
from engine.sampling_state import SamplingState, pack_mask
from kernels import ops
from kernels.layout import Drafts
from kernels.reference import sampling
from kernels.reference.sampling import gumbel_noise

VOCAB = 64
CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]


def new_sequence(row: int, params: SamplingParams, known: Sequence[int] = (), prompt: int | None = None, **kw) -> NewSequence:
    prompt = len(known) if prompt is None else prompt
    return NewSequence(row, f"r{row}", params, prompt, len(known) - prompt, list(known), **kw)


def state_of(params: Sequence[SamplingParams], vocab: int = VOCAB, device: torch.device = CPU, **kw) -> SamplingState:
    """Row i asks what params[i] say."""
    state = SamplingState(vocab, len(params), device)
    state.start([new_sequence(row, p, **kw) for row, p in enumerate(params)])
    return state


def sample(state: SamplingState, logits: torch.Tensor, positions: Sequence[int], drafts: Drafts | None = None) -> list[int]:
    """One token of each row, or of `logits`' lines of rows that repeat."""
    rows = torch.arange(len(logits), device=logits.device)
    return ops.choose_tokens(logits, torch.tensor(positions, device=logits.device), rows, state.table, drafts).tolist()


def sample_with(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int] | None = None, **kw
) -> list[int]:
    """Sample one token a row through the state, as the runner does."""
    return sample(state_of(params, logits.shape[1], logits.device, **kw), logits, positions or [10] * len(params))


def kept_set(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The documented order in FP64: temperature, min_p, top_k, top_p over the renormalized set."""
    p = (logits.double() / params.temperature).softmax(-1)
    order = sorted(range(len(p)), key=lambda t: -p[t])
    order = [t for t in order if p[t] >= params.min_p * p[order[0]]]
    if params.top_k > 0:
        order = order[: params.top_k]
    total, before, kept = sum(float(p[t]) for t in order), 0.0, set()
    for t in order:
        if params.top_p < 1.0 and before >= params.top_p * total and kept:
            break
        kept.add(t)
        before += float(p[t])
    return kept


def drawn_set(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Tokens that survive the filters, read from the function that draws."""
    table, row = state_of([params], len(logits)).table, torch.zeros(1, dtype=torch.int64)
    if not table.temperature[0]:  # greedy
        return {sample_with(logits[None], [params])[0]}
    scaled = sampling.restrict(sampling.scale(logits[None], row, table), row, table)
    return set(scaled[0].isfinite().nonzero()[:, 0].tolist())


def params(**kw) -> SamplingParams:
    made = SamplingParams(**{"seed": 1, **kw})
    made.validate(1 << 20)
    return made


# ---- noise


def test_noise_depends_on_seed_position_and_token_only() -> None:
    seeds, positions = torch.tensor([3, 3, 9, 2**62]), torch.tensor([0, 1, 0, 131071])
    whole = gumbel_noise(seeds, positions, 300)
    for row in range(4):
        torch.testing.assert_close(
            gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 300)[0], whole[row], rtol=0, atol=0
        )
    assert torch.equal(gumbel_noise(seeds, positions, 100), whole[:, :100])
    assert (whole[0] != whole[1]).all() and (whole[0] != whole[2]).all()


def test_noise_is_gumbel_distributed_and_uncorrelated() -> None:
    noise = gumbel_noise(torch.arange(200), torch.full((200,), 7), 5000).double()
    uniform = torch.exp(-torch.exp(-noise)).flatten()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772156649) < 5e-3 and abs(float(noise.var()) - math.pi**2 / 6) < 1e-2
    histogram = torch.histc(uniform, 100, 0, 1)
    chi2 = float(((histogram - 1e4) ** 2 / 1e4).sum())
    assert chi2 < 161  # 99 degrees of freedom, p = 1e-4
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):  # next seed, next token
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 5e-3


def test_noise_has_fixed_values() -> None:
    """The same seeds give the same text tomorrow: the hash is part of the interface. Values computed with plain integers."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (42, 17), (2**63 - 1, 131071)):
        key = mix((mix((seed + golden) % 2**64) + position * 0xBF58476D1CE4E5B9) % 2**64)
        bits = [mix((key + (t + 1) * golden) % 2**64) for t in range(20)]
        want = [-math.log(-math.log(((b >> 12) + 0.5) * 2.0**-52)) for b in bits]
        got = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 20)[0]
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.cuda
def test_noise_is_the_same_on_cuda() -> None:
    seeds, positions = torch.arange(64) * 977, torch.arange(64) * 31
    cpu, gpu = gumbel_noise(seeds, positions, 4096), gumbel_noise(seeds.cuda(), positions.cuda(), 4096).cpu()
    assert float((cpu != gpu).float().mean()) < 1e-5
    torch.testing.assert_close(cpu, gpu, rtol=1e-6, atol=1e-6)


# ---- greedy and batches


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_takes_the_first_best_and_ignores_neighbours(device: torch.device) -> None:
    """Report P06: temperature 0, or too small to divide by, is greedy; neighbours that sample do not perturb it."""
    logits = torch.randn(6, VOCAB, device=device)
    logits[2, 5] = logits[2, 9] = 50.0
    want = logits.argmax(-1).tolist()
    greedy, hot = params(temperature=0.0), params(temperature=5.0)
    assert sample_with(logits, [greedy] * 6) == want
    mixed = sample_with(logits, [greedy, hot, greedy, params(temperature=1e-6), hot, params(top_k=1)])
    assert [mixed[i] for i in (0, 2, 3, 5)] == [want[i] for i in (0, 2, 3, 5)] and mixed[2] == 5
    assert sample_with(logits, [params(top_p=1e-4)] * 6)[:2] == want[:2]
    tiny = params(temperature=1e-4)
    assert sample_with(logits * 1e4, [tiny] * 6)[:2] == want[:2]  # 1e8 after division: no overflow


@pytest.mark.parametrize("device", DEVICES)
def test_a_seeded_draw_does_not_depend_on_batch_or_row(device: torch.device) -> None:
    """Report P11: the same (seed, position) gives the same token alone, in any row, beside any neighbours."""
    logits = torch.randn(40, 500, device=device)
    kinds = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9}, {"temperature": 0.0}]
    all_params = [params(seed=i * 13, **kinds[i % len(kinds)]) for i in range(40)]
    positions = [5 + 3 * i for i in range(40)]
    together = sample_with(logits, all_params, positions)
    alone = [sample_with(logits[i : i + 1], [all_params[i]], [positions[i]])[0] for i in range(40)]
    assert together == alone
    order = torch.randperm(40).tolist()
    shuffled = sample_with(logits[order], [all_params[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_choices_of_one_seed_differ_and_repeat() -> None:
    """Report P11: n choices of one seeded request draw differently from each other, and the same in every run."""
    logits = torch.zeros(4, VOCAB)
    choices = [SamplingParams(n=4, seed=5).for_choice(i) for i in range(4)]
    first = [sample_with(logits, choices, [p] * 4) for p in range(20)]
    assert len({tuple(column) for column in zip(*first)}) == 4
    assert first == [sample_with(logits, choices, [p] * 4) for p in range(20)]


# ---- filters


@pytest.mark.parametrize("seed", range(30))
def test_kept_set_matches_the_documented_order(seed: int) -> None:
    """Report P03, P05: temperature, min_p, top_k, top_p over the renormalized top_k set, in one place."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=generator) * 3

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def sometimes(value: float, off: float) -> float:
        return value if uniform(0, 1) > 0.4 else off

    for _ in range(10):
        p = params(
            temperature=uniform(0.3, 3), top_k=int(sometimes(uniform(2, 20), 0)), top_p=sometimes(uniform(0.05, 0.999), 1.0),
            min_p=sometimes(uniform(0, 0.3), 0.0),
        )  # fmt: skip
        assert drawn_set(logits, p) == kept_set(logits, p)


def test_top_p_counts_the_renormalized_top_k_set() -> None:
    """Report P03: p = .35 .25 .20 .05 ..., k 4, top_p .82: .35 + .25 = .60 of .85, so the third token is needed."""
    p = torch.tensor([0.35, 0.25, 0.20, 0.05] + [0.15 / 60] * 60)
    assert drawn_set(p.log(), params(top_k=4, top_p=0.82)) == {0, 1, 2}
    assert drawn_set(p.log(), params(top_p=0.82)) == {0, 1, 2, 3}


def test_filters_do_not_share_state() -> None:
    """Report P04: min_p beside top_k and top_p gives the intersection, and the input is left as it was."""
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    sample_with(logits, [params(min_p=0.1, top_k=5), params(top_p=0.5, min_p=0.2), params(logit_bias={1: 5.0})])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "kind", [{"top_p": 0.9}, {"top_k": 40}, {"top_k": 3000}, {"top_k": 3000, "top_p": 0.99}, {"min_p": 0.02}]
)
def test_large_vocabulary_takes_the_same_set_with_few_and_all_candidates(kind: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    peaked, flat = torch.randn(5000) * 4, torch.randn(5000) * 0.1
    for logits in (peaked, flat):
        few = drawn_set(logits, params(**kind))
        assert few == kept_set(logits, params(**kind))
        monkeypatch.setattr(sampling, "NUM_CANDIDATES", 5000)
        assert drawn_set(logits, params(**kind)) == few
        monkeypatch.undo()


def test_best_token_always_survives() -> None:
    """Report P07: top_k 1 with top_p 0.8 and other narrow combinations keep the best token."""
    logits = torch.randn(VOCAB)
    for kw in ({"top_k": 1, "top_p": 0.8}, {"top_p": 1e-6}, {"min_p": 1.0}, {"min_p": 1.0, "top_k": 1, "top_p": 1e-3}):
        assert drawn_set(logits, params(**kw)) == {int(logits.argmax())}


def test_neutral_filters_keep_everything() -> None:
    """Report P08: top_k 0 and -1 are off, and a neutral row beside a filtered one still draws from all tokens."""
    logits = torch.full((VOCAB,), -40.0)
    logits[3] = 0.0
    for kw in ({"top_k": 0}, {"top_k": -1}, {"top_k": VOCAB}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert drawn_set(logits, params(**kw)) == set(range(VOCAB))
    table = state_of([params(min_p=1e-30), params(top_p=0.5)]).table
    kept = sampling.restrict(logits.repeat(2, 1), torch.arange(2), table).isfinite().sum(-1)
    assert kept.tolist() == [VOCAB, 1]


@pytest.mark.parametrize("kw", [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 12}, {"min_p": 0.05}])
def test_draws_follow_the_distribution(kw: dict) -> None:
    """Report P05: 20,000 draws against the exact restricted distribution, chi-square at p = 1e-4."""
    logits, p = torch.randn(VOCAB) * 2, params(**kw)
    runs = 20000
    table, row = state_of([p]).table, torch.zeros(1, dtype=torch.int64)
    scaled = sampling.restrict(sampling.scale(logits[None], row, table), row, table)
    exact = scaled[0].double().softmax(-1)
    tokens = (scaled + gumbel_noise(torch.full((runs,), 3), torch.arange(runs), VOCAB)).argmax(-1)
    count = torch.bincount(tokens, minlength=VOCAB).double()
    assert (count[exact == 0] == 0).all()
    expected, common = exact * runs, exact * runs >= 5
    chi2 = float(((count - expected)[common] ** 2 / expected[common]).sum())
    degrees = int(common.sum()) - 1
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees) + 8


# ---- logits


def test_penalties_match_their_formulas() -> None:
    logits = torch.randn(1, VOCAB) * 3
    p = params(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.4)
    known, prompt = [1, 2, 3, 3, 5, 5, 5, 2], 4
    state = SamplingState(VOCAB, 1, CPU)
    state.start([new_sequence(0, p, known, prompt)])
    want = logits[0].clone()
    for t in set(known):
        want[t] = want[t] / 1.7 if want[t] > 0 else want[t] * 1.7
    for t in set(known[prompt:]):
        want[t] -= 0.6 + 0.4 * known[prompt:].count(t)
    row = torch.zeros(1, dtype=torch.int64)
    torch.testing.assert_close(sampling.edit(logits, torch.tensor([8]), row, state.table, None)[0], want)
    (token,) = sample(state, logits, [8])
    ops.accept_tokens(torch.tensor([token]), row, state.table)
    assert state.table.history[0, token] & 0x7FFFFFFF == known[prompt:].count(token) + 1


def test_frequency_penalty_counts_what_was_sampled() -> None:
    """Counts advance on the device: equal logits with a frequency penalty visit every token before any twice."""
    state, seen = state_of([params(temperature=0.0), params(temperature=0.0, frequency_penalty=1.0)], 8), []
    for i in range(16):
        seen.append(sample(state, torch.zeros(2, 8), [i, i]))
        ops.accept_tokens(torch.tensor(seen[-1]), torch.arange(2), state.table)
    assert [row[0] for row in seen] == [0] * 16
    assert [row[1] for row in seen] == [*range(8), *range(8)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_line_s_penalties_count_the_drafts_before_it(device: torch.device) -> None:
    """All lines at once choose what they would choose one after the other, had each draft before them been accepted."""
    generator = torch.Generator().manual_seed(3)
    kinds = [params(repetition_penalty=1.5, temperature=0.0), params(presence_penalty=2.0, frequency_penalty=1.0), params()]
    known = torch.randint(0, VOCAB, (30,), generator=generator).tolist()
    logits = torch.randn(3, 4, VOCAB, generator=generator).to(device) * 2
    drafts = torch.randint(0, VOCAB, (3, 3), generator=generator)
    drafts[:, 2] = drafts[:, 0]  # one comes twice
    logits.scatter_add_(2, drafts[:, :1, None].expand(3, 4, 1).to(device), torch.full((3, 4, 1), 3.0, device=device))
    state = SamplingState(VOCAB, 3, device)
    state.start([new_sequence(row, p, known, 20) for row, p in enumerate(kinds)])
    rows, positions = torch.arange(3, device=device), torch.arange(40, 44, device=device)
    at_once = ops.choose_tokens(
        logits.flatten(0, 1), positions.repeat(3), rows.repeat_interleave(4), state.table,
        Drafts(drafts.to(device), torch.full((3,), 3, device=device), None),
    )  # fmt: skip
    in_turn = []
    for line in range(4):
        in_turn.append(ops.choose_tokens(logits[:, line].contiguous(), positions[line].repeat(3), rows, state.table))
        if line < 3:
            ops.accept_tokens(drafts[:, line].contiguous().to(device), rows, state.table)
    assert at_once.view(3, 4).T.tolist() == torch.stack(in_turn).tolist()


def test_a_row_is_reused_without_what_it_held() -> None:
    state = SamplingState(VOCAB, 2, CPU)
    everything = params(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0, logit_bias={3: 9.0}, allowed_token_ids=[3]
    )
    fresh = state_of([params(temperature=0.0)]).table
    state.start([new_sequence(1, everything, [1, 2, 2], 1)])
    assert state.table.history[1].tolist()[:4] == [0, -(2**31), 2, 0]
    state.free(1)
    state.start([new_sequence(1, params(temperature=0.0, seed=0))])
    for name in ("temperature", "min_p", "top_k", "top_p", "repetition", "presence", "frequency", "masked", "num_edits"):
        assert getattr(state.table, name)[1] == getattr(fresh, name)[0], name
    state.start([new_sequence(1, everything, [5], 1)])
    assert state.table.history[1].nonzero().flatten().tolist() == [5]


def test_bias_allowed_tokens_and_min_tokens() -> None:
    logits = torch.zeros(6, VOCAB)
    logits[:, 10] = 5.0
    greedy = {"temperature": 0.0}
    rows = [
        params(**greedy),
        params(**greedy, logit_bias={10: -100.0, 20: 3.0}),
        params(**greedy, allowed_token_ids=[31, 32, 63]),
        params(**greedy, min_tokens=3, stop_token_ids=[10]),
        params(**greedy, min_tokens=3),
        params(**greedy, min_tokens=3, logit_bias={10: 100.0}),
    ]
    state = SamplingState(VOCAB, len(rows), CPU)
    state.start([NewSequence(row, str(row), p, num_prompt_tokens=7, eos_token_ids=[10, 0]) for row, p in enumerate(rows)])
    for position, late in ((7, 1), (9, 1), (10, 10)):  # outputs 0, 2 and 3
        got = sample(state, logits, [position] * 6)
        assert got[:3] == [10, 20, 31]
        assert got[3:] == [late, late, late]


def test_masks_pack_and_unpack() -> None:
    for vocab in (31, 32, 33, 100):
        ids = sorted({0, vocab - 1, vocab // 2, min(31, vocab - 1)})
        mask = torch.from_numpy(pack_mask(ids, vocab))[None]
        assert sampling.unpack_mask(mask, vocab)[0].nonzero().flatten().tolist() == ids


class Counting:
    """A grammar that allows token n at its nth step, and knows fewer tokens than the model has."""

    def __init__(self, text: str) -> None:
        self.at = int(text)
        self.error: str | None = None

    def accept(self, token_ids: list[int]) -> bool:
        assert token_ids == list(range(self.at, self.at + len(token_ids)))
        self.at += len(token_ids)
        return True

    def mask(self) -> np.ndarray:
        return pack_mask([self.at, 40], 64)


def test_grammar_masks_follow_the_matcher_and_meet_allowed_tokens() -> None:
    vocab = 100
    state = SamplingState(vocab, 5, CPU, matcher=Counting)
    state.start([
        new_sequence(0, params(temperature=0.0)),
        new_sequence(1, params(temperature=0.0, grammar="5"), [9, 5, 6], 1),
        new_sequence(2, params(temperature=0.0, allowed_token_ids=[12, 40])),
        new_sequence(3, params(temperature=0.0, grammar="30", allowed_token_ids=[40, 90])),
        new_sequence(4, params(temperature=0.0, grammar="30")),
    ])  # fmt: skip
    logits = torch.arange(vocab, 0, -1).float().repeat(5, 1)
    logits[:, 80:] += 200
    for step in range(3):
        state.mask_grammars({row: state.matcher(row) for row in (1, 3, 4)})  # type: ignore[misc]
        assert sample(state, logits, [9] * 5) == [80, 7 + step, 12, 40, 30]
        state.matcher(1).accept([7 + step])  # type: ignore[union-attr]
    state.matcher(4).error = "no text can follow"  # type: ignore[union-attr, misc]
    state.mask_grammars({4: state.matcher(4)})  # type: ignore[dict-item]
    assert sample(state, logits, [9] * 5)[4] == -1


# ---- failures and scores


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_row_fails_alone(bad: float) -> None:
    """Report P07: NaN, inf or an entirely masked row gives -1 for that row only."""
    logits = torch.randn(4, VOCAB)
    broken = logits.clone()
    broken[1] = bad if bad < 0 else broken[1].index_fill(0, torch.tensor([3]), bad)
    for p in (params(temperature=0.0), params(), params(top_k=5, top_p=0.9), params(frequency_penalty=1.0), params(min_p=0.3)):
        want, got = sample_with(logits, [p] * 4), sample_with(broken, [p] * 4)
        assert got[1] == -1 and [got[i] for i in (0, 2, 3)] == [want[i] for i in (0, 2, 3)]


@pytest.mark.parametrize("num_top", [0, 1, 5, 100])
def test_scores_are_log_softmax_of_the_raw_logits(num_top: int) -> None:
    logits = torch.randn(7, VOCAB) * 5
    tokens = torch.randint(0, VOCAB, (7,))
    scores = score(logits, tokens, num_top)
    exact = logits.double().log_softmax(-1)
    for row in range(7):
        order = exact[row].argsort(descending=True)
        assert scores.rank[row] == int((order == tokens[row]).nonzero()) + 1
        assert abs(float(scores.logprob[row]) - float(exact[row, tokens[row]])) < 1e-5
        assert scores.top_ids[row].tolist() == order[: min(num_top, VOCAB)].tolist()
        torch.testing.assert_close(scores.top_logprobs[row].double(), exact[row, scores.top_ids[row]], atol=1e-5, rtol=0)
