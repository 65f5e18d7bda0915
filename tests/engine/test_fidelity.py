"""The live fidelity probe: what it measures on a sound engine, that a broken scale shows, and that it changes no token."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from engine import worker
from engine.config import EngineConfig
from engine.core import FIDELITY_LIMIT
from engine.errors import ConfigError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.layout import CacheFormat
from tests.engine.fake_graphs import FakePool, pool

__all__ = ["pool"]  # a fixture

PROMPTS = [list(range(3, 3 + length)) for length in (5, 70, 130)]


pytestmark = pytest.mark.usefixtures("one_thread")


def demo(fraction: float, **options: Any) -> LLM:
    defaults = {"device": "cpu", "max_model_len": 256, "num_cache_blocks": 16}
    return LLM("demo", fidelity_fraction=fraction, **(defaults | options))


def generate(llm: LLM, tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


def test_sound_cache_is_close_in_every_layer() -> None:
    llm = demo(0.25)
    generate(llm, 13)  # one step of prefill, twelve of decode
    stats = llm.stats()
    assert stats.fidelity_steps == 3
    assert len(stats.fidelity_mean) == 4
    assert all(0.001 < mean <= worst < 0.2 for mean, worst in zip(stats.fidelity_mean, stats.fidelity_worst))


def test_exact_cache_has_no_error() -> None:
    llm = demo(1.0, cache_format="fp32")
    generate(llm, 4)
    assert max(llm.stats().fidelity_worst) < 1e-5


def test_tokens_do_not_change_and_off_compares_nothing() -> None:
    plain, probed = demo(0.0), demo(1.0)
    assert generate(plain, 8) == generate(probed, 8)
    assert plain.stats().fidelity_steps == 0
    assert probed.stats().fidelity_steps == 7


@pytest.mark.parametrize("drafts", [0, 2])
def test_follows_chunks_drafts_and_reused_rows(drafts: int) -> None:
    """Prompts in chunks of 32, more sequences than shadows, one after the other, and drafts that are rejected."""
    llm = demo(1.0, cache_format="fp32", prefill_chunk=32, max_num_seqs=2, num_speculative_tokens=drafts, prefix_cache=False)
    generate(llm, 12)
    generate(llm, 12)
    assert llm.stats().fidelity_steps > 10
    assert max(llm.stats().fidelity_worst) < 1e-5


@pytest.mark.parametrize(("drafts", "fmt"), [(0, "fp8"), (0, "fp32"), (2, "fp32")])
def test_comparing_steps_replay_graphs_of_their_own(drafts: int, fmt: str, pool: FakePool) -> None:
    """Of few sizes, padded where no size fits, and finding what eager steps find; with them no step of decode runs eagerly."""
    llm = demo(0.25, cache_format=fmt, num_speculative_tokens=drafts, max_num_seqs=5)
    runner = llm._core._executor._runner  # type: ignore[attr-defined]
    runner.capture_graphs(show_progress=False, sizes=[1, 2, 3, 4, 5])
    graphs = runner._graphs
    assert [key.size for key in graphs._graphs if key.compares and key.query_len == 1] == [5, 1]
    calls: list[int] = []
    eagerly = runner._run_eagerly
    runner._run_eagerly = lambda plan, sequences: calls.append(plan.num_lines) or eagerly(plan, sequences)
    before = {key: graph.replays for key, (graph, _) in graphs._graphs.items()}
    generate(llm, 13)
    compared = sum(graph.replays - before[key] for key, (graph, _) in graphs._graphs.items() if key.compares)
    stats = llm.stats()
    assert stats.fidelity_steps == compared > 0
    if fmt == "fp8":
        assert all(0.001 < mean <= worst < 0.2 for mean, worst in zip(stats.fidelity_mean, stats.fidelity_worst))
    else:
        assert max(stats.fidelity_worst) < 1e-5
    eager_passes = [tokens for tokens in calls if tokens > 15]
    assert eager_passes == [sum(map(len, PROMPTS))], "only the prompts"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.hopper)])
def test_broken_scale_reports(device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One layer stores scales 1.5 times too large, as a wrong unit in a kernel would: that layer, and only it, is reported.
    On a GPU by steps that replay graphs."""
    append = ops.append_kv
    llm = demo(1.0, device=device, cuda_graphs=False)
    runner = llm._core._executor._runner  # type: ignore[attr-defined]
    broken = runner.cache.layers[2]

    def append_with_broken_scale(cache: Any, *args: Any, **kwargs: Any) -> Any:
        kept = append(cache, *args, **kwargs)
        if cache is broken:
            slots, scale = args[5], cache.scale.view(-1)
            at = torch.where(slots >= 0, slots, len(scale) - 1)  # in the null block, which nobody reads
            scale.index_copy_(0, at, scale[at] * 1.5)
        return kept

    monkeypatch.setattr(ops, "append_kv", append_with_broken_scale)
    if device == "cuda":
        runner.capture_graphs(show_progress=False, sizes=[4])
    with caplog.at_level(logging.WARNING, logger="engine.core"):
        generate(llm, 4)
    worst = llm.stats().fidelity_worst
    assert worst[2] > FIDELITY_LIMIT
    assert max(worst[:2] + worst[3:]) < FIDELITY_LIMIT
    assert [record.getMessage() for record in caplog.records if "layer 2" in record.getMessage()]


def test_sequences_past_the_shadow_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.fidelity.MAX_TOKENS", 64)
    llm = demo(1.0, cache_format="fp32")
    generate(llm, 4)  # of 5, 70 and 130 prompt tokens only the first fits
    stats = llm.stats()
    assert stats.fidelity_steps == 3
    assert max(stats.fidelity_worst) < 1e-5


def test_a_batch_without_shadows_compares_nothing() -> None:
    """A cached beginning has no exact values; what earlier steps compared lies beyond this batch."""
    llm = demo(1.0)
    want = generate(llm, 4)[2]
    compared = llm.stats().fidelity_steps
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (again,) = llm.generate({"prompt_token_ids": PROMPTS[2]}, params, use_tqdm=False)
    assert again.num_cached_tokens == 128 and list(again.outputs[0].token_ids) == want
    assert llm.stats().fidelity_steps == compared


def test_the_step_that_sizes_the_cache_takes_no_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are never freed, so that a server of one sequence at a time would compare nothing."""
    monkeypatch.setattr(worker, "CPU_CACHE_BYTES", 0)
    monkeypatch.setattr(worker, "_free_bytes", lambda *_: 1 << 28)
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    llm = demo(1.0, num_cache_blocks=0, max_num_seqs=4, max_num_batched_tokens=64)
    for _ in range(2):
        llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert llm.stats().fidelity_steps == 6


def test_fraction_is_checked() -> None:
    with pytest.raises(ConfigError, match="fidelity_fraction"):
        EngineConfig(model="demo", fidelity_fraction=1.5)


@pytest.mark.hopper
def test_graphs_write_the_shadow_on_hopper() -> None:
    """Steps between two comparisons replay graphs; a shadow they did not write would be far off."""
    llm = LLM("demo", device="cuda", max_model_len=512, num_cache_blocks=64, max_num_seqs=4, fidelity_fraction=0.125)
    assert llm.info.cache_format == CacheFormat.FP8.value
    generate(llm, 65)
    stats = llm.stats()
    assert stats.fidelity_steps == 8
    assert all(0.001 < mean <= worst < 0.2 for mean, worst in zip(stats.fidelity_mean, stats.fidelity_worst))
