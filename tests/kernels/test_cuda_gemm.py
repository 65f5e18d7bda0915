"""Dense products and activation quantization on Hopper, against float64 on the same quantized operands."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda import build, gemm
from kernels.errors import KernelContractError
from kernels.layout import FP8, BlockScaledWeight, QuantizedActivation
from kernels.reference import elementwise
from kernels.reference.linear import quantize_activations
from tests.kernels.poison import poison_free_memory

ROWS = (1, 3, 8, 17, 64, 65, 200)
# N x K: narrow and long, ragged in both, one row tile, one block, fewer units than SMs, whole tiles per SM
# slices of 16, 16, 8 and 256 rows a CTA
SHAPES = (
    (2112, 7168), (1536, 4096), (576, 10944), (100, 1040), (128, 128), (4, 16), (33792, 256), (4096, 1024), (7168, 640),
    (24576, 512), (36864, 384), (20000, 256), (7168, 8448), (8000, 1152),
)  # fmt: skip


def random_weight(n: int, k: int) -> BlockScaledWeight:
    """Codes over the whole E4M3 range, block scales over two orders of magnitude."""
    data = (torch.randn(n, k, device="cuda") * 60).clamp(-448, 448).to(FP8)
    scale = 10 ** (torch.rand(-(-n // 128), -(-k // 128), device="cuda") * 2 - 4)
    return BlockScaledWeight(data, scale)


def random_rows(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(m, k, device="cuda") * 10 ** (torch.rand(m, 1, device="cuda") * 4 - 2)).to(dtype)


def exact(q: QuantizedActivation, w: BlockScaledWeight) -> torch.Tensor:
    return q.dequantize().double() @ w.dequantize().double().t()


def worst_row_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest relative L2 error of a row; NaN counts as infinite."""
    error = (y.double() - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-30)
    return float(error.nan_to_num(float("inf")).max()) if error.numel() else 0.0


@pytest.mark.parametrize(
    ("n", "k"),
    [
        (2112, 7168),
        (24576, 1536),
        (7168, 16384),
        (36864, 7168),
        (7168, 18432),
        (4096, 7168),
        (7168, 2048),
        (512, 7168),
        (8, 128),
    ],
)
def test_products_of_the_published_layers_compile_clean(n: int, k: int) -> None:
    cut = gemm.slices(n, k, 132)
    assert cut is not None
    for tokens in (16, 64):
        assert build.problems("gemm_rows", build.build("gemm_rows", dict(cut.defines(tokens)))) == []


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 7168), (65, 1040), (200, 16), (9001, 144), (1030, 16400)])
def test_quantization_is_the_cpu_references_to_the_bit(m: int, k: int, dtype: torch.dtype) -> None:
    x = random_rows(m, k, dtype)
    x[0] = 0  # the floor
    x[-1, -1] = 3e4  # an outlier only its own block pays for
    poison_free_memory()
    assert torch.equal(gemm.quantize_1x128(x).dequantize().cpu(), quantize_activations(x.cpu()))


@pytest.mark.hopper
def test_quantization_takes_strided_rows_and_keeps_nan_in_its_block() -> None:
    """Report N05: nothing of a row that holds NaN reaches another row or block."""
    wide = random_rows(5, 1024)
    x = wide[:, 256:512]
    clean = gemm.quantize_1x128(x.contiguous()).dequantize()
    assert torch.equal(gemm.quantize_1x128(x).dequantize(), clean)
    x[2, 3] = float("nan")
    dirty = gemm.quantize_1x128(x).dequantize()
    assert dirty[2, :128].isnan().any()
    dirty[2, :128] = clean[2, :128] = 0
    assert torch.equal(dirty, clean)


@pytest.mark.hopper
@pytest.mark.parametrize(("m", "i"), [(1, 128), (17, 1408), (64, 18432), (8195, 80), (4100, 4112)])
def test_fused_activation_equals_its_two_steps(m: int, i: int) -> None:
    gate_up = torch.randn(m, 2 * i, device="cuda").mul(3).bfloat16()
    fused = gemm.silu_and_mul_quantized(gate_up).dequantize()
    steps = quantize_activations(elementwise.silu_and_mul(gate_up))
    assert (fused - steps).norm() <= 5e-3 * steps.norm()  # expf and division may move a value by one BF16 step


@pytest.mark.hopper
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", ROWS)
def test_block_scaled_product_matches_float64(m: int, n: int, k: int) -> None:
    """Report L08: rows and channels that do not fill the last 128 block."""
    x, w = random_rows(m, k), random_weight(n, k)
    reference = exact(gemm.quantize_1x128(x), w)
    poison_free_memory()
    assert worst_row_error(gemm.linear(x, w), reference) < 4e-3  # BF16 output: 1.2e-3; block products: 14 bits


@pytest.mark.hopper
@pytest.mark.parametrize("m", [1, 64, 200])
def test_fp32_output_keeps_what_the_tensor_core_gives(m: int) -> None:
    x, w = random_rows(m, 2048, torch.float32), random_weight(1000, 2048)
    reference = exact(gemm.quantize_1x128(x), w)
    poison_free_memory()
    y = gemm.linear(x, w)
    assert y.dtype is torch.float32
    assert worst_row_error(y, reference) < 1.5e-3


