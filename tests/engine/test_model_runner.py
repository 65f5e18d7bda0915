"""The runner executes hand-made plans: tables, slots, context pieces, sampling rows, and results in the plan's order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.model_runner import plan_context
from engine.plan import RowResult
from engine.sampling_params import SamplingParams
from engine.sampling_state import pack_mask
from engine.staging import HostCopy, _layout, _packed, _unpacked, to_device
from tests.engine.plan_driver import Driver
from tests.engine.stub_model import VOCAB, StubModel, stub_runner

pytestmark = pytest.mark.usefixtures("reference_operations")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens_of(results: Sequence[RowResult]) -> dict[int, list[int]]:
    return {result.row: result.token_ids for result in results}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 1000])
def test_chunked_prefill_then_decode_gives_the_model_s_tokens(device: str, chunk: int) -> None:
    model = StubModel(device)
    driver = Driver(stub_runner(model, context_tokens=128))
    text = prompt(300, 1)
    driver.start(3, len(text))
    got: list[int] = []
    for at in range(0, len(text), chunk):
        part, last = text[at : at + chunk], at + chunk >= len(text)
        result = driver.run(prefills=[driver.step_of(3, part, sample=last)]).wait()
        assert [len(r.token_ids) for r in result.rows] == [1] * last
        got += [t for r in result.rows for t in r.token_ids]
    for _ in range(70):  # crosses a block border
        got += driver.run([driver.step_of(3)]).wait().rows[0].token_ids
    assert got == StubModel().expected_greedy(text, 71)


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_rows_run_ahead_of_their_results(device: str) -> None:
    """Decodes beside chunks of several sequences; each plan is submitted before the last result is read."""
    model = StubModel(device)
    driver = Driver(stub_runner(model, context_tokens=64))
    texts = {row: prompt(60 + 37 * row, row) for row in (5, 0, 2, 7)}
    done = dict.fromkeys(texts, 0)
    for row, text in texts.items():
        driver.start(row, len(text))
    got: dict[int, list[int]] = {row: [] for row in texts}
    pending = None
    for step in range(40):
        decodes, prefills = [], []
        for row, text in texts.items():
            if done[row] >= len(text):
                decodes.append(driver.step_of(row))
            elif step % 3 != row % 3 or step > 12:  # sequences move at different times
                part = text[done[row] : done[row] + 23 + row]
                done[row] += len(part)
                prefills.append(driver.step_of(row, part, sample=done[row] >= len(text)))
        following = driver.run(decodes, prefills)
        if pending is not None:
            for row, tokens in tokens_of(pending.wait().rows).items():
                got[row] += tokens
        pending = following
    assert pending is not None
    for row, tokens in tokens_of(pending.wait().rows).items():
        got[row] += tokens
    for row, text in texts.items():
        assert len(got[row]) > 20 and got[row] == StubModel().expected_greedy(text, len(got[row]))


def test_a_row_is_reused_with_a_clean_table() -> None:
    model = StubModel()
    driver = Driver(stub_runner(model))
    for seed, length in ((1, 200), (2, 30), (3, 130)):
        text = prompt(length, seed)
        driver.start(4, length)
        got = driver.run(prefills=[driver.step_of(4, text)]).wait().rows[0].token_ids
        got += driver.run([driver.step_of(4)]).wait().rows[0].token_ids
        assert got == model.expected_greedy(text, 2)
        driver.free(4)


def test_decode_step_may_carry_its_token() -> None:
    """A resumed or prefix-cached sequence decodes a token that this rank never sampled."""
    model = StubModel()
    driver = Driver(stub_runner(model))
    text = prompt(70, 9)
    driver.start(0, len(text))
    driver.run(prefills=[driver.step_of(0, text[:69], sample=False)])
    assert driver.run([driver.step_of(0, text[69:])]).wait().rows[0].token_ids == model.expected_greedy(text, 1)


def test_empty_plan_runs_the_same_code() -> None:
    """An idle replica runs a zero-length batch, since other ranks wait in the collectives of the model."""
    model = StubModel()
    result = Driver(stub_runner(model)).run().wait()
    assert result.rows == [] and model.rows_of_logits == []


def test_only_sampled_rows_get_logits() -> None:
    model = StubModel()
    driver = Driver(stub_runner(model))
    for row in (0, 1):
        driver.start(row, 50)
    driver.run(prefills=[driver.step_of(0, prompt(50, 0)), driver.step_of(1, prompt(30, 1), sample=False)])
    assert model.rows_of_logits == [1]


def test_results_keep_the_plan_s_order_and_a_broken_row_fails_alone() -> None:
    """Report P07: NaN logits end their own request only, and the others' tokens are untouched."""
    model = StubModel(broken_token=49)
    driver = Driver(stub_runner(model))
    texts = {row: [2 + (t + row) % 40 for t in range(20 + row)] for row in (6, 1, 3)}
    texts[1][-1] = 49
    for row, text in texts.items():
        driver.start(row, len(text))
    result = driver.run(prefills=[driver.step_of(row, text) for row, text in texts.items()]).wait()
    assert [r.row for r in result.rows] == [6, 1, 3]
    assert result.rows[1].error is not None and result.rows[1].token_ids == []
    for r in (result.rows[0], result.rows[2]):
        assert r.error is None and r.token_ids == StubModel().expected_greedy(texts[r.row], 1)
    again = driver.run([driver.step_of(row) for row in texts]).wait()  # the broken row still runs one step under async
    assert [r.error is None for r in again.rows] == [True, False, True]


