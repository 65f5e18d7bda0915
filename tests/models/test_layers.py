"""Absorbed against expanded attention, and the MoE layer's zero experts, padding and shared expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernels.layout import CacheFormat
from models.causal_lm import load_model
from models.config import ModelConfig, load_model_config
from models.layers.mlp import MLP
from models.layers.moe import MoE
from models.layers.rope import rope_table
from models.parallel import ParallelContext
from models.weights import RandomSource, Weights
from tests.models.driver import Driver
from tests.reference_checkpoints import reference_checkpoint, references


@pytest.mark.parametrize("variant", ["deepseek_v3-slim", "deepseek_v2-tiny", "longcat_flash-tiny"])
def test_absorbed_equals_expanded(variant) -> None:
    """Every token once as a decode row and once as a prefill row; also several query rows a sequence at a time."""
    folder = reference_checkpoint(variant)
    config = load_model_config(folder)
    model = load_model(folder, config, ParallelContext.single(), device="cpu", dtype=torch.float32, max_model_len=512)
    ids = references(variant)[-1].ids[:70]
    expanded = Driver(model, config, fmt=CacheFormat.FP32).step(prefills={0: ids})
    for rows in (1, 4):
        driver = Driver(model, config, fmt=CacheFormat.FP32)
        driver.step(prefills={0: ids[:2]})
        absorbed = torch.cat([driver.step(decodes={0: ids[i : i + rows]}) for i in range(2, 70, rows)])
        assert float((absorbed - expanded[2:]).abs().max()) < 2e-4 * float(expanded.abs().max())


def test_nothing_scales_the_residual() -> None:
    """Report N20: with layers that add nothing, the embedding arrives unchanged, however many dense layers there are."""
    config = load_model_config(reference_checkpoint("deepseek_v3-tiny"))
    assert config.moe is not None
    for dense in (1, 3):
        config = replace(
            config, num_decoder_layers=4, num_attention_layers=4, moe=replace(config.moe, first_dense_layers=dense)
        )
        model = load_model(
            Path(), config, ParallelContext.single(), device="cpu", dtype=torch.float32, load_format="dummy", max_model_len=64
        )
        assert sum(isinstance(layer.mlp, MLP) for layer in model.layers) == dense
        for layer in model.layers:
            layer.attention.o_proj.zero_()
            for mlp in (layer.mlp, getattr(layer.mlp, "shared", None)):
                if mlp is not None:
                    mlp.down.zero_()
        got = Driver(model, config, fmt=CacheFormat.FP32).step(prefills={0: [3, 1, 4]})
        assert torch.equal(got, model.norm(model.embedding(torch.tensor([3, 1, 4]))))


def moe_layer(variant: str) -> tuple[MoE, ModelConfig]:
    config = load_model_config(reference_checkpoint(variant))
    weights = Weights(RandomSource(fp8=False), torch.device("cpu"), torch.float32, keep_fp8=False, prefix="moe.")
    return MoE(weights, config.moe, config.hidden_size, ParallelContext.single(), router="r", bias="r.bias"), config


def batch_of(rows: int, row_mask: torch.Tensor | None = None):
    """The parts of a ForwardBatch that a MoE layer reads."""
    config = load_model_config(reference_checkpoint("deepseek_v3-tiny"))
    model = load_model(
        reference_checkpoint("deepseek_v3-tiny"), config, ParallelContext.single(), device="cpu", dtype=torch.float32, max_model_len=64
    )  # fmt: skip
    return replace(Driver(model, config).batch({}, {0: [1] * rows}), row_mask=row_mask)


def test_zero_experts_return_the_token_and_real_experts_keep_their_own_weight() -> None:
    """Reports C02, C04, C05: y = sum of real experts by their weights + the zero experts' weights times the token."""
    moe, config = moe_layer("longcat_flash-tiny")
    x = torch.randn(40, config.hidden_size)
    routing = moe.route(x)
    weights, ids = routing.weights, routing.ids
    real = ids < config.moe.num_experts
    assert 0.1 < float((~real).float().mean()) < 0.9, "the case needs both kinds"
    want = torch.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(weights[t], ids[t].tolist()):
            if e >= config.moe.num_experts:
                want[t] += w * x[t]
            else:
                gate, up = (moe.gate_up[e] @ x[t]).chunk(2)
                want[t] += w * (moe.down[e] @ (F.silu(gate) * up))
    assert torch.allclose(moe(x, batch_of(40)), want, atol=1e-4)


def test_padded_rows_reach_no_expert() -> None:
    """Reports N05, N16: rows outside the mask may hold NaN; the others keep their values."""
    for variant in ("deepseek_v3-tiny", "longcat_flash-tiny"):
        moe, config = moe_layer(variant)
        x = torch.randn(6, config.hidden_size)
        want = moe(x, batch_of(6))
        mask = torch.tensor([True, True, False, True, False, True])
        x[~mask] = float("nan")
        got = moe(x, batch_of(6, mask))
        assert torch.allclose(got[mask], want[mask], atol=1e-5)


def test_rope_table_without_yarn_is_the_plain_formula() -> None:
    config = load_model_config(reference_checkpoint("longcat_flash-tiny"))
    table = rope_table(config.rope, 16, 100, "cpu").double()
    for position in (0, 7, 99):
        for pair in range(8):
            angle = torch.tensor(position * config.rope.theta ** (-2 * pair / 16), dtype=torch.float64)
            assert torch.allclose(table[position, [pair, 8 + pair]], torch.stack((angle.cos(), angle.sin())), atol=1e-5)


def test_yarn_slows_only_slow_dimensions() -> None:
    config = load_model_config(reference_checkpoint("deepseek_v3-slim"))
    yarn = rope_table(config.rope, 64, 2, "cpu")[1]
    plain = rope_table(replace(config.rope, yarn=None), 64, 2, "cpu")[1]
    turn = torch.atan2(yarn[32:], yarn[:32]) / torch.atan2(plain[32:], plain[:32])
    assert torch.allclose(turn[:8], torch.ones(8), atol=1e-3)
    assert torch.allclose(turn[-4:], torch.full((4,), 1 / 40), rtol=1e-2)
    assert (turn.diff() < 1e-3).all()
