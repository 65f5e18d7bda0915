"""The engine end to end below the tokenizer: with the exact cache every feature leaves the tokens as they were."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from engine.block_manager import BlockManager
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor import Executor
from engine.messages import AddRequest, RequestFailed, TokenLogprob
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.worker import WorkerInfo, build_worker
from models.parallel import ParallelContext
from tests.comparator import assert_same_tokens, top2_gaps
from tests.engine.plan_driver import Driver
from tests.engine.stub_model import VOCAB, StubModel, stub_runner
from tests.reference_checkpoints import Reference, reference_checkpoint, references

GREEDY = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class Engine:
    """Scheduler and core around an executor of any model."""

    def __init__(
        self,
        executor: Executor,
        *,
        vocab_size: int = VOCAB,
        max_model_len: int = 1024,
        num_blocks: int = 200,
        prefix_cache: bool = True,
        asynchronous: bool = False,
        **scheduler: int | str,
    ) -> None:
        self.blocks = BlockManager(num_blocks, prefix_cache)
        self.scheduler = Scheduler(
            SchedulerConfig(**scheduler),
            self.blocks,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            seed=3,  # type: ignore[arg-type]
        )
        self.core = EngineCore(self.scheduler, executor, asynchronous=asynchronous)
        self.outcomes: dict[str, Outcome] = {}

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **kw) -> None:
        self.outcomes[name] = Outcome()
        self.core.add(AddRequest(name, list(prompt), params, 0.0, **kw))

    def step(self) -> None:
        for output in self.core.step():
            outcome = self.outcomes[output.request_id]
            assert outcome.finish_reason is None, f"{output.request_id} goes on after its end"
            if isinstance(output, RequestFailed):
                outcome.finish_reason, outcome.error = "error", output.message
                continue
            outcome.token_ids += output.token_ids
            outcome.logprobs += output.logprobs or []
            outcome.prompt_logprobs = output.prompt_logprobs or outcome.prompt_logprobs
            outcome.finish_reason = output.finish_reason
            outcome.num_cached_tokens = output.num_cached_tokens
            outcome.num_preemptions = output.num_preemptions

    def run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> list[list[int]]:
        """Serve all prompts at once and check that nothing leaks."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        names = [f"q{len(self.outcomes) + i}" for i in range(len(prompts))]
        for name, prompt, p in zip(names, prompts, each):
            self.add(name, prompt, p)
        while self.core.has_work:
            self.step()
        self.blocks.check_invariants()
        stats = self.core.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        return [self.outcomes[name].token_ids for name in names]


def stub_engine(device: str = "cpu", num_blocks: int = 200, broken_token: int = -1, **kw) -> Engine:
    rows = kw.setdefault("max_num_seqs", 64)
    runner = stub_runner(StubModel(device, broken_token), num_blocks=num_blocks, max_num_seqs=rows, context_tokens=128)
    return Engine(Executor(runner, ParallelContext.single()), num_blocks=num_blocks, **kw)


def prompts_of(count: int, seed: int = 0, shared: int = 0, longest: int = 260) -> list[list[int]]:
    """Random prompts of mixed lengths; the first `shared` tokens are the same in all."""
    rng = random.Random(seed)
    head = [rng.randrange(2, VOCAB) for _ in range(shared)]
    return [head + [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest - shared))] for _ in range(count)]


