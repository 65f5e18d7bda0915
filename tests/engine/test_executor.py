"""Plans reach followers, replicas agree on a step, and "auto" resolves as documented. No process groups: threads stand in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import executor as executor_module
from engine import worker
from engine.block_manager import BlockManager
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.executor import Executor
from engine.kv_cache import KVCache, bytes_per_token, num_blocks_for
from engine.messages import AddRequest
from engine.plan import NewSequence, SequenceStep, StepPlan
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.worker import build_worker, resolve_cache_format, resolve_dtype, resolve_max_model_len
from kernels.layout import CacheFormat
from models.config import load_model_config
from models.parallel import ParallelContext
from tests.engine.stub_model import StubModel, stub_config, stub_runner
from tests.reference_checkpoints import reference_checkpoint

CPU = torch.device("cpu")


@dataclass
class Meeting:
    """Where `size` threads exchange one value each, in the order of their ranks."""

    size: int
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size, timeout=30)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self._barrier.wait()
        everything = [self.values[r] for r in range(self.size)]
        self._barrier.wait()
        return everything


@dataclass
class ThreadedParallel:
    """The collectives the executor and the runner use, over threads."""

    dp: int
    tp: int
    dp_rank: int
    tp_rank: int
    replica: Meeting
    leaders: Meeting

    def leaders_all_gather(self, values: list[int]) -> list[list[int]]:
        return self.leaders.exchange(self.dp_rank, values)

    def tp_broadcast_bytes(self, payload: bytes | None) -> bytes:
        return self.replica.exchange(self.tp_rank, payload)[0]

    def tp_broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.replica.exchange(self.tp_rank, x)[0])


def ranks(dp: int, tp: int) -> list[list[Executor]]:
    leaders = Meeting(dp)
    found = []
    for d in range(dp):
        replica = Meeting(tp)
        found.append([])
        for t in range(tp):
            runner = stub_runner(StubModel())
            runner.parallel = ThreadedParallel(dp, tp, d, t, replica, leaders)  # type: ignore[assignment]
            runner._leads = t == 0
            found[-1].append(Executor(runner, runner.parallel))
    return found


def in_threads(*jobs: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


TEXT = list(range(2, 32))


def first_plan() -> StepPlan:
    new = NewSequence(2, "r", SamplingParams(temperature=0.9, seed=4), len(TEXT))
    return StepPlan(0, prefills=[SequenceStep(2, 0, TEXT, [5])], new_sequences=[new])


def test_followers_hold_the_leader_s_tokens_until_it_stops() -> None:
    ((leader, *followers),) = ranks(1, 3)
    got: list[list[int]] = []

    def lead() -> None:
        leader.submit(first_plan())
        for step in range(1, 5):
            leader.submit(StepPlan(step, decodes=[SequenceStep(2, len(TEXT) + step - 1)]))
            got.append(leader.collect().rows[0].token_ids)
        got.append(leader.collect().rows[0].token_ids)
        leader.request_stop()

    in_threads(lead, *(follower.follow for follower in followers))
    assert len(got) == 5 and len({tokens[0] for tokens in got}) > 1
    for executor in (leader, *followers):
        assert executor.agreement.stop
        assert int(executor._runner._last_tokens[2]) == got[-1][0]
        content = executor._runner.cache.layers[0].content[5]
        assert torch.equal(content[: len(TEXT) + 4], leader._runner.cache.layers[0].content[5][: len(TEXT) + 4])


def test_an_idle_replica_steps_along_and_all_stop_together() -> None:
    busy, idle = (executors[0] for executors in ranks(2, 1))
    agreed: list[tuple[int, bool, bool, bool]] = []

    def work() -> None:
        for plan in (first_plan(), StepPlan(1, decodes=[SequenceStep(2, len(TEXT))]), StepPlan(2), StepPlan(3)):
            busy.submit(plan)
            a = busy.agreement
            agreed.append((a.rows, a.decode_only, a.any_work, a.stop))
            assert len(busy.collect().rows) == (not plan.is_empty)

    def wait() -> None:
        for step in range(4):
            if step == 3:
                idle.request_stop()
            idle.submit(StepPlan(step))
            assert idle.collect().rows == []

    in_threads(work, wait)
    assert agreed == [(30, False, True, False), (1, True, True, False), (0, True, False, False), (0, True, False, True)]
    assert idle.agreement == busy.agreement


# ---- what "auto" becomes


def config(**kw: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(reference_checkpoint("deepseek_v3-tiny")), "device": "cpu", **kw})


def test_auto_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    snap, odd = stub_config(kv_lora_rank=512, qk_rope_head_dim=64), stub_config()
    cuda = torch.device("cuda", 0)
    assert resolve_dtype(config(), CPU) is torch.float32 and resolve_dtype(config(), cuda) is torch.bfloat16
    assert resolve_dtype(config(dtype="bfloat16"), CPU) is torch.bfloat16

    def cache(model: Any, device: torch.device, capability: tuple[int, int] = (9, 0), **kw: Any) -> CacheFormat:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        c = config(**kw)
        return resolve_cache_format(c, model, device, resolve_dtype(c, device))

    assert cache(snap, cuda) is CacheFormat.FP8
    assert cache(snap, cuda, (8, 0)) is CacheFormat.BF16
    assert cache(odd, cuda) is CacheFormat.BF16
    assert cache(snap, CPU) is CacheFormat.FP32
    assert cache(snap, CPU, dtype="bfloat16") is CacheFormat.BF16
    assert cache(snap, CPU, cache_format="fp8") is CacheFormat.FP8
    monkeypatch.setattr(worker, "_demo_folder", lambda: Path(config().model))
    assert cache(snap, CPU) is CacheFormat.FP8 and cache(odd, CPU) is CacheFormat.FP32


def test_limits_are_named_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    for kw, words in (
        (dict(max_model_len=1 << 20), "max_model_len: the model's positions end at"),
        (dict(model="/nowhere/at/all"), "no such folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_worker(config(**kw), ParallelContext.single())
    with pytest.raises(ConfigError, match="tp: 4 heads cannot be split over 3"):
        build_worker(config(), replace(ParallelContext.single(), tp=3))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device: cuda is not available"):
            build_worker(config(device="cuda"), ParallelContext.single())
    assert resolve_max_model_len(config(max_model_len=77), stub_config()) == 77


def test_cache_sizing() -> None:
    """One function says what a token costs; a cache that cannot hold two blocks is refused with the fix."""
    snap = stub_config(kv_lora_rank=512, qk_rope_head_dim=64, num_attention_layers=61)
    assert bytes_per_token(snap, CacheFormat.FP8) == 61 * 644 and bytes_per_token(snap, CacheFormat.BF16) == 61 * 1152
    assert bytes_per_token(snap, CacheFormat.FP8, num_speculative_tokens=2) == 62 * 644
    cache = KVCache.allocate(replace(snap, num_attention_layers=2), CacheFormat.FP8, 3, CPU)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.content, layer.rope, layer.scale) if t is not None)
    assert held == 4 * 64 * 2 * 644 and cache.null_block == 3
    assert num_blocks_for(1000, 10, most=10**9) == 99 and num_blocks_for(1000, 10, most=7) == 7
    with pytest.raises(ConfigError, match="raise cache_memory_bytes"):
        num_blocks_for(19, 10, most=7)
    with pytest.raises(ConfigError, match="cache_format: the fp8 cache needs kv_lora_rank 512"):
        KVCache.allocate(stub_config(), CacheFormat.FP8, 3, CPU)


def test_a_worker_has_the_cache_it_was_asked_for() -> None:
    scheduler = SchedulerConfig(max_num_seqs=4)
    built, info = build_worker(
        config(cache_memory_bytes=1 << 22, max_model_len=256, scheduler=scheduler), ParallelContext.single()
    )
    per_block = 64 * bytes_per_token(info.model_config, CacheFormat.FP32)
    assert info.cache_format == "fp32" and info.device == "cpu" and info.dtype == "float32" and not info.asynchronous
    assert info.num_blocks == min((1 << 22) // per_block - 1, 4 * 4 * 4) == built._runner.cache.num_blocks
    assert build_worker(config(num_cache_blocks=9), ParallelContext.single())[1].num_blocks == 9


def test_drafts_take_from_the_pool_and_what_a_start_says_brings_it_back() -> None:
    """Report O02: with the draft layer on, a cache of equal bytes has fewer blocks; a sum below zero is refused, never rounded
    up. Report O03: the pool's own figures, given as options, make the same pool."""
    memory = 1 << 22

    def blocks(**options: Any) -> int:
        scheduler = SchedulerConfig(max_num_seqs=64)
        return build_worker(config(**options, max_model_len=1024, scheduler=scheduler), ParallelContext.single())[1].num_blocks

    plain, drafting = blocks(cache_memory_bytes=memory), blocks(cache_memory_bytes=memory, num_speculative_tokens=1)
    model = load_model_config(Path(config().model))
    per_block = 64 * bytes_per_token(model, CacheFormat.FP32)
    with_drafts = 64 * bytes_per_token(model, CacheFormat.FP32, 1)
    assert (plain, drafting) == (memory // per_block - 1, memory // with_drafts - 1) and drafting < plain
    assert blocks(num_cache_blocks=plain) == blocks(cache_memory_bytes=(plain + 1) * per_block) == plain
    with pytest.raises(ConfigError, match="the cache has 0 bytes"):
        num_blocks_for(-(35 << 30), per_block, most=10**9)


def test_the_largest_step_runs_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report N13: sizing the cache runs a step with the whole budget of tokens, every row and a full piece of context, so
    that the first long prompt meets no kernel and no shape that never ran. Here a CPU stands in for the device."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 7)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 12)
    plans: list[StepPlan] = []

    class Runner:
        device = CPU

        def run(self, plan: StepPlan) -> Runner:
            plans.append(plan)
            return self

        def wait(self) -> None:
            """Nothing ran."""

    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=60)
    assert worker._activation_bytes(Runner(), config(scheduler=scheduler), max_model_len=32768) == 5  # type: ignore[arg-type]
    (plan,) = plans
    assert plan.num_tokens >= 8192 and len(plan.prefills) == 60 and all(step.sample for step in plan.prefills)
    assert max(step.num_computed for step in plan.prefills) == worker.CONTEXT_TOKENS