def test_logprobs_and_prompt_logprobs_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model_runner._SCORED_BYTES", 4 * VOCAB * 16)
    model = StubModel()
    driver = Driver(stub_runner(model))
    text = prompt(50, 4)
    driver.start(0, 50, SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2))
    driver.start(1, 20)
    first = driver.run(
        prefills=[
            driver.step_of(1, prompt(20, 5)),
            driver.step_of(0, text[:30], sample=False, prompt_logprobs=2, next_token_ids=text[1:31]),
        ]
    ).wait()
    assert max(model.rows_of_logits) <= 16
    last = driver.run(prefills=[driver.step_of(0, text[30:], prompt_logprobs=2, next_token_ids=text[31:])]).wait()
    exact = model.expected_logits(text).double().log_softmax(-1)
    got = [entry for result in (first, last) for r in result.rows if r.row == 0 for entry in r.prompt_logprobs or []]
    assert [entry.token_id for entry in got] == text[1:]
    for line, entry in zip(exact, got):
        assert abs(entry.logprob - float(line[entry.token_id])) < 1e-4
        assert entry.rank == int((line > line[entry.token_id]).sum()) + 1
        assert [token for token, _ in entry.top] == line.topk(2).indices.tolist()
    assert first.rows[0].prompt_logprobs is None and first.rows[0].logprobs is None
    (chosen,) = last.rows[0].logprobs or []
    assert last.rows[0].token_ids == [chosen.token_id] and chosen.rank == 1 and len(chosen.top) == 3
    assert abs(chosen.logprob - float(exact[-1].max())) < 1e-4


def test_penalties_follow_the_tokens_on_the_device() -> None:
    """The runner counts sampled tokens itself, also when it runs ahead of the host; resumption starts from the history."""
    model, params = StubModel(), SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3)
    text = prompt(20, 8)

    def expected(tokens: list[int], count: int) -> list[int]:
        tokens = list(tokens)
        for _ in range(count):
            logits = model.expected_logits(tokens)[-1]
            for t in set(tokens):
                logits[t] = logits[t] / 1.3 if logits[t] > 0 else logits[t] * 1.3
            for t in tokens[20:]:
                logits[t] -= 1.5
            tokens.append(int(logits.argmax()))
        return tokens[20:]

    want = expected(text, 30)
    assert want != model.expected_greedy(text, 30)
    driver = Driver(stub_runner(model))
    driver.start(2, 20, params, text)
    pending = [driver.run(prefills=[driver.step_of(2, text)])]
    pending += [driver.run([driver.step_of(2)]) for _ in range(14)]
    got = [step.wait().rows[0].token_ids[0] for step in pending]
    driver.free(2)
    driver.start(5, 20, params, text + got)
    pending = [driver.run(prefills=[driver.step_of(5, text + got)])]
    pending += [driver.run([driver.step_of(5)]) for _ in range(14)]
    assert got + [step.wait().rows[0].token_ids[0] for step in pending] == want


