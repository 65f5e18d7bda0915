"""Expert choice and the grouped expert MLP on Hopper, against the reference backend."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cuda import gemm, moe
from kernels.errors import KernelContractError
from kernels.layout import FP8, Activation, BlockScaledWeight, Routing, Weight
from kernels.reference import moe as reference
from kernels.reference.elementwise import silu_and_mul
from kernels.reference.linear import linear
from models.layers.expert_dispatch import ExpertDispatch
from models.parallel import ParallelContext
from tests.kernels.poison import poison_free_memory
from tests.kernels.test_cuda_gemm import worst_row_error

pytestmark = pytest.mark.hopper

V3 = {"scoring": "sigmoid", "top_k": 8, "num_groups": 8, "top_groups": 4, "normalize": True, "scaling_factor": 2.5}
KIMI = {"scoring": "sigmoid", "top_k": 8, "num_groups": 1, "top_groups": 1, "normalize": True, "scaling_factor": 2.827}
V2 = {"scoring": "softmax", "top_k": 6, "num_groups": 8, "top_groups": 3, "normalize": False, "scaling_factor": 16.0}
LITE = {"scoring": "softmax", "top_k": 6, "num_groups": 1, "top_groups": 1, "normalize": False, "scaling_factor": 1.0}
LONGCAT = {"scoring": "softmax", "top_k": 12, "num_groups": 1, "top_groups": 1, "normalize": False, "scaling_factor": 6.0}


def experts(count: int, n: int, k: int, quantized: bool = True) -> Weight:
    real = torch.randn(count, n, k, device="cuda") / k**0.5
    if not quantized:
        return real.bfloat16()
    data = (real * 128).clamp(-448, 448).to(FP8)
    scale = torch.rand(count, -(-n // 128), -(-k // 128), device="cuda").add(0.5) / 128
    return BlockScaledWeight(data, scale)


def check(y: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """exact: BF16 throughout. Otherwise the inner row is quantized from a BF16 product whose last bit the FP8 tensor core's
    14 bits decide: about 1 % of the inner codes move by one step, 1 % of a row's norm and 3 to 5 % at worst. A wrong row or
    scale gives errors near 1."""
    error = (y.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1).clamp_min(1e-30)
    assert not error.isnan().any()
    if error.numel():
        assert float(error.max()) < (1e-2 if exact else 8e-2)
        assert float(error.mean()) < (5e-3 if exact else 2e-2)


def choices(tokens: int, top_k: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, total, device="cuda").topk(top_k, dim=-1).indices.int()
    return torch.rand(tokens, top_k, device="cuda"), ids


# ---- router -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 17, 65])
@pytest.mark.parametrize(
    ("count", "biased", "kind"),
    [
        (256, True, V3),
        (384, True, KIMI),
        (160, False, V2),
        (64, False, LITE),
        (768, True, LONGCAT),
        (40, True, {**V3, "num_groups": 10, "top_groups": 3}),
    ],
)
def test_route_matches_the_reference(tokens: int, count: int, biased: bool, kind: dict) -> None:
    logits = torch.randn(tokens, count, device="cuda") * 2
    bias = torch.randn(count, device="cuda") * 0.1 if biased else None
    poison_free_memory()
    weights, ids = moe.route(logits, bias, **kind)
    expected_weights, expected_ids = reference.route(logits, bias, **kind)
    got, order = ids.sort(dim=-1)
    expected, expected_order = expected_ids.sort(dim=-1)
    assert torch.equal(got, expected)
    torch.testing.assert_close(weights.gather(-1, order), expected_weights.gather(-1, expected_order), rtol=1e-5, atol=1e-7)


def test_route_prefers_the_lower_id_and_survives_nan() -> None:
    """Reports N05, N16: a padded row may hold NaN; it gets real ids and leaves its neighbours alone."""
    logits = torch.zeros(3, 256, device="cuda")
    logits[1] = float("nan")
    weights, ids = moe.route(logits, torch.zeros(256, device="cuda"), **V3)
    assert ids[0].tolist() == ids[2].tolist() == list(range(8))
    assert sorted(ids[1].tolist()) == sorted(set(ids[1].tolist())) and ids[1].min() >= 0 and ids[1].max() < 256
    assert torch.equal(weights[0], weights[2]) and not weights[0].isnan().any()


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 64, 128, 129])
@pytest.mark.parametrize(
    ("count", "width", "kind"),
    [(256, 7168, V3), (384, 7168, KIMI), (768, 6144, LONGCAT), (40, 96, {**V3, "num_groups": 10}), (44, 64, LITE)],
)
def test_choices_of_rows_are_those_of_their_logits(tokens: int, count: int, width: int, kind: dict) -> None:
    """Report N16: top-k masks padding. Few rows take the router kernel, whose parts the choice adds up; a router of 44 or 129
    rows take another."""
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    router, bias = torch.randn(count, width, device="cuda").bfloat16(), torch.randn(count, device="cuda") * 0.1
    live = torch.rand(tokens, device="cuda") < 0.8
    exact = (x.double() @ router.double().t()).float()
    poison_free_memory()
    parts = moe._router_parts(x, router)
    assert parts.shape[0] == (4 if count != 44 and tokens <= 128 else 1)
    assert worst_row_error(parts.sum(dim=0), exact.double()) < 2e-5
    routing = moe.choose_experts(x, router, bias, live, **kind)
    weights, ids = moe.route(parts.sum(dim=0), bias, **kind)
    assert (routing.ids[~live] == -1).all() and (routing.weights[~live] == 0).all()
    assert torch.equal(routing.ids[live], ids[live])  # the parts are added in one order everywhere
    torch.testing.assert_close(routing.weights[live], weights[live], rtol=1e-5, atol=1e-7)
    same = reference.route(exact, bias, **kind)[1].sort(dim=-1).values == ids.sort(dim=-1).values
    assert float(same.float().mean()) > 0.98  # neighbours within rounding may change places
    alone = moe.choose_experts(x[:1], router, bias, **kind)
    if tokens <= 128:
        assert not live[0] or torch.equal(alone.packed, routing.packed[:1])


# ---- grouped MLP ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 65, 200, 1100])
@pytest.mark.parametrize(("hidden", "inner"), [(512, 256), (1040, 192)])
@pytest.mark.parametrize("kinds", [(True, True), (False, False), (True, False)])
def test_grouped_mlp_matches_the_reference(tokens: int, hidden: int, inner: int, kinds: tuple[bool, bool]) -> None:
    """Report N22, C02: remote and zero-computation experts, ids out of range and -1 among the choices.

    Sixteen of 48 experts are local; 192 puts the border of gate and up inside a 128 block.
    """
    gate_up, down = experts(16, 2 * inner, hidden, kinds[0]), experts(16, hidden, inner, kinds[1])
    weights, ids = choices(tokens, 6, 48)
    ids[torch.rand(tokens, 6, device="cuda") < 0.2] = -1
    packed = Routing.of(weights, ids)  # side by side, as they come from the router
    weights, ids = packed.weights, packed.ids
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    expected = reference.grouped_mlp(x, weights, ids, gate_up, down, first_expert=16)
    poison_free_memory()
    y = moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=16)
    none_local = ((ids < 16) | (ids >= 32)).all(dim=-1)
    assert (y[none_local] == 0).all()
    check(y[~none_local], expected[~none_local], exact=kinds == (False, False))


@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(2049, 512, 256), (5000, 1040, 192), (3000, 640, 1024)])
@pytest.mark.parametrize("most", [1500, 73728])
def test_tokens_of_prompts_match_the_reference(
    tokens: int, hidden: int, inner: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports N12, N22: the products bound by arithmetic, in one pass and in several; experts with many rows, with few and
    with none; ids out of range and -1; rows from BF16 and as they travel."""
    monkeypatch.setattr(moe, "_MOST_ROWS", most)
    gate_up, down = experts(16, 2 * inner, hidden), experts(16, hidden, inner)
    weights, ids = choices(tokens, 6, 48)
    ids[torch.rand(tokens, 6, device="cuda") < 0.2] = -1
    ids[ids == 20] = 21
    ids[(ids == 30) & (torch.arange(tokens, device="cuda")[:, None] > 40)] = 3
    packed = Routing.of(weights, ids)
    weights, ids = packed.weights, packed.ids
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    expected = reference.grouped_mlp(x, weights, ids, gate_up, down, first_expert=16)
    none_local = ((ids < 16) | (ids >= 32)).all(dim=-1)
    load = torch.zeros(16, dtype=torch.int64, device="cuda")
    for rows in (x, Activation(gemm.quantize_1x128(x), None, torch.bfloat16)):
        poison_free_memory()
        y = moe.grouped_mlp(rows, weights, ids, gate_up, down, first_expert=16, load=load)
        assert (y[none_local] == 0).all()
        check(y[~none_local], expected[~none_local], exact=False)
    assert torch.equal(load, 2 * torch.bincount(ids[(ids >= 16) & (ids < 32)].long() - 16, minlength=16))


