"""Simulated quantization schemes against the product's own operations and against loops that can be read."""

from __future__ import annotations

import pytest
import torch

from benchmarks.activations import Attention, synthetic
from benchmarks.numerics import errors, output
from benchmarks.schemes import ALTERNATIVES, BF16, EXACT, SNAPMLA, decode_with, stored_keys
from kernels import ops
from kernels.layout import BLOCK_SIZE, FP8, FP8_MAX, CacheFormat, DecodePlan, LatentCache, LatentQuery
from kernels.reference.latent import quantize_rows
from kernels.reference.mla_decode import exact_attention


def paged(layer: Attention, fmt: CacheFormat) -> tuple[LatentQuery, LatentCache, torch.Tensor, torch.Tensor]:
    """The layer in a cache format: query [n, 1, H, ...], cache, a table for n sequences over the same blocks, lengths."""
    query, content, rope, scale = layer.query, layer.content, layer.rope, None
    if fmt is CacheFormat.FP8:
        codes, scale = quantize_rows(content)
        content, rope = codes, (rope / scale.unsqueeze(1)).bfloat16()
        q_codes, q_scale = quantize_rows(query[0])
        asked = LatentQuery(q_codes, (query[1] / q_scale.unsqueeze(-1)).bfloat16(), q_scale)
    else:
        content, rope = content.to(fmt.content_dtype), rope.to(fmt.rope_dtype)
        asked = LatentQuery(query[0].to(fmt.content_dtype), query[1].to(fmt.rope_dtype), None)
    missing = -len(content) % BLOCK_SIZE

    def blocks(x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(missing, *x.shape[1:]).to(x.dtype)
        return torch.cat((x.view(torch.uint8), padding.view(torch.uint8))).view(x.dtype).unflatten(0, (-1, BLOCK_SIZE)) if x.dtype is FP8 else torch.cat((x, padding)).unflatten(0, (-1, BLOCK_SIZE))  # fmt: skip

    cache = LatentCache(blocks(content), blocks(rope), None if scale is None else blocks(scale))
    n = len(layer.visible)
    table = torch.arange(cache.num_blocks, dtype=torch.int32).expand(n, -1).contiguous()
    return asked.unflatten(n, 1), cache, table, layer.visible.int()


@pytest.fixture(scope="module")
def layer() -> Attention:
    made = synthetic(300, 100.0, heads=4, queries=3)
    return Attention(made.content, made.rope, made.query, torch.tensor([300, 150, 64]), made.softmax_scale)


@pytest.mark.parametrize(("scheme", "fmt"), [(SNAPMLA, CacheFormat.FP8), (BF16, CacheFormat.BF16), (EXACT, CacheFormat.FP32)])
def test_simulation_equals_the_product(layer: Attention, scheme, fmt: CacheFormat) -> None:
    query, cache, table, lens = paged(layer, fmt)
    out, _ = ops.mla_decode(
        query, cache, table, lens, softmax_scale=layer.softmax_scale, causal=True, plan=DecodePlan(), out_dtype=torch.float32
    )
    # A code of P on the border between two may fall either way, which moves an output by far less than the scheme's error.
    assert max(errors(output(scheme, layer), out[:, 0])["relative"]) < (2e-3 if scheme is SNAPMLA else 1e-5)


def test_stand_in_reads_the_cache_as_the_operation_does(layer: Attention) -> None:
    query, cache, table, lens = paged(layer, CacheFormat.FP32)
    lens = torch.tensor([300, 0, 64], dtype=torch.int32)  # a padded row gives zeros
    kwargs = {"softmax_scale": layer.softmax_scale, "causal": True}
    out, _ = decode_with(EXACT)(query, cache, table, lens, plan=DecodePlan(), out_dtype=torch.float32, **kwargs)
    expected, _ = exact_attention(query, cache, table, lens, **kwargs)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert not out[1].any()


@pytest.mark.parametrize(
    ("name", "tokens", "channels"), [("d", 64, 512), ("tile", 128, 128), ("channel", 200, 1), ("c", 200, 512), ("b", 200, 512)]
)
def test_granularity(name: str, tokens: int, channels: int) -> None:
    """Every rectangle of one scale is rounded by its own maximum (static: by the calibration's, saturating beyond it)."""
    content = torch.randn(200, 512) * torch.rand(200, 1) * 5
    scheme = next(scheme for scheme in ALTERNATIVES if scheme.name == name)
    keys = stored_keys(scheme, content, torch.randn(200, 64), static_amax=2.0)
    for t in range(0, 200, tokens):
        for c in range(0, 512, channels):
            part = content[t : t + tokens, c : c + channels]
            scale = (2.0 if name == "b" else part.abs().max()) / FP8_MAX
            rounded = (part / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale
            torch.testing.assert_close(keys.content[t : t + tokens, c : c + channels], rounded, rtol=1e-6, atol=0)


def test_quantized_rope_costs_more_the_larger_it_is() -> None:
    """What the paper's configuration A shows (App. G); with BF16 RoPE the error does not grow."""
    a = next(scheme for scheme in ALTERNATIVES if scheme.name == "a")
    found = {}
    for outlier in (10.0, 1000.0):
        layer = synthetic(1024, outlier, heads=4, queries=4)
        exact = output(EXACT, layer)
        found[outlier] = [errors(output(scheme, layer), exact)["relative"][0] for scheme in (SNAPMLA, a)]
    assert found[1000.0][1] > 2 * found[1000.0][0]
    assert found[1000.0][1] > 2 * found[10.0][1]
    assert found[1000.0][0] < 1.5 * found[10.0][0]
