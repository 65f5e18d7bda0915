"""The Hopper decode kernels against float64: every shape, every edge, both cache formats.

Tolerances. FP8: the output's relative L2 error is at most 1.1 times that of a float64 emulation that quantizes P alone
(1.2 times from 4k tokens on, for values of any mean). BF16: 0.0025.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels import ops
from kernels.errors import KernelContractError, KernelError
from kernels.layout import CacheFormat, LatentCache, LatentQuery
from tests.kernels import cases
from tests.kernels.cases import P_BLOCK, Problem, attend, lse_error, random_problem, relative_error

pytestmark = pytest.mark.hopper
FP8, BF16 = CacheFormat.FP8, CacheFormat.BF16
BOTH = pytest.mark.parametrize("fmt", [FP8, BF16], ids=["fp8", "bf16"])
BF16_LIMIT = 0.0025
# The FP8 tensor core cuts every QK product toward zero; 9e-4 of the LSE was measured with logits up to 36. Beside that an FP8
# sum is one of quantized weights, each of them off by at most 1/16, the largest of a block by nothing.
LSE_LIMIT = {FP8: 2e-3, BF16: 1e-4}
QUANTIZED_WEIGHT = 1 / 16


def decode(p: Problem, *, out_dtype: torch.dtype = torch.float32, invariant: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    _, s, h = p.shape
    plan = ops.plan_decode(p.seq_lens, query_len=s, num_heads=h, fmt=p.cache.format, batch_invariant=invariant)
    assert plan.partial_out is not None and plan.partial_lse is not None
    plan.partial_out.fill_(math.nan), plan.partial_lse.fill_(math.nan)
    return ops.mla_decode(
        p.query, p.cache, p.block_table, p.seq_lens, p.num_query,
        softmax_scale=p.softmax_scale, causal=p.causal, plan=plan, out_dtype=out_dtype,
    )  # fmt: skip


def check(p: Problem, factor: float = 1.1, *, invariant: bool = False, slack: float = 3e-4) -> float:
    """Decode and compare; returns the error. slack: accumulation and exponentials beside the quantization of P."""
    out, lse = decode(p, invariant=invariant)
    truth, true_lse = attend(p)
    error = relative_error(out, truth)
    if p.cache.format is FP8:
        emulated, emulated_lse = attend(p, p_block=P_BLOCK)
        allowed = factor * relative_error(emulated, truth) + slack
        check_fp8_lse(lse, emulated_lse, true_lse)
    else:
        allowed = BF16_LIMIT
        assert lse_error(lse, true_lse) <= LSE_LIMIT[BF16]
    assert error <= allowed, f"error {error:.5f}, allowed {allowed:.5f}"
    empty = true_lse == -math.inf
    assert bool((out[empty] == 0).all()), "a row without keys must be zero"
    return error


def check_fp8_lse(lse: torch.Tensor, emulated: torch.Tensor, truth: torch.Tensor) -> None:
    """Every row within what quantized weights allow; all rows together within 1.1 times what they do in the emulation."""
    rounding = LSE_LIMIT[FP8]
    assert lse_error(lse, truth) <= rounding + QUANTIZED_WEIGHT
    some = truth > -math.inf
    size = truth[some].abs().clamp(min=1.0)

    def rms(x: torch.Tensor) -> float:
        return float(((x.double() - truth)[some] / size).square().mean().sqrt()) if bool(some.any()) else 0.0

    assert rms(lse) <= 1.1 * rms(emulated) + rounding / 2, f"LSE off by {rms(lse):.5f}, emulated {rms(emulated):.5f}"


RAGGED = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, 4097]


@BOTH
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 48, 64, 100, 128])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4])
def test_ragged_batches_of_every_shape(fmt: CacheFormat, heads: int, query_len: int) -> None:
    """Reports K18, N06, N08, N14: every head count, lengths around block edges, causal rows at the tail."""
    check(random_problem(RAGGED, heads, query_len, fmt=fmt, seed=heads * 8 + query_len))


@BOTH
@pytest.mark.parametrize("causal", [True, False])
def test_sequences_with_fewer_query_rows(fmt: CacheFormat, causal: bool) -> None:
    """Report N15: num_query on the device, from none to all, beside short sequences."""
    lens = [0, 1, 2, 65, 65, 128, 130, 64, 300, 3]
    live = [0, 4, 3, 4, 1, 0, 2, 4, 3, 4]
    for heads in (8, 64, 128):
        check(random_problem(lens, heads, 4, fmt=fmt, num_query=live, causal=causal, seed=heads))


@BOTH
def test_bf16_output_is_the_rounded_fp32_output(fmt: CacheFormat) -> None:
    p = random_problem([130, 5000, 64], 128, fmt=fmt)
    assert torch.equal(decode(p, out_dtype=torch.bfloat16)[0], decode(p)[0].bfloat16())


@BOTH
@pytest.mark.parametrize(
    "lens",
    [
        [1],
        [64],
        [4096],
        [65536],
        [131072 + 7],
        [20000] * 3,
        [300] * 200,
        [90, 300, 129] * 100,
        [1024] * 32,
        [8000, 1, 0, 120000],
    ],
)
@pytest.mark.parametrize("heads", [16, 128])
def test_splits(fmt: CacheFormat, lens: list[int], heads: int) -> None:
    """From one piece of work to more pieces than CTAs."""
    check(random_problem(lens, heads, fmt=fmt, seed=len(lens)), 1.2)


def unsplit(p: Problem) -> Problem:
    """The first sequence of p, once for every CTA of the device, so that nobody splits it."""
    count = torch.cuda.get_device_properties(0).multi_processor_count

    def repeat(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[:1].expand(count, *x.shape[1:]).contiguous()

    query = LatentQuery(repeat(p.query.content), repeat(p.query.rope), repeat(p.query.scale))
    return replace(p, query=query, block_table=repeat(p.block_table), seq_lens=repeat(p.seq_lens))


@pytest.mark.parametrize("v_mean", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("length", [4096, 16384, 65536, 131072])
def test_error_does_not_grow_with_context(v_mean: float, length: int) -> None:
    """Reports K09, K10: values with a mean are what a coarse accumulator loses. One CTA walks the whole context; the bound
    falls with the context, and most with values that have a mean."""
    p = random_problem([length], 64, v_mean=v_mean, seed=length)
    truth = attend(p)[0]
    emulated = relative_error(attend(p, p_block=P_BLOCK)[0], truth)
    out = decode(unsplit(p))[0]
    for one in (out[:1], out[-1:]):
        error = relative_error(one, truth)
        print(f"length {length}, V mean {v_mean}: kernel {error:.5f}, emulated {emulated:.5f}, ratio {error / emulated:.2f}")
        assert error <= 1.2 * emulated


@BOTH
def test_rope_logits_thirty_times_the_content(fmt: CacheFormat) -> None:
    """Report K12: RoPE goes last in QK and is not quantized; content logits keep their precision beside it."""
    p = random_problem([700, 2000], 64, fmt=fmt, rope_gain=30.0, q_std=0.2)
    check(p, 1.1, slack=1e-3)


def test_sink_above_a_flat_context() -> None:
    """One token 13 nats above 128k flat ones, its value zero: small weights must survive P's scale."""
    length = 131072
    p = random_problem([length], 64, q_std=0.05, v_mean=0.5)
    sink = int(p.block_table[0, 0])
    direction = torch.sign(torch.randn(cases.ROPE, device="cuda"))
    q_rope = direction.expand(1, 1, 64, -1).clone()
    query = cases.store_query(p.query.content.float() * p.query.scale.unsqueeze(-1), q_rope, FP8)
    real_rope = p.cache.rope.float() * p.cache.scale.unsqueeze(-1) * 0.05
    real_content = p.cache.content.float() * p.cache.scale.unsqueeze(-1)
    real_rope[sink, 0] = direction * (13.0 / cases.SOFTMAX_SCALE / cases.ROPE)
    real_content[sink, 0] = 0.0
    check(replace(p, query=query, cache=cases.store_cache(real_content, real_rope, FP8)), 1.2, slack=1e-3)