def test_tokens_of_prompts_to_one_expert_and_to_none() -> None:
    gate_up, down = experts(64, 512, 1024), experts(64, 1024, 256)
    x = torch.randn(2300, 1024, device="cuda").bfloat16()
    ids = torch.full((2300, 2), -1, dtype=torch.int32, device="cuda")
    weights = torch.rand(2300, 2, device="cuda")
    poison_free_memory()
    assert (moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0) == 0).all()
    ids[:, 1] = 41
    expected = reference.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    poison_free_memory()
    y = moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    check(y, expected, exact=False)
    assert torch.equal(y, moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0))


@pytest.mark.parametrize("tokens", [1, 70, 300])
def test_all_tokens_to_one_expert(tokens: int) -> None:
    gate_up, down = experts(64, 512, 1024), experts(64, 1024, 256)
    x = torch.randn(tokens, 1024, device="cuda").bfloat16()
    ids = torch.full((tokens, 2), -1, dtype=torch.int32, device="cuda")
    ids[:, 1] = 41
    weights = torch.rand(tokens, 2, device="cuda")
    expected = reference.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    poison_free_memory()
    y = moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    check(y, expected, exact=False)


def test_nobody_is_local() -> None:
    x = torch.randn(9, 512, device="cuda").bfloat16()
    ids = torch.full((9, 4), 2**31 - 1, dtype=torch.int32, device="cuda")
    ids[::2] = -(2**31)
    poison_free_memory()
    y = moe.grouped_mlp(x, torch.ones(9, 4, device="cuda"), ids, experts(4, 512, 512), experts(4, 512, 256), first_expert=7)
    assert (y == 0).all()
    assert moe.grouped_mlp(
        x[:0], torch.ones(0, 4, device="cuda"), ids[:0], experts(4, 512, 512), experts(4, 512, 256), first_expert=0
    ).shape == (0, 512)