class EveryOther:
    """A grammar of tokens whose parity alternates; it must have seen every token so far. It breaks after `limit` tokens."""

    def __init__(self, text: str) -> None:
        self.parity, self.limit = map(int, text.split())
        self.seen = 0

    error: str | None = None

    def accept(self, token_ids: list[int]) -> bool:
        for token in token_ids:
            assert token % 2 == self.parity
            self.parity ^= 1
            self.seen += 1
        if self.seen == self.limit:
            self.error = "the grammar gave up"
        return self.error is None

    def mask(self) -> np.ndarray:
        return pack_mask(range(self.parity, VOCAB, 2), VOCAB)


def test_grammar_rows_see_their_last_token_although_steps_overlap() -> None:
    driver = Driver(stub_runner(StubModel(), matcher=EveryOther))
    text = prompt(20, 3)
    driver.start(0, 20, SamplingParams(temperature=0.0, grammar="1 99"), text)
    driver.start(1, 20)
    pending = [driver.run(prefills=[driver.step_of(row, text) for row in (0, 1)])]
    for step in range(18):  # the grammar's row sits out every other step, as under the real scheduler
        decodes = [driver.step_of(1)] + ([driver.step_of(0)] if step % 2 else [])
        pending.append(driver.run(decodes))
    got = [tokens_of(step.wait().rows) for step in pending]
    assert [tokens[0][0] % 2 for tokens in got if 0 in tokens] == [1, 0] * 5
    assert [tokens[1][0] for tokens in got] == StubModel().expected_greedy(text, 19)


def test_a_grammar_that_breaks_ends_its_own_row() -> None:
    driver = Driver(stub_runner(StubModel(), matcher=EveryOther))
    text = prompt(20, 3)
    driver.start(0, 20, SamplingParams(temperature=0.0, grammar="1 2"), text)
    driver.start(1, 20)
    results = [driver.run(prefills=[driver.step_of(row, text) for row in (0, 1)]).wait()]
    results += [driver.run([driver.step_of(0), driver.step_of(1)]).wait() for _ in range(2)]
    assert [r.rows[0].error for r in results] == [None, None, "the grammar gave up"]
    assert [r.rows[1].token_ids[0] for r in results] == StubModel().expected_greedy(text, 3)


@pytest.mark.parametrize("most", [64, 100, 256, 10000])
def test_context_pieces_cover_every_token_once_within_bounds(most: int) -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        lens = generator.integers(0, 700, generator.integers(1, 8)) * generator.integers(0, 2)
        covered = np.zeros_like(lens)
        for starts, sizes in plan_context(lens, most):
            assert 0 < sizes.sum() <= most
            assert (starts[sizes > 0] == covered[sizes > 0]).all() and (starts % 64 == 0)[sizes > 0].all()
            covered += sizes
        assert (covered == lens).all()


def test_packed_arrays_come_apart_again() -> None:
    """As on a GPU, without one: odd lengths, nothing at all, several dtypes in any order, two dimensions."""
    generator = np.random.default_rng(2)
    for _ in range(50):
        dtypes = generator.choice(["int64", "int32", "float32", "bool"], generator.integers(1, 9))
        arrays = [
            generator.integers(0, 2, generator.integers(0, 9, generator.integers(1, 3))).astype(dtype) for dtype in dtypes
        ]
        groups = _layout(tuple((array.dtype, array.size) for array in arrays))
        moved = _unpacked(arrays, groups, _packed(arrays, groups))
        assert all(tensor.data_ptr() % 16 == 0 for tensor, array in zip(moved, arrays) if array.size)
        for array, tensor in zip(arrays, moved):
            assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("device", DEVICES)
def test_staging_round_trip(device: str) -> None:
    arrays = [
        np.arange(7),
        np.arange(3, dtype=np.int32),
        np.zeros((0, 4), np.float32),
        np.eye(3, dtype=np.float32),
        np.array([True]),
    ]
    moved = to_device(arrays, torch.device(device))
    assert [t.device.type for t in moved] == [device] * 5
    for array, tensor in zip(arrays, HostCopy(moved).wait()):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