PROMPTS = prompts_of(12, shared=130, longest=200)
WANT = [StubModel().expected_greedy(prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]

FEATURES = {
    "plain": {"prefix_cache": False},
    "prefix cache": {},
    "one at a time": {"prefix_cache": False, "max_num_seqs": 1},
    "chunks of 1": {"prefix_cache": False, "prefill_chunk": 1},
    "chunks of 50": {"prefix_cache": False, "prefill_chunk": 50},
    "chunks of 64 with prefix cache": {"prefill_chunk": 64},
    "small budget": {"max_num_batched_tokens": 33},
    "preemption": {"num_blocks": 9, "prefix_cache": False},
    "preemption with prefix cache": {"num_blocks": 9},
    "priority": {"policy": "priority"},
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("reference_operations")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_leave_greedy_tokens_as_they_were(features: dict, asynchronous: bool, device: str) -> None:
    engine = stub_engine(device, asynchronous=asynchronous, **features)
    assert engine.run(PROMPTS) == WANT
    outcomes = engine.outcomes.values()
    assert all(outcome.finish_reason == "length" for outcome in outcomes)
    if features.get("num_blocks"):
        assert sum(outcome.num_preemptions for outcome in outcomes) > 0
    if features.get("prefix_cache", True):
        assert engine.run(PROMPTS) == WANT  # all prompts are cached now
        assert sum(outcome.num_cached_tokens for outcome in outcomes) > 128 * len(PROMPTS)


KINDS = [
    {}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}, {"frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"repetition_penalty": 1.4, "top_k": 20}, {"logit_bias": {7: 3.0}}, {"allowed_token_ids": list(range(10, 30))},
]  # fmt: skip


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_seeded_sampling_does_not_depend_on_batch_chunks_or_preemption(asynchronous: bool) -> None:
    """Report P11: a seed gives the same tokens alone, among others, in chunks, after a preemption and after a restart."""
    params = [
        SamplingParams(seed=i // len(KINDS), max_tokens=30, ignore_eos=True, **{"temperature": 4.0, **KINDS[i % len(KINDS)]})
        for i in range(18)
    ]
    prompts = prompts_of(18, seed=5)
    want = stub_engine(prefix_cache=False).run(prompts, params)
    alone = [stub_engine(prefix_cache=False).run([prompt], p)[0] for prompt, p in zip(prompts, params)]
    assert want == alone
    assert len({tuple(tokens) for tokens in want}) == 18
    for features in ({"prefill_chunk": 17}, {"num_blocks": 9}, {"max_num_seqs": 3}):
        engine = stub_engine(asynchronous=asynchronous, **features)
        assert engine.run(prompts, params) == want, features
        assert "num_blocks" not in features or sum(o.num_preemptions for o in engine.outcomes.values()) > 0
    again = prompts[0]
    twice = stub_engine(asynchronous=asynchronous).run([again, again], [SamplingParams(seed=1), SamplingParams(seed=2)])
    assert twice[0] != twice[1]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_stops_and_limits_end_at_the_right_token(asynchronous: bool) -> None:
    """Stop ids, the end of sequence, min_tokens and max_tokens, also when a step runs ahead of the host."""
    prompt = prompts_of(1, seed=9)[0]
    free = StubModel().expected_greedy(prompt, 40)
    at = next(i for i in range(5, 40) if free[i] not in free[:i])
    stop = free[at]

    def outcome(**kw) -> Outcome:
        eos = kw.pop("eos", [])
        engine = stub_engine(asynchronous=asynchronous)
        engine.add("a", prompt, SamplingParams(temperature=0.0, **{"max_tokens": 40, **kw}), eos_token_ids=eos)
        engine.add("b", prompt, msgspec.structs.replace(GREEDY, max_tokens=40))
        while engine.core.has_work:
            engine.step()
        assert engine.outcomes["b"].token_ids == free
        return engine.outcomes["a"]

    assert outcome(stop_token_ids=[stop]).token_ids == free[: at + 1]
    ended = outcome(eos=[stop])
    assert ended.token_ids == free[: at + 1] and ended.finish_reason == "stop"
    assert outcome(eos=[stop], ignore_eos=True).token_ids == free
    assert outcome(max_tokens=at).token_ids == free[:at]
    barred = outcome(eos=[stop], min_tokens=at + 5)
    assert stop not in barred.token_ids[: at + 5] and len(barred.token_ids) >= at + 5 and barred.token_ids[:at] == free[:at]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_broken_row_fails_alone(asynchronous: bool) -> None:
    """Report P07: NaN logits end their own request with an error; its neighbours get the tokens they would have got."""
    engine = stub_engine(asynchronous=asynchronous, broken_token=0)
    good = prompts_of(6, seed=2)
    engine.run([*good[:3], [5, 0, 6], *good[3:]])
    outcomes = list(engine.outcomes.values())
    assert outcomes[3].finish_reason == "error" and outcomes[3].error and outcomes[3].token_ids == []
    want = [StubModel(broken_token=0).expected_greedy(prompt, 25) for prompt in good]
    assert [o.token_ids for o in outcomes[:3] + outcomes[4:]] == want


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_aborts_leave_the_others_and_nothing_behind(asynchronous: bool) -> None:
    engine = stub_engine(asynchronous=asynchronous, max_num_seqs=8)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt)
    rng = random.Random(1)
    aborted = set()
    while engine.core.has_work:
        engine.step()
        name = str(rng.randrange(len(PROMPTS)))
        if rng.random() < 0.2 and engine.outcomes[name].finish_reason is None:
            output = engine.core.abort(name)
            assert output is not None and output.finish_reason == "abort"
            engine.outcomes[name].finish_reason = "abort"
            aborted.add(name)
        engine.blocks.check_invariants()
    assert 3 < len(aborted) < len(PROMPTS) - 3
    for i in range(len(PROMPTS)):
        tokens = engine.outcomes[str(i)].token_ids
        assert tokens == (WANT[i] if str(i) not in aborted else WANT[i][: len(tokens)])
    stats = engine.core.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


@pytest.mark.parametrize("features", [{}, {"prefill_chunk": 30}, {"num_blocks": 9}, {"max_num_batched_tokens": 40}])
def test_prompt_logprobs_are_complete_whatever_the_chunks(features: dict) -> None:
    """Every prompt token but the first is scored once, also when its prefix is cached or its prefill was preempted."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    engine = stub_engine(asynchronous=True, **features)
    prompts = prompts_of(8, seed=4, shared=100)
    for _ in range(2):
        tokens = engine.run(prompts, params)
    for prompt, got, outcome in zip(prompts, tokens, list(engine.outcomes.values())[len(prompts) :]):
        exact = StubModel().expected_logits(prompt + got).double().log_softmax(-1)
        entries = outcome.prompt_logprobs
        assert entries is not None and entries[0] is None
        scored = [entry for entry in entries[1:] if entry is not None] + outcome.logprobs
        assert [entry.token_id for entry in scored] == (prompt + got)[1:]
        values = torch.tensor([entry.logprob for entry in scored], dtype=torch.float64)
        want = exact[:-1].gather(1, torch.tensor((prompt + got)[1:])[:, None])[:, 0]
        torch.testing.assert_close(values, want, atol=1e-4, rtol=0)


# ---- real models: tiny checkpoints in published layout, tokens and logits by transformers


@functools.cache
def worker(variant: str, cache_format: str, num_blocks: int = 300, max_num_seqs: int = 64) -> tuple[Executor, WorkerInfo]:
    """Built once: between tests its tables are empty, whatever the cache still holds."""
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs)
    return build_worker(
        EngineConfig(
            model=str(reference_checkpoint(variant)), device="cpu", cache_format=cache_format, num_cache_blocks=num_blocks,
            max_model_len=1024, scheduler=scheduler,
        ),
        ParallelContext.single(),
    )  # fmt: skip


def model_engine(variant: str, cache_format: str, num_blocks: int = 300, **kw) -> Engine:
    """An engine that uses `num_blocks` of the worker's 300 blocks."""
    executor, info = worker(variant, cache_format)
    return Engine(
        executor, vocab_size=info.model_config.vocab_size, max_model_len=info.max_model_len, num_blocks=num_blocks,
        **{"max_num_seqs": 64, **kw},
    )  # fmt: skip


MODEL_FEATURES = {
    "prefix cache": {},
    "one at a time": {"prefix_cache": False, "max_num_seqs": 1},
    "chunks of 64": {"prefix_cache": False, "prefill_chunk": 64},
    "chunks of 17 with prefix cache": {"prefill_chunk": 17},
    "preemption": {"num_blocks": 8},
    "async": {"asynchronous": True},
    "async preemption": {"asynchronous": True, "num_blocks": 8, "prefix_cache": False},
}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("features", MODEL_FEATURES.values(), ids=MODEL_FEATURES)
@pytest.mark.parametrize("variant", ["deepseek_v3-tiny", "longcat_flash-tiny"])
def test_models_give_the_reference_s_tokens_with_every_feature(variant: str, features: dict) -> None:
    """FP32 and the exact cache: every token equals transformers', which knows none of the features."""
    refs = references(variant) * (3 if "num_blocks" in features else 1)
    engine = model_engine(variant, "fp32", **features)
    for _ in range(1 + features.get("prefix_cache", True)):  # the second time from the prefix cache
        for ref, got in zip(refs, engine.run([ref.prompt for ref in refs], greedy(64))):
            assert_same_tokens(got, ref.generated, label=f"prompt of {len(ref.prompt)}: ")
    outcomes = list(engine.outcomes.values())
    assert not features.get("num_blocks") or sum(o.num_preemptions for o in outcomes) > 0
    assert not features.get("prefix_cache", True) or outcomes[-1].num_cached_tokens >= 256


@pytest.mark.parametrize("variant", ["deepseek_v3-tiny", "longcat_flash-tiny"])
def test_a_batch_of_64_gives_the_tokens_of_a_batch_of_one(variant: str) -> None:
    """Report P09: the same prompts alone and among 63 others, all decoding at once."""
    refs = [ref for ref in references(variant) if len(ref.prompt) < 200]
    batch = [refs[i % len(refs)] for i in range(64)]
    got = model_engine(variant, "fp32", prefix_cache=False).run([ref.prompt for ref in batch], greedy(24))
    for tokens, ref in zip(got, batch):
        assert_same_tokens(tokens, ref.generated[:24], label=f"prompt of {len(ref.prompt)}: ")


def test_identical_concurrent_runs_repeat_to_the_bit() -> None:
    """Report P10: five runs of 44 sampled sequences give one result on a CPU; no batch-invariant mode is advertised."""
    short = [ref for ref in references("deepseek_v3-tiny") if len(ref.prompt) < 100]
    prompts = [short[i % len(short)].prompt for i in range(44)]
    params = [SamplingParams(seed=i, max_tokens=6, ignore_eos=True, logprobs=0) for i in range(44)]

    def run() -> list[tuple[int, float]]:
        engine = model_engine("deepseek_v3-tiny", "fp32", prefix_cache=False)
        engine.run(prompts, params)
        return [(entry.token_id, entry.logprob) for o in engine.outcomes.values() for entry in o.logprobs]

    first = run()
    assert all(run() == first for _ in range(4))
    assert not {"batch_invariant", "deterministic"} & {f.name for f in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_seeded_sampling_of_a_model_does_not_depend_on_its_neighbours(asynchronous: bool) -> None:
    """Report P11: one seed, the same text alone, in a batch, and in chunks with preemptions."""
    refs = references("deepseek_v3-tiny")
    params = [SamplingParams(seed=i, max_tokens=24, temperature=0.8, top_p=0.95, ignore_eos=True) for i in range(len(refs))]
    prompts = [ref.prompt for ref in refs]
    alone = [model_engine("deepseek_v3-tiny", "fp32").run([prompt], p)[0] for prompt, p in zip(prompts, params)]
    for features in ({}, {"prefill_chunk": 33, "num_blocks": 9}):
        assert model_engine("deepseek_v3-tiny", "fp32", asynchronous=asynchronous, **features).run(prompts, params) == alone


FP8_TOKENS = 32


def forced_logits(variant: str, cache_format: str, ref: Reference, chunk: int) -> torch.Tensor:
    """Logits FP32 [FP8_TOKENS, vocab] while the reference's own tokens are fed one by one, the prompt in chunks before."""
    driver = Driver(worker(variant, cache_format)[0]._runner)
    recorded: list[torch.Tensor] = []
    compute = driver.runner.model.logits
    driver.runner.model.logits = lambda hidden: recorded.append(compute(hidden)) or recorded[-1]  # type: ignore[method-assign,func-returns-value]
    try:
        driver.start(0, len(ref.prompt))
        for at in range(0, len(ref.prompt), chunk):
            part = ref.prompt[at : at + chunk]
            driver.run(prefills=[driver.step_of(0, part, sample=at + chunk >= len(ref.prompt))])
        for token in ref.generated[: FP8_TOKENS - 1]:
            driver.run([driver.step_of(0, [token])])
        driver.free(0)
        driver.run()
    finally:
        driver.runner.model.logits = compute  # type: ignore[method-assign]
    return torch.cat(recorded)


@pytest.mark.parametrize("variant", ["deepseek_v3-slim", "longcat_flash-slim"])
def test_fp8_cache_is_bounded_and_its_tokens_are_explained(variant: str) -> None:
    """Decision 9: tokens equal the exact ones up to the first whose top-2 gap the noise measured there can flip.

    Random routers are full of near-ties, so the noise has a long tail: it is measured per position, teacher-forced.
    """
    ref = references(variant)[-1]
    exact = ref.logits[len(ref.prompt) - 1 : -1][:FP8_TOKENS]
    gaps = top2_gaps(exact)
    assert float((forced_logits(variant, "fp32", ref, 64) - exact).abs().max()) < 1e-4 * ref.logit_range
    errors = [forced_logits(variant, "fp8", ref, chunk) - exact for chunk in (64, 1000)]
    assert all(0 < float(error.pow(2).mean().sqrt()) < 0.03 * ref.logit_range for error in errors)
    noise = torch.stack(errors).abs().amax((0, 2)).tolist()
    relative = [gap / most for gap, most in zip(gaps, noise)]
    for features in ({}, {"prefill_chunk": 64, "num_blocks": 8}, {"asynchronous": True, "prefix_cache": False}):
        for tokens in model_engine(variant, "fp8", **features).run([ref.prompt] * 2, greedy(FP8_TOKENS)):
            assert_same_tokens(tokens, ref.generated[:FP8_TOKENS], gaps=relative, noise=1.0, label=f"{features}: ")