def test_a_token_does_not_depend_on_its_batch_or_on_nan_beside_it() -> None:
    """Reports N05, N16: padded rows of NaN that kept their choices."""
    gate_up, down = experts(8, 512, 512), experts(8, 512, 256)
    x = torch.randn(40, 512, device="cuda").bfloat16()
    weights, ids = choices(40, 3, 8)
    together = moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    x[1::2] = float("nan")
    beside_nan = moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    assert worst_row_error(beside_nan[::2], together[::2].double()) < 2e-3
    again = moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    assert torch.equal(again[::2], beside_nan[::2])


def test_more_pairs_than_one_pass_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report N12: the workspace is bounded and larger batches are cut, with the same result."""
    gate_up, down = experts(8, 512, 512), experts(8, 512, 256)
    x = torch.randn(100, 512, device="cuda").bfloat16()
    weights, ids = choices(100, 3, 8)
    whole = moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)
    monkeypatch.setattr(moe, "MAX_PAIRS", 64)
    assert worst_row_error(moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0), whole.double()) < 2e-3


@pytest.mark.parametrize(("quantized", "tokens"), [(True, 33), (False, 33), (True, 2100)])
def test_grouped_mlp_replays_in_a_graph_with_new_choices(quantized: bool, tokens: int) -> None:
    gate_up, down = experts(16, 768, 640, quantized), experts(16, 640, 384, quantized)
    x = torch.randn(tokens, 640, device="cuda").bfloat16()
    weights, ids = choices(tokens, 4, 20)

    def step() -> torch.Tensor:
        return moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for live in (tokens, 5, 0):
        x.copy_(torch.randn_like(x))
        ids.copy_(choices(tokens, 4, 20)[1])
        ids[live:] = -1
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, step())
        assert (y[live:] == 0).all()


def test_fp32_activations_agree_with_the_reference() -> None:
    gate_up, down = experts(8, 256, 256), experts(8, 256, 128)
    x = torch.randn(17, 256, device="cuda")
    weights, ids = choices(17, 3, 12)
    expected = reference.grouped_mlp(x, weights, ids, gate_up, down, first_expert=2)
    y = moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=2)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 128, 200])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 2048), (1040, 192)])
def test_gated_mlp_matches_its_three_steps(tokens: int, hidden: int, inner: int) -> None:
    gate_up, down = experts(1, 2 * inner, hidden), experts(1, hidden, inner)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    for kind in ("fp8", "bf16"):
        one = [BlockScaledWeight(w.data[0], w.scale[0]) for w in (gate_up, down)]
        weights = one if kind == "fp8" else [w.dequantize(torch.bfloat16) for w in one]
        expected = linear(silu_and_mul(linear(x, weights[0])), weights[1])
        poison_free_memory()
        check(moe.gated_mlp(x, *weights), expected, exact=kind == "bf16")


def test_unsupported_experts_are_refused_by_name() -> None:
    x = torch.randn(2, 512, device="cuda").bfloat16()
    weights, ids = choices(2, 2, 4)
    with pytest.raises(KernelContractError, match="BF16 or block-scaled FP8"):
        moe.grouped_mlp(x, weights, ids, experts(4, 512, 512, False).float(), experts(4, 512, 256), first_expert=0)
    with pytest.raises(KernelContractError, match="512 local experts"):
        moe.grouped_mlp(x, weights, ids, experts(513, 32, 512), experts(513, 512, 16), first_expert=0)
    with pytest.raises(KernelContractError, match="at most 1024 experts"):
        moe.route(torch.randn(2, 1025, device="cuda"), None, **LITE)
    assert gemm.TOKEN_TILES[-1] == 128


@pytest.mark.parametrize("rows", [1, 24, 200])
def test_rows_that_travelled_quantized_give_the_same_bits(rows: int) -> None:
    """Packed codes and scales as they arrive from other ranks, against the rows they were made from; some rows of zeros.

    An expert's rows lie in the order in which atomics came, and which of several tiles a row lies in decides how its sums are
    split. So two runs on equal rows may differ in last bits, except where every expert has one tile, as with 12 rows each.
    """
    width, inner, count = 640, 256, 8
    gate_up, down = experts(count, 2 * inner, width), experts(count, width, inner)
    x = torch.randn(rows, width, device="cuda") * torch.tensor([1.0, 0.0, 2e-5, 300.0], device="cuda").repeat(rows)[:rows, None]
    ids = (torch.arange(4 * rows, dtype=torch.int32, device="cuda") % (4 * count)).view(rows, 4)  # as many for each expert
    routing = Routing.of(torch.rand(rows, 4, device="cuda"), ids)
    outputs = []
    for fp8 in (True, False):
        dispatch = ExpertDispatch(ParallelContext.simulated(4, 1, fp8_dispatch=fp8), 4 * count, 4 * count)
        gathered = dispatch.gather(x.bfloat16(), routing)
        assert isinstance(gathered[0], torch.Tensor) != fp8
        outputs.append(ops.grouped_mlp(*gathered, gate_up, down, first_expert=0))
    assert bool((outputs[0] != 0).any())
    if rows <= 24:
        assert torch.equal(*outputs)
    # Inner rows of the tiny ones are made of zeros and the smallest code, so a last bit may be a tenth of such a row.
    loud = torch.arange(len(outputs[0]), device="cuda") % 4 != 2
    check(outputs[0][loud], outputs[1][loud], exact=False)


@pytest.mark.parametrize("tokens", [1, 70, 9000])  # the last in several passes
def test_rows_of_each_expert_are_counted(tokens: int) -> None:
    count, hidden, inner, top_k = 16, 256, 128, 8
    gate_up, down = experts(count, 2 * inner, hidden), experts(count, hidden, inner)
    weights, ids = choices(tokens, top_k, 48)
    ids[::7] = -1
    load = torch.zeros(count, dtype=torch.int64, device="cuda")
    want = torch.bincount(ids[(ids >= 16) & (ids < 32)].long() - 16, minlength=count)
    for calls, dtype in ((1, torch.bfloat16), (2, torch.bfloat16), (3, torch.float32)):
        x = torch.randn(tokens if dtype is torch.bfloat16 else min(tokens, 4), hidden, device="cuda", dtype=dtype)
        rows = slice(len(x))
        before = load.clone()
        ops.grouped_mlp(x, weights[rows], ids[rows], gate_up, down, first_expert=16, load=load)
        if dtype is torch.bfloat16:
            assert torch.equal(load, calls * want)
        else:
            own = ids[rows]
            assert int((load - before).sum()) == int(((own >= 16) & (own < 32)).sum())