@pytest.mark.parametrize(
    ("m", "experts", "d"), [(1, 256, 7168), (17, 768, 6144), (64, 64, 2048), (200, 384, 7168), (3, 16, 128)]
)
@pytest.mark.hopper
def test_router_logits_are_fp32_products(m: int, experts: int, d: int) -> None:
    x, w = random_rows(m, d), torch.randn(experts, d, device="cuda").bfloat16()
    poison_free_memory()
    logits = gemm.router_logits(x, w)
    assert logits.dtype is torch.float32
    assert worst_row_error(logits, x.double() @ w.double().t()) < 2e-5  # sums are cut, not rounded


@pytest.mark.hopper
def test_long_sums_do_not_shrink() -> None:
    """All-positive operands: an FP8 accumulator left in place over 18432 channels would lose several percent."""
    x, w = random_rows(16, 18432).abs(), random_weight(256, 18432)
    w = BlockScaledWeight(w.data.float().abs().to(FP8), torch.full_like(w.scale, 1e-3))
    y, reference = gemm.linear(x, w).double(), exact(gemm.quantize_1x128(x), w)
    assert ((y / reference).mean() - 1).abs() < 1e-3


@pytest.mark.hopper
@pytest.mark.parametrize(("n", "k"), [(4096, 1536), (2112, 7168), (4096, 1664), (24576, 384), (7168, 8192)])
def test_a_row_does_not_depend_on_its_batch(n: int, k: int) -> None:
    """Report N05: bits of a row alone, among 64, and beside rows of NaN, however K is cut and fetched."""
    x, w = random_rows(64, k), random_weight(n, k)
    together = gemm.linear(x, w)
    for m in (1, 9, 30, 33):
        assert torch.equal(gemm.linear(x[:m], w), together[:m])
    x[1::2] = float("nan")
    assert torch.equal(gemm.linear(x, w)[::2], together[::2])


@pytest.mark.hopper
@pytest.mark.parametrize("m", [1, 64, 200])
def test_product_replays_in_a_graph(m: int) -> None:
    weights = [random_weight(2112, 1536), random_weight(1536, 2112)]
    x = random_rows(m, 1536)

    def step() -> torch.Tensor:
        y = x
        for _ in range(3):
            for w in weights:
                y = gemm.linear(y, w)
            y = y / y.float().norm(dim=-1, keepdim=True).to(y.dtype)
        return y

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(3):
        x.copy_(random_rows(m, 1536))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, step())


@pytest.mark.hopper
def test_early_start_is_safe_behind_any_node_of_a_graph() -> None:
    """The product fetches weights before its input is ready; here it follows a memset, a copy and a joined side stream."""
    w = random_weight(2112, 1536)
    q = gemm.quantize_1x128(random_rows(16, 1536))
    source = gemm.quantize_1x128(random_rows(16, 1536))
    expected = gemm.linear_quantized(source, w, torch.bfloat16)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.data.view(torch.uint8).zero_()
        q.data.copy_(source.data)
        q.scale.copy_(source.scale)
        after_copy = gemm.linear_quantized(q, w, torch.bfloat16)
        scratch = torch.zeros(1 << 24, dtype=torch.uint8, device="cuda")
        after_memset = gemm.linear_quantized(q, w, torch.bfloat16)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            scratch.add_(1)
            beside = gemm.linear_quantized(q, w, torch.bfloat16)
        first = gemm.linear_quantized(q, w, torch.bfloat16)
        torch.cuda.current_stream().wait_stream(side)
        after_join = gemm.linear_quantized(q, w, torch.bfloat16)
    results = (after_copy, after_memset, beside, first, after_join)
    for _ in range(3):
        for y in results:
            y.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(y, expected) for y in results)


@pytest.mark.hopper
def test_leading_dimensions_and_empty_batches() -> None:
    w = random_weight(256, 384)
    x = random_rows(6, 384)
    assert torch.equal(gemm.linear(x.view(2, 3, 384), w), gemm.linear(x, w).view(2, 3, 256))
    assert gemm.linear(x[:0], w).shape == (0, 256)
    part = BlockScaledWeight(w.data[:, 128:].contiguous(), w.scale[:, 1:].contiguous())
    assert torch.equal(gemm.linear(x[:, 128:], part), gemm.linear(x[:, 128:].contiguous(), part))


@pytest.mark.hopper
def test_what_the_kernel_cannot_read_is_refused_by_name() -> None:
    w = random_weight(256, 384)
    x = random_rows(4, 384)
    with pytest.raises(KernelContractError, match="contiguous"):
        gemm.linear(x[:, :256].contiguous(), BlockScaledWeight(w.data[:, :256], w.scale[:, :2].contiguous()))
    with pytest.raises(KernelContractError, match="scale"):
        gemm.linear(x, BlockScaledWeight(w.data, w.scale[:1]))
    with pytest.raises(KernelContractError, match="multiple of 16"):
        gemm.linear(x[:, :24].contiguous(), random_weight(256, 24))
