"""The planner against known sizes of the published models, and against the tensors of a model that is really built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.capacity import describe, main, plan_capacity, weight_bytes
from engine.config import ParallelConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.hub import resolve_model
from models.config import load_model_config, translate_config

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ATTENTION = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_nextn_predict_layers": 1, "quantization_config": FP8,
}  # fmt: skip
DEEPSEEK_V31: dict[str, Any] = ATTENTION | {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
}  # fmt: skip
LONGCAT: dict[str, Any] = ATTENTION | {
    "architectures": ["LongcatFlashForCausalLM"], "vocab_size": 131072, "hidden_size": 6144, "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048, "num_layers": 28, "num_attention_heads": 64, "n_routed_experts": 512,
    "zero_expert_num": 256, "moe_topk": 12, "routed_scaling_factor": 6.0, "max_position_embeddings": 131072,
}  # fmt: skip


def plan(raw: dict[str, Any], dp: int, tp: int, **options: Any) -> Any:
    options = {"context": 131072, "device_bytes": 150 * 10**9} | options
    return plan_capacity(translate_config(raw), ParallelConfig(dp, tp), SchedulerConfig(), **options)


@pytest.mark.parametrize(
    ("raw", "dp", "tp", "gigabytes"),
    [(DEEPSEEK_V31, 8, 1, 102), (DEEPSEEK_V31, 4, 2, 92), (DEEPSEEK_V31, 1, 8, 84), (LONGCAT, 8, 1, 89)],
)
def test_published_models(raw: dict[str, Any], dp: int, tp: int, gigabytes: float) -> None:
    """Weights of a rank on eight GPUs, by hand-made estimates; 644 and 1,152 cache bytes per token and attention layer."""
    found = plan(raw, dp, tp)
    assert found.total_weight_bytes / 1e9 == pytest.approx(gigabytes, abs=2)
    layers = 61 if raw is DEEPSEEK_V31 else 56
    assert [cache.bytes_per_token for cache in found.caches] == [644 * layers, 1152 * layers]
    for cache in found.caches:
        assert (cache.num_blocks + 1) * 64 * cache.bytes_per_token <= found.cache_bytes
        assert cache.sequences_per_replica == cache.num_blocks // 2048
    assert f"{found.caches[0].sequences_per_replica * dp:,}" in describe(found)


def test_the_draft_head_costs_weights_and_cache() -> None:
    without, with_draft = plan(DEEPSEEK_V31, 8, 1), plan(DEEPSEEK_V31, 8, 1, num_speculative_tokens=1)
    assert with_draft.weight_bytes["draft head"] > 1e9
    assert with_draft.caches[0].bytes_per_token == without.caches[0].bytes_per_token + 644


def test_weights_equal_those_of_a_model_that_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model, loaded for real on one rank; a CPU holds no FP8, so the plan is taken without quantization too."""
    # A CPU without BF16 instructions keeps W_UK and W_UV in FP32; the plan is a GPU's.
    monkeypatch.setattr("models.layers.mla.product_dtype", lambda weight: weight.dtype)
    from models.causal_lm import load_model
    from models.parallel import ParallelContext

    folder = resolve_model("demo")
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    planned = weight_bytes(translate_config(raw), ParallelConfig(), with_mtp=False)
    config = load_model_config(folder)
    model = load_model(
        folder, config, ParallelContext.single(), device="cpu", dtype=torch.bfloat16, max_model_len=1, progress=lambda *_: None
    )
    storages: dict[int, int] = {}
    _collect(model, storages, set())
    assert sum(planned.values()) == sum(storages.values())


def _collect(value: Any, storages: dict[int, int], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, storages, seen)
    elif hasattr(value, "__dict__") and id(value) not in seen:
        seen.add(id(value))
        for item in vars(value).values():
            _collect(item, storages, seen)


def test_what_does_not_fit_is_said() -> None:
    small = plan(LONGCAT, 8, 1, device_bytes=80 * 10**9)
    assert small.caches[0].sequences_per_replica == 0 and "does not fit" in describe(small)
    with pytest.raises(ConfigError, match="positions end at 131072"):
        plan(LONGCAT, 8, 1, context=200_000)
    with pytest.raises(ConfigError, match="heads cannot be split"):
        plan(LONGCAT, 1, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "4", "--dp", "8"], "make them equal"),
        (["--dp", "0"], "dp"),
        (["--tp", "3"], "heads cannot be split"),
        (["--context", "999999999"], "positions end"),
        (["--memory-fraction", "0"], "memory-fraction"),
        (["--gpu-gib", "inf"], "gpu-gib"),
        (["--num-speculative-tokens", "9"], "num-speculative-tokens: must lie in 0..3, got 9"),
        (["--num-speculative-tokens", "-1"], "num-speculative-tokens: must lie in 0..3, got -1"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_unknown_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report C07: an architecture this engine does not have is refused by its name, from config.json alone."""
    (tmp_path / "config.json").write_text('{"architectures": ["LongcatTwoForCausalLM"], "model_type": null}')
    assert main([str(tmp_path / "config.json")]) == 2
    assert "LongcatTwoForCausalLM" in capsys.readouterr().err


def test_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--context", "1024"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["caches"][0]["format"] == "fp8" and printed["context"] == 1024
