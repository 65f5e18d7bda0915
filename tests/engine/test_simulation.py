"""A simulated rank: the bytes of one rank of the deployment, the load its experts would see, shapes as if peers were there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.workloads import SHAPES
from engine.capacity import weight_bytes
from engine.config import EngineConfig, ParallelConfig
from engine.errors import ConfigError
from kernels import ops
from kernels.layout import CacheFormat, Routing
from models.causal_lm import load_model
from models.config import ModelConfig, load_model_config
from models.layers.expert_dispatch import ExpertDispatch
from models.parallel import ParallelContext
from tests.models.driver import Driver

TINY = {
    "num_hidden_layers": 2, "num_layers": 2, "hidden_size": 128, "intermediate_size": 256, "ffn_hidden_size": 256, "vocab_size": 251,
    "moe_intermediate_size": 128, "expert_ffn_hidden_size": 128, "num_attention_heads": 8, "n_routed_experts": 16, "zero_expert_num": 8,
    "first_k_dense_replace": 1, "q_lora_rank": 64, "max_position_embeddings": 4096,
}  # fmt: skip
WORLDS = [(8, 1), (4, 2), (1, 8)]


@pytest.fixture(params=["deepseek_v3.1", "longcat_flash"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    """A published configuration with small sizes; no FP8, which a CPU would dequantize."""
    raw = json.loads((SHAPES / request.param / "config.json").read_text())
    raw |= {name: value for name, value in TINY.items() if name in raw}
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return load_model_config(tmp_path)


def dummy_model(config: ModelConfig, parallel: ParallelContext, dtype: torch.dtype = torch.float32):
    return load_model(
        Path(), config, parallel, device="cpu", dtype=dtype, load_format="dummy", max_model_len=512, with_mtp=True
    )


def tensor_bytes(value: object, storages: dict[int, int], seen: set[int]) -> dict[int, int]:
    if isinstance(value, torch.Tensor):
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, list | tuple):
        for item in value:
            tensor_bytes(item, storages, seen)
    elif hasattr(value, "__dict__") and id(value) not in seen:
        seen.add(id(value))
        for item in vars(value).values():
            tensor_bytes(item, storages, seen)
    return storages


@pytest.mark.parametrize(("dp", "tp"), WORLDS)
def test_holds_what_the_capacity_plan_says_of_a_rank(
    tiny: ModelConfig, dp: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU without BF16 instructions keeps W_UK and W_UV in FP32; the plan is a GPU's.
    monkeypatch.setattr("models.layers.mla.product_dtype", lambda weight: weight.dtype)
    held = sum(tensor_bytes(dummy_model(tiny, ParallelContext.simulated(dp, tp), torch.bfloat16), {}, set()).values())
    table = 4 * 511 * tiny.qk_rope_head_dim  # the plan counts a RoPE table of one position
    assert held - table == sum(weight_bytes(tiny, ParallelConfig(dp, tp), with_mtp=True).values())
    assert held < sum(tensor_bytes(dummy_model(tiny, ParallelContext.single(), torch.bfloat16), {}, set()).values())


@pytest.mark.parametrize(("dp", "tp"), WORLDS)
def test_steps_have_the_shapes_of_the_deployment(tiny: ModelConfig, dp: int, tp: int) -> None:
    model = dummy_model(tiny, ParallelContext.simulated(dp, tp))
    driver = Driver(model, tiny, fmt=CacheFormat.FP32, ep_rows=11)
    assert driver.step(prefills={0: list(range(7)), 1: [5, 6]}).shape == (9, tiny.hidden_size)
    logits = model.logits(driver.step(decodes={0: [1], 1: [2]}))
    assert logits.shape == (2, tiny.vocab_size) and bool(logits.isfinite().all())


@pytest.mark.parametrize(("dp", "tp"), WORLDS)
def test_experts_get_their_share_of_every_rank_s_choices(
    tiny: ModelConfig, dp: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n rows a rank with K choices make n * K pairs for the experts of each of the ranks, whatever the router prefers."""
    model = dummy_model(tiny, ParallelContext.simulated(dp, tp))
    moe, world = tiny.moe, dp * tp
    assert moe is not None
    pairs: list[tuple[int, int]] = []
    original = ops.grouped_mlp

    def counted(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *experts: object, first_expert: int, load: object
    ) -> torch.Tensor:
        local = (ids >= first_expert) & (ids < first_expert + moe.num_experts // world)
        share = len(x) // world
        chosen = ids[:share]  # this rank's own choices
        pairs.append((int(local.sum()), int(((chosen >= 0) & (chosen < moe.num_experts)).sum())))
        return original(x, weights, ids, *experts, first_expert=first_expert, load=load)

    monkeypatch.setattr(ops, "grouped_mlp", counted)
    Driver(model, tiny, fmt=CacheFormat.FP32, ep_rows=16).step(prefills={0: list(range(16))})
    assert pairs and all(local == own > 0 for local, own in pairs)
    if not moe.num_zero_experts:
        assert all(local == 16 // tp * moe.top_k for local, _ in pairs)


def test_twins_choices_are_spread_over_the_same_experts() -> None:
    """Every choice meets this rank as the expert at its own place among the experts of its rank; padding reaches none."""
    parallel = ParallelContext.simulated(4, 2)
    ids = torch.randint(0, 40, (9, 6), dtype=torch.int32)  # 32 experts with weights, 8 without
    ids[3] = -1
    dispatch = ExpertDispatch(parallel, num_experts=32, num_choices=40)
    rows, weights, gathered = dispatch.gather(torch.randn(9, 5), Routing.of(torch.rand(9, 6), ids))
    assert rows.shape == (72, 5) and weights.shape == gathered.shape == (72, 6) and gathered.dtype is torch.int32
    own = ids[(ids >= 0) & (ids < 32)]
    assert Counter(gathered[(gathered >= 0) & (gathered < 4)].tolist()) == Counter((own % 4).tolist())
    assert bool((gathered.view(8, 9, 6)[:, 3] == -1).all())
    assert torch.equal(gathered.view(8, 9, 6)[0], ids)


def test_the_sum_over_twins_counts_every_choice_once(tiny: ModelConfig) -> None:
    """As one rank on which every expert has the weights of the simulated rank's expert at its place."""
    parallel, single = ParallelContext.simulated(8, 1), ParallelContext.single()
    small, whole = dummy_model(tiny, parallel), dummy_model(tiny, single)
    layer = 1
    a, b = (m.layers[layer].moe if tiny.family == "longcat" else m.layers[layer].mlp for m in (small, whole))
    b.gate_up, b.down = (w.repeat(8, 1, 1) for w in (a.gate_up, a.down))
    x = torch.randn(10, tiny.hidden_size)
    batch = replace(Driver(whole, tiny).batch({}, {0: [1] * 10}), ep_rows=10)
    assert torch.allclose(a(x, batch), b(x, batch), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simulate_world": "dp=8,tp=1,ep=8"}, "load_format dummy only"),
        ({"simulate_world": "dp=8,tp=1,ep=4", "load_format": "dummy"}, "all dp \\* tp = 8 ranks, got ep=4"),
        ({"simulate_world": "dp=8;tp=1", "load_format": "dummy"}, "expected dp=N"),
        ({"simulate_world": "dp=8,dp=8", "load_format": "dummy"}, "expected dp=N"),
        ({"simulate_world": "pp=2", "load_format": "dummy"}, "expected dp=N"),
        ({"simulate_world": "dp=0", "load_format": "dummy"}, "at least 1"),
        ({"simulate_world": "dp=2", "load_format": "dummy", "parallel": ParallelConfig(2, 1)}, "one process"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **options)


def test_every_answer_carries_the_label() -> None:
    config = EngineConfig(model="m", load_format="dummy", simulate_world="dp=4,tp=2,ep=8")
    assert config.simulated == ParallelConfig(4, 2)
    assert config.api_name == "simulated-rank-of-dp4-tp2:m"
    assert EngineConfig(model="m").api_name == "m" and EngineConfig(model="m").simulated is None
