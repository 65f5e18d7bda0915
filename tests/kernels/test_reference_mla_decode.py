"""MLA decode: the vectorised CPU path and the tiled oracle against exact attention in FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.layout import CacheFormat, LatentCache
from kernels.reference.latent import quantize_rows
from kernels.reference.mla_decode import exact_attention, mla_decode, tiled_attention, visible_lengths
from tests.kernels.latent_cases import DecodeCase, decode_case

EXACT = (CacheFormat.FP32, CacheFormat.BF16)


def exact(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    return exact_attention(*case.args, softmax_scale=case.softmax_scale, causal=True)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert not got.isnan().any(), "NaN leaked into the result"
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def assert_lse_equal(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.isneginf().equal(want.isneginf())
    seen = ~want.isneginf()
    if seen.any():
        assert float((got.double() - want.double())[seen].abs().max()) < tolerance


@pytest.mark.parametrize("fmt", EXACT)
@pytest.mark.parametrize(
    ("lens", "query_len", "num_query"),
    [([0, 1, 63, 64, 65, 300], 1, None), ([65, 2, 200, 3], 3, None), ([130, 5, 64], 2, [2, 1, 0])],
)
def test_exact_formats_equal_attention_in_fp64(fmt, lens, query_len, num_query) -> None:
    """Report N08: a padding row with a causal offset sees nothing instead of a negative number of tokens."""
    case = decode_case(fmt, lens, query_len=query_len, num_query=num_query)
    out, lse = case.run()
    want_out, want_lse = exact(case)
    assert relative_error(out, want_out) < 2e-6
    assert_lse_equal(lse, want_lse, 2e-5)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(
    ("lens", "query_len", "num_query"),
    [([0, 1, 63, 64, 65, 300], 1, None), ([65, 2, 200, 3], 4, None), ([130, 5, 64], 2, [2, 1, 0])],
)
def test_vectorised_fp8_equals_tiled_oracle(block, lens, query_len, num_query) -> None:
    """Same quantization points: equal to FP32 rounding, but where rounding tips one code of P over."""
    case = decode_case(CacheFormat.FP8, lens, query_len=query_len, num_query=num_query)
    out, lse = mla_decode(
        *case.args, softmax_scale=case.softmax_scale, causal=True, plan=None, out_dtype=torch.float32, p_block=block
    )
    want_out, want_lse = tiled_attention(*case.args, softmax_scale=case.softmax_scale, causal=True, block=block)
    assert not out.isnan().any()
    difference = (out - want_out).abs() / want_out.abs().max()
    assert float(difference.quantile(0.98)) < 2e-6
    assert float(difference.max()) < 5e-3
    assert_lse_equal(lse, want_lse, 1e-5)


@pytest.mark.parametrize("block", [64, 128])
def test_quantizing_p_costs_about_a_percent(block) -> None:
    """Report K18: a numeric test of FP8 dense decode with a stated tolerance (0.9 to 1 %)."""
    case = decode_case(CacheFormat.FP8, [768, 900], heads=8)
    out, lse = tiled_attention(*case.args, softmax_scale=case.softmax_scale, causal=True, block=block)
    want_out, want_lse = exact(case)
    assert 1e-4 < relative_error(out, want_out) < 1.5e-2
    assert_lse_equal(lse, want_lse, 5e-3)  # l is the sum of the rounded P


@pytest.mark.parametrize("mean", [0.0, 0.5, 3.0])
def test_error_does_not_grow_with_context(mean) -> None:
    """Reports K09, K10: P.V accumulates in true FP32, so a longer context does not shrink the output."""
    errors = []
    for length in (256, 4096):
        case = decode_case(CacheFormat.FP8, [length], heads=2, content_mean=mean)
        out, _ = case.run()
        errors.append(relative_error(out, exact(case)[0]))
    assert errors[1] < 1.5 * errors[0] + 1e-3
    assert errors[1] < 1.5e-2


def test_rope_is_not_quantized() -> None:
    """Report K12: the RoPE part keeps BF16 accuracy beside an FP8 latent; quantizing it too costs several times more."""

    def case(fmt: CacheFormat) -> DecodeCase:
        torch.manual_seed(7)
        return decode_case(fmt, [512], rope_gain=10.0, softmax_scale=0.1)

    _, true_lse = exact(case(CacheFormat.FP32))
    fp8 = case(CacheFormat.FP8)
    codes, scale = quantize_rows(fp8.cache.rope.float())
    quantized_rope = (codes.float() * scale.unsqueeze(-1)).to(torch.bfloat16)
    coarse = replace(fp8, cache=LatentCache(fp8.cache.content, quantized_rope, fp8.cache.scale))
    fine_error = float((fp8.run()[1] - true_lse).abs().mean())
    assert fine_error * 3 < float((coarse.run()[1] - true_lse).abs().mean())


@pytest.mark.parametrize("fmt", list(CacheFormat))
def test_strided_pool_reads_the_same(fmt) -> None:
    """Report K05: the block stride is honoured."""
    torch.manual_seed(5)
    dense = decode_case(fmt, [100, 7]).run()
    torch.manual_seed(5)
    strided = decode_case(fmt, [100, 7], padding=5).run()
    assert torch.equal(dense[0], strided[0]) and torch.equal(dense[1], strided[1])


@pytest.mark.parametrize("fmt", list(CacheFormat))
def test_a_row_does_not_depend_on_its_batch(fmt) -> None:
    case = decode_case(fmt, [64, 0, 200, 1000, 3])
    out, lse = case.run()
    for i in range(len(case.seq_lens)):
        one = slice(i, i + 1)
        query = type(case.query)(
            case.query.content[one], case.query.rope[one], None if case.query.scale is None else case.query.scale[one]
        )
        alone = replace(case, query=query, block_table=case.block_table[one], seq_lens=case.seq_lens[one])
        one_out, one_lse = alone.run()
        assert torch.allclose(one_out[0], out[i], atol=5e-3 * float(out.abs().max())), i
        assert torch.allclose(one_lse[0], lse[i], atol=1e-5), i


def test_one_block_far_below_the_last_is_harmless() -> None:
    """A block 200 nats below its predecessor contributes nothing and overflows nothing."""
    case = decode_case(CacheFormat.FP8, [192], heads=2, softmax_scale=1.0)
    block = int(case.block_table[0, 0])
    case.cache.rope[block] = case.query.rope[0, 0, 0] * 50.0  # the first block's logits of head 0 tower above the rest
    out, lse = case.run()
    want_out, want_lse = exact(case)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert relative_error(out, want_out) < 3e-2
    assert float(((lse - want_lse) / want_lse).abs().max()) < 1e-4


def test_one_sink_above_flat_tokens_keeps_their_mass() -> None:
    """A token 13 nats above thousands of flat ones with a zero latent: the flat tokens' output survives P's quantization."""
    case = decode_case(CacheFormat.FP8, [4096], heads=2, softmax_scale=0.01, content_mean=1.0)
    block = int(case.block_table[0, 0])
    case.cache.content[block, 0] = torch.zeros(512).to(torch.float8_e4m3fn)
    case.cache.scale[block, 0] = 1e-4 / 448
    row = case.query.rope[0, 0, 0].float()
    target = 13.0 / (case.softmax_scale * float(case.query.scale[0, 0, 0]) * (1e-4 / 448))
    case.cache.rope[block, 0] = (row * (target / float(row @ row))).to(torch.bfloat16)
    out, _ = case.run()
    assert relative_error(out[0, 0, 0], exact(case)[0][0, 0, 0]) < 2e-2


def test_visible_lengths() -> None:
    lens, live = torch.tensor([5, 1, 0, 9], dtype=torch.int32), torch.tensor([3, 2, 3, 0], dtype=torch.int32)
    assert visible_lengths(lens, live, 3, True).tolist() == [[3, 4, 5], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert visible_lengths(lens, live, 3, False).tolist() == [[5, 5, 5], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert visible_lengths(lens, None, 1, True).tolist() == [[5], [1], [0], [9]]
