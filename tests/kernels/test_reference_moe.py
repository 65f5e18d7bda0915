"""Dense products, routing and the grouped expert MLP against plain loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import ops
from kernels.errors import KernelContractError
from kernels.layout import FP8, BlockScaledWeight


def block_scaled(*shape: int) -> BlockScaledWeight:
    blocks = shape[:-2] + tuple(-(-n // 128) for n in shape[-2:])
    data = (torch.randn(shape) * 100).clamp(-448, 448).to(FP8)
    return BlockScaledWeight(data, torch.rand(blocks) * 0.01 + 0.001)


def test_partial_blocks_use_their_own_scale() -> None:
    """Report L08: dimensions that are no multiple of 128 (576 rows, 200 columns)."""
    weight = block_scaled(576, 200)
    want = torch.empty(576, 200)
    for i in range(576):
        for j in (0, 127, 128, 199):
            want[i, j] = float(weight.data[i, j]) * float(weight.scale[i // 128, j // 128])
    got = weight.dequantize()
    for j in (0, 127, 128, 199):
        assert torch.equal(got[:, j], want[:, j])


def test_fp8_linear_quantizes_activations_per_token_and_128_channels() -> None:
    weight, x = block_scaled(130, 300), torch.randn(5, 300)
    x[0] = 0.0
    groups = F.pad(x, (0, 84)).view(5, 3, 128)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    rounded = ((groups / scale).to(FP8).float() * scale).view(5, 384)[:, :300]
    want = rounded.double() @ weight.dequantize().double().T
    got = ops.linear(x, weight)
    assert torch.allclose(got.double(), want, atol=1e-4) and (got[0] == 0).all()
    exact = x.double() @ weight.dequantize().double().T
    assert 0 < float((got - exact).norm() / exact.norm()) < 0.04
    assert ops.linear(x.bfloat16(), weight).dtype is torch.bfloat16


def choices(logits, bias, **kwargs):
    """{expert: weight} of each row."""
    weights, ids = ops.route(logits, bias, **kwargs)
    assert weights.dtype is torch.float32 and ids.dtype is torch.int32
    return [dict(zip(i, w)) for i, w in zip(ids.tolist(), weights.tolist())]


def test_route_v3() -> None:
    """Groups by the sum of their two best biased scores; the bias selects and never weighs; negative scores may win."""
    logits, bias = torch.randn(20, 16), torch.randn(16) * 2 - 1
    got = choices(
        logits, bias, scoring="sigmoid", top_k=3, num_groups=4, top_groups=2, normalize=True, scaling_factor=2.5
    )  # fmt: skip
    for row in range(20):
        s = logits[row].sigmoid()
        c = s + bias
        groups = sorted(range(4), key=lambda g: -float(c[4 * g : 4 * g + 4].topk(2).values.sum()))[:2]
        best = sorted((e for g in groups for e in range(4 * g, 4 * g + 4)), key=lambda e: -float(c[e]))[:3]
        total = sum(float(s[e]) for e in best)
        assert got[row] == pytest.approx({e: 2.5 * float(s[e]) / total for e in best})


def test_route_v2() -> None:
    """Groups by their maximum, weights unnormalised."""
    logits = torch.randn(20, 12)
    got = choices(
        logits, None, scoring="softmax", top_k=2, num_groups=3, top_groups=1, normalize=False, scaling_factor=16.0
    )  # fmt: skip
    for row in range(20):
        s = logits[row].softmax(-1)
        group = int(s.argmax()) // 4
        best = sorted(range(4 * group, 4 * group + 4), key=lambda e: -float(s[e]))[:2]
        assert got[row] == pytest.approx({e: 16 * float(s[e]) for e in best})


def test_route_longcat() -> None:
    """Report C03: logits and bias span real and zero experts alike."""
    logits, bias = torch.randn(10, 12), torch.randn(12) * 0.1
    got = choices(
        logits, bias, scoring="softmax", top_k=4, num_groups=1, top_groups=1, normalize=False, scaling_factor=6.0
    )  # fmt: skip
    for row in range(10):
        s = logits[row].softmax(-1)
        best = (s + bias).topk(4).indices.tolist()
        assert got[row] == pytest.approx({e: 6 * float(s[e]) for e in best})
    with pytest.raises(ValueError, match="bias"):
        choices(logits, bias[:8], scoring="softmax", top_k=4, num_groups=1, top_groups=1, normalize=False, scaling_factor=6.0)


def plain_experts(x, weights, ids, gate_up, down, first):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for w, e in zip(weights[t].tolist(), ids[t].tolist()):
            if first <= e < first + gate_up.shape[0]:
                gate, up = (x[t].double() @ gate_up[e - first].double().T).chunk(2)
                out[t] += w * ((F.silu(gate) * up) @ down[e - first].double().T)
    return out


@pytest.mark.parametrize("tokens", [1, 7])
def test_grouped_mlp_ignores_ids_that_are_not_local(tokens) -> None:
    """Reports N22, C02: remote, zero-computation and masked ids (-1 included) contribute nothing."""
    gate_up, down = torch.randn(3, 10, 8), torch.randn(3, 8, 5)
    x, weights = torch.randn(tokens, 8), torch.rand(tokens, 4)
    ids = torch.randint(-1, 12, (tokens, 4), dtype=torch.int32)
    ids[0] = torch.tensor([-1, 4, 11, 6], dtype=torch.int32)
    got = ops.grouped_mlp(x, weights, ids, gate_up, down, first_expert=4)
    assert torch.allclose(got.double(), plain_experts(x, weights, ids, gate_up, down, 4), atol=1e-4)
    nobody = torch.full_like(ids, -1)
    assert (ops.grouped_mlp(x, weights, nobody, gate_up, down, first_expert=4) == 0).all()
    assert ops.grouped_mlp(x[:0], weights[:0], ids[:0], gate_up, down, first_expert=4).shape == (0, 8)


def test_grouped_mlp_rows_do_not_touch_each_other() -> None:
    """Report N05: a padded row full of NaN, routed nowhere, leaves the others as they are."""
    gate_up, down = torch.randn(3, 10, 8), torch.randn(3, 8, 5)
    x, weights = torch.randn(4, 8), torch.rand(4, 2)
    ids = torch.tensor([[0, 1], [-1, -1], [2, 0], [1, 2]], dtype=torch.int32)
    want = ops.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    x[1] = float("nan")
    got = ops.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    assert torch.equal(got, want)


def test_grouped_mlp_fp8() -> None:
    gate_up, down = block_scaled(3, 256, 200), block_scaled(3, 200, 128)
    x, weights = torch.randn(6, 200), torch.rand(6, 2)
    ids = torch.randint(0, 3, (6, 2), dtype=torch.int32)
    got = ops.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    want = plain_experts(x, weights, ids, gate_up.dequantize(), down.dequantize(), 0)
    assert float((got - want).norm() / want.norm()) < 0.05


def test_rows_of_each_expert_are_counted() -> None:
    """Remote, zero-computation and masked experts count nowhere; counters go on from call to call."""
    gate_up, down, load = torch.randn(4, 32, 16), torch.randn(4, 16, 16), torch.zeros(4, dtype=torch.int64)
    ids = torch.tensor([[2, 3, 9], [5, 2, -1], [6, 40, 5]], dtype=torch.int32)
    for calls in (1, 2):
        ops.grouped_mlp(torch.randn(3, 16), torch.rand(3, 3), ids, gate_up, down, first_expert=2, load=load)
        assert load.tolist() == [2 * calls, calls, 0, 2 * calls]
    with pytest.raises(KernelContractError, match=r"load must be contiguous int64 \[4\]"):
        ops.grouped_mlp(torch.randn(3, 16), torch.rand(3, 3), ids, gate_up, down, first_expert=2, load=load.int())