@BOTH
@pytest.mark.parametrize("rising", [True, False])
def test_blocks_two_hundred_nats_apart(fmt: CacheFormat, rising: bool) -> None:
    """A block far below or far above its predecessor: no ratio of scales overflows, the rescale path is right."""
    p = random_problem([128 * 5 + 17], 64, fmt=fmt, q_std=0.3)
    scale = 1.0 if p.cache.scale is None else p.cache.scale.unsqueeze(-1)
    content, rope = p.cache.content.float() * scale, p.cache.rope.float() * scale
    direction = torch.ones(cases.ROPE, device="cuda")
    for j in range(p.block_table.shape[1]):
        nats = 200.0 * (j // 2 if rising else -(j // 2))
        rope[int(p.block_table[0, j])] += direction * (nats / cases.SOFTMAX_SCALE / cases.ROPE)
    q_scale = 1.0 if p.query.scale is None else p.query.scale.unsqueeze(-1)
    query = cases.store_query(p.query.content.float() * q_scale, direction.expand(1, 1, 64, -1), fmt)
    check(replace(p, query=query, cache=cases.store_cache(content, rope, fmt)), 1.1, slack=2e-3)


@BOTH
def test_gradual_rise_keeps_the_reference_exponent_in_range(fmt: CacheFormat) -> None:
    """Blocks that each rise by 30 nats: the lagging reference moves several times, never too late."""
    p = random_problem([128 * 20], 64, fmt=fmt, q_std=0.3)
    scale = 1.0 if p.cache.scale is None else p.cache.scale.unsqueeze(-1)
    content, rope = p.cache.content.float() * scale, p.cache.rope.float() * scale
    direction = torch.ones(cases.ROPE, device="cuda")
    for j in range(p.block_table.shape[1]):
        rope[int(p.block_table[0, j])] += direction * (30.0 * (j // 2) / cases.SOFTMAX_SCALE / cases.ROPE)
    q_scale = 1.0 if p.query.scale is None else p.query.scale.unsqueeze(-1)
    query = cases.store_query(p.query.content.float() * q_scale, direction.expand(1, 1, 64, -1), fmt)
    check(replace(p, query=query, cache=cases.store_cache(content, rope, fmt)), 1.1, slack=2e-3)


@BOTH
def test_strided_pool_and_blocks_at_its_end(fmt: CacheFormat) -> None:
    """Report K05: one layer of a pool that interleaves layers; the other layers hold NaN."""
    p = random_problem(RAGGED, 64, 2, fmt=fmt)
    dense = decode(p)
    interleaved = decode(replace(p, cache=cases.strided(p.cache)))
    assert torch.equal(dense[0], interleaved[0]) and torch.equal(dense[1], interleaved[1])


def test_pool_beyond_two_to_the_31_elements() -> None:
    """80,000 blocks of 32 KiB are 2.6 G elements: addresses need 64 bits."""
    blocks = 80_000
    cache = LatentCache(
        torch.empty(blocks, 64, 512, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn),
        torch.empty(blocks, 64, 64, dtype=torch.bfloat16, device="cuda"),
        torch.empty(blocks, 64, device="cuda"),
    )
    small = random_problem([500, 64], 64)
    where = torch.arange(blocks - small.cache.num_blocks, blocks, device="cuda")
    cache.content.view(torch.uint8)[where] = small.cache.content.view(torch.uint8)
    cache.rope[where], cache.scale[where] = small.cache.rope, small.cache.scale
    table = torch.where(small.block_table >= 0, small.block_table + int(where[0]), -1)
    big = decode(replace(small, cache=cache, block_table=table))
    plain = decode(small)
    assert torch.equal(big[0], plain[0]) and torch.equal(big[1], plain[1])


@BOTH
def test_block_order_aliases_and_sequence_order_do_not_matter(fmt: CacheFormat) -> None:
    """Two sequences may share blocks; a batch in another order gives each sequence the same values."""
    p = random_problem([512, 700, 256], 64, fmt=fmt)
    table = p.block_table.clone()
    table[2, :4] = table[0, :4]  # a shared prefix
    p = replace(p, block_table=table)
    check(p)
    order = torch.tensor([2, 0, 1], device="cuda")
    query = LatentQuery(*(None if x is None else x[order].contiguous() for x in (p.query.content, p.query.rope, p.query.scale)))
    moved = decode(replace(p, query=query, block_table=table[order].contiguous(), seq_lens=p.seq_lens[order].contiguous()))
    assert relative_error(moved[0], decode(p)[0][order].double()) < 0.01


@BOTH
def test_same_bits_every_time(fmt: CacheFormat) -> None:
    p = random_problem([3000, 120, 9000], 128, fmt=fmt)
    first = decode(p)
    for _ in range(5):
        again = decode(p)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@BOTH
def test_batch_invariant_rows_do_not_depend_on_the_batch(fmt: CacheFormat) -> None:
    p = random_problem([5000, 130, 40000, 64, 12345], 128, 2, fmt=fmt)
    together = decode(p, invariant=True)
    check(p, 1.2, invariant=True)
    for i in range(5):
        query = LatentQuery(
            *(None if x is None else x[i : i + 1].contiguous() for x in (p.query.content, p.query.rope, p.query.scale))
        )
        alone = decode(
            replace(p, query=query, block_table=p.block_table[i : i + 1], seq_lens=p.seq_lens[i : i + 1].contiguous()),
            invariant=True,
        )
        assert torch.equal(alone[0][0], together[0][i]) and torch.equal(alone[1][0], together[1][i])


@BOTH
def test_graph_replays_with_new_lengths_and_other_streams(fmt: CacheFormat) -> None:
    """Reports N07, N05: a captured step replays with fewer, shorter, empty and longer sequences."""
    p = random_problem([2000] * 8, 16, 2, fmt=fmt, table_width=40)
    lens = p.seq_lens.clone()
    live = torch.full((8,), 2, dtype=torch.int32, device="cuda")
    p = replace(p, seq_lens=lens, num_query=live)
    decode(p)  # loads the kernels
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            plan = ops.plan_decode(lens, query_len=2, num_heads=16, fmt=fmt)
            out, lse = ops.mla_decode(
                p.query, p.cache, p.block_table, lens, live,
                softmax_scale=p.softmax_scale, causal=True, plan=plan, out_dtype=torch.float32,
            )  # fmt: skip
    for new_lens, new_live in (
        ([2000] * 8, [2] * 8),
        ([0] * 8, [0] * 8),
        ([1, 0, 64, 65, 2000, 128, 1999, 0], [1, 0, 2, 2, 1, 2, 2, 0]),
        ([7] * 8, [2] * 8),
    ):
        lens.copy_(torch.tensor(new_lens)), live.copy_(torch.tensor(new_live))
        out.fill_(math.nan), lse.fill_(math.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        eager = decode(p)
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
        # Tails of shortened sequences hold real values here, so compare against float64 too.
        truth, true_lse = attend(p)
        assert relative_error(out, truth) < 0.03
        if fmt is FP8:
            check_fp8_lse(lse, attend(p, p_block=P_BLOCK)[1], true_lse)
        else:
            assert lse_error(lse, true_lse) < LSE_LIMIT[BF16]


def test_accuracy_against_unquantized_inputs() -> None:
    """Reports K11, K13: the two data sets of the comparison with other kernels, within 10 % of the emulated bands."""
    gen = torch.Generator(device="cuda").manual_seed(5)
    for name, low, high in (("normal", 0.028, 0.038), ("outlier", 0.081, 0.087), ("soft", 0.045, 0.053)):
        for length in (2048, 8192, 32768):
            heads, blocks = 128, length // 64
            content = torch.randn(blocks, 64, 512, device="cuda", generator=gen)
            rope = torch.randn(blocks, 64, 64, device="cuda", generator=gen)
            q_content = torch.randn(1, 1, heads, 512, device="cuda", generator=gen)
            q_rope = torch.randn(1, 1, heads, 64, device="cuda", generator=gen)
            scale = 1.0 / math.sqrt(576)
            if name != "normal":
                content *= torch.exp(
                    torch.empty(blocks, 64, 1, device="cuda").uniform_(math.log(0.1), math.log(3.0), generator=gen)
                )
                rope *= 2.0
                size = torch.tensor([100.0, 220.0, 460.0, 1000.0], device="cuda")
                rope[..., 5:9] = size * (1 + 0.05 * torch.randn(blocks, 64, 4, device="cuda", generator=gen))
                q_rope[..., 5:9] *= 1.0 / size * 6.0
                q_content, q_rope = q_content * 1.3, q_rope * 1.3
                if name == "soft":
                    q_content, q_rope = q_content * 0.35, q_rope * 0.35
            table = torch.randperm(blocks, device="cuda", generator=gen).int().view(1, -1)
            lens = torch.tensor([length], dtype=torch.int32, device="cuda")
            real = Problem(
                LatentQuery(q_content.double(), q_rope.double(), None), LatentCache(content.double(), rope.double(), None),
                table, lens, softmax_scale=scale,
            )  # fmt: skip
            stored = replace(real, query=cases.store_query(q_content, q_rope, FP8), cache=cases.store_cache(content, rope, FP8))
            truth = attend(real)[0]
            error = relative_error(decode(stored)[0], truth)
            emulated = relative_error(attend(stored, p_block=P_BLOCK)[0], truth)
            print(f"{name} {length}: kernel {error:.4f}, emulated {emulated:.4f}, band {low} to {high}")
            assert error <= 1.1 * emulated
            if name == "normal":
                assert error <= 1.1 * high


def test_an_accumulator_over_the_whole_context_would_be_caught() -> None:
    """The error test above has teeth: the same kernel with one FP8 accumulator fails it."""
    from kernels.cuda import binding, mla_decode

    print("relative error by context: two-level, single-level, emulated")
    single = binding.kernel("decode_fp8", "mla_decode_fp8", 0, (("PROMOTE_EVERY_BLOCK", 0),))
    usual = binding.kernel
    for length in (4096, 16384, 65536, 131072):
        p = random_problem([length], 64, v_mean=0.5, seed=length)
        truth, many = attend(p)[0], unsplit(p)
        good = relative_error(decode(many)[0][:1], truth)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mla_decode.binding, "kernel", lambda m, n, d: single if n == "mla_decode_fp8" else usual(m, n, d))
            bad = relative_error(decode(many)[0][:1], truth)
        print(f"{length:>7} {good:.5f} {bad:.5f} {relative_error(attend(p, p_block=P_BLOCK)[0], truth):.5f}")
    assert bad > 10 * good


# ---- bad input ----------------------------------------------------------------------------------------------------


def _arguments(p: Problem) -> dict:
    _, s, h = p.shape
    return {
        "query": p.query, "cache": p.cache, "block_table": p.block_table, "seq_lens": p.seq_lens, "softmax_scale": p.softmax_scale,
        "causal": True, "plan": ops.plan_decode(p.seq_lens, query_len=s, num_heads=h, fmt=p.cache.format), "out_dtype": torch.bfloat16,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda a: a | {"block_table": a["block_table"].long()}, "block_table"),
        (lambda a: a | {"block_table": a["block_table"].cpu()}, "block_table"),
        (lambda a: a | {"block_table": a["block_table"].t()}, "block_table"),
        (lambda a: a | {"seq_lens": a["seq_lens"].long()}, "seq_lens"),
        (lambda a: a | {"seq_lens": a["seq_lens"][:1]}, "seq_lens"),
        (lambda a: a | {"out_dtype": torch.float16}, "out_dtype"),
        (lambda a: a | {"softmax_scale": 0.0}, "softmax_scale"),
        (lambda a: a | {"softmax_scale": math.nan}, "softmax_scale"),
        (lambda a: a | {"query": replace(a["query"], content=a["query"].content.transpose(2, 3).contiguous().transpose(2, 3))}, "query.content"),
        (lambda a: a | {"query": replace(a["query"], scale=a["query"].scale[..., :1])}, "query.scale"),
        (lambda a: a | {"query": replace(a["query"], scale=a["query"].scale.double())}, "query.scale"),
        (lambda a: a | {"query": replace(a["query"], rope=a["query"].rope.float())}, "query.rope"),
        (lambda a: a | {"cache": replace(a["cache"], rope=a["cache"].rope[:, :32])}, "cache.rope"),
        (lambda a: a | {"cache": replace(a["cache"], content=a["cache"].content[:, :, :256])}, "width"),
        (lambda a: a | {"cache": replace(a["cache"], scale=a["cache"].scale.t().contiguous().t())}, "cache.scale"),
        (lambda a: a | {"plan": ops.plan_decode(a["seq_lens"], query_len=4, num_heads=128, fmt=FP8)}, "plan"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change, names: str) -> None:
    """Reports K04, K07, N11: refused before any launch, with the argument's name."""
    arguments = change(_arguments(random_problem([100, 64, 7], 16)))
    with pytest.raises(KernelError, match=names):
        ops.mla_decode(**arguments)


@pytest.mark.parametrize("bad", [{"query_len": 0}, {"query_len": 5}, {"num_heads": 0}, {"num_heads": 129}])
def test_plan_refuses_counts_out_of_range(bad: dict[str, int]) -> None:
    lens = torch.ones(1, dtype=torch.int32, device="cuda")
    with pytest.raises(KernelContractError, match=next(iter(bad))):
        ops.plan_decode(lens, **({"query_len": 1, "num_heads": 16, "fmt": FP8} | bad))


def test_length_beyond_the_block_table_and_wild_block_ids_stay_inside_the_pool() -> None:
    """Nothing can be checked on the host without a read-back, so the kernel cuts lengths and ids to what exists."""
    p = random_problem([128], 16)
    long = replace(p, seq_lens=torch.tensor([100_000], dtype=torch.int32, device="cuda"))
    assert torch.equal(decode(long)[0], decode(p)[0])
    wild = replace(p, block_table=torch.tensor([[p.cache.num_blocks + 5, -7]], dtype=torch.int32, device="cuda"))
    decode(wild)
    torch.cuda.synchronize()