def test_every_replica_spends_a_budget_of_its_own() -> None:
    """Report D15: the step's agreement opens prefill for all replicas at once; no budget is shared out among them."""
    leaders = [replica[0] for replica in ranks(2, 1)]
    schedulers = [
        Scheduler(
            SchedulerConfig(max_num_batched_tokens=256), BlockManager(400, False), max_model_len=1024, vocab_size=50, dp_rank=r
        )
        for r in range(2)
    ]
    for scheduler in schedulers:
        for i in range(4):
            scheduler.add(AddRequest(str(i), [2 + (i + j) % 40 for j in range(600)], SamplingParams(max_tokens=1), 0.0))
    plans = [scheduler.schedule(prefill=True) for scheduler in schedulers]
    in_threads(*(lambda leader=leader, plan=plan: leader.submit(plan) for leader, plan in zip(leaders, plans)))  # type: ignore[misc]
    for leader, plan in zip(leaders, plans):
        assert sum(step.num_tokens for step in plan.prefills) == 256
        assert leader.agreement.rows == 256 and not leader.agreement.decode_only


def test_rows_of_experts_reach_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt and output token that was computed counts once for each of its experts, in every layer; what sizing and
    graphs ran does not. A reading is due after some seconds, and is taken once."""
    monkeypatch.setattr(executor_module, "_COUNTING_SECONDS", 0.0)
    parallel = ParallelContext.single()
    settings = config(max_model_len=256, num_cache_blocks=20)
    executor, info = build_worker(settings, parallel)
    core, moe = worker.assemble_core(settings, executor, info, parallel), info.model_config.moe
    assert moe is not None and executor.take_expert_load() is None
    core.add(AddRequest("r", list(range(2, 32)), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), 0.0))
    while core.has_work:
        core.step()
    counts = executor.take_expert_load()
    assert counts is not None and executor.take_expert_load() is None
    assert [len(row) for row in counts] == [moe.num_experts] * (info.model_config.num_decoder_layers - moe.first_dense_layers)
    assert {sum(row) for row in counts} == {(30 + 4) * moe.top_k}, "the last token is sampled, not computed"


def test_one_clock_decides_when_experts_are_counted() -> None:
    """All ranks put their counters together after the same step, when the first replica's leader wants them."""
    replicas = ranks(2, 2)
    asked: list[tuple[int, int]] = []
    for replica in replicas:
        for rank in replica:
            place = rank._parallel.dp_rank, rank._parallel.tp_rank
            rank._parallel.rank = 2 * place[0] + place[1]  # type: ignore[misc]
            rank._runner.expert_load = lambda place=place: asked.append(place)  # type: ignore[assignment, misc]
            rank._count_after = float("inf") if place != (1, 0) else 0.0

    def lead(replica: int) -> None:
        leader = replicas[replica][0]
        for step in range(3):
            if (replica, step) == (0, 1):
                leader._count_after = 0.0
            leader.submit(first_plan() if step == 0 else StepPlan(step, decodes=[SequenceStep(2, len(TEXT) + step - 1)]))
            assert leader.agreement.count_experts == (step == 1)
        leader.request_stop()
        leader.submit(StepPlan(3))

    followers = [rank.follow for replica in replicas for rank in replica[1:]]
    in_threads(lambda: lead(0), lambda: lead(1), *followers)
    assert sorted(asked) == [(0, 0), (0, 1), (1, 0), (1, 1)]
