"""Rows that travel to the experts as E4M3 codes give the bits that BF16 or FP32 rows give, over two and four gloo processes."""

from __future__ import annotations

import copy
import functools
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.workloads import SHAPES
from engine.config import EngineConfig, ParallelConfig
from engine.cuda_graph import GraphPool
from engine.errors import ConfigError
from kernels.layout import Activation
from models.batch import AttentionMetadata, ForwardBatch
from models.config import load_model_config
from models.layers.moe import MoE
from models.parallel import ParallelContext
from models.weights import RandomSource, Weights
from tests.distributed.test_parallel import run_ranks
from tests.reference_checkpoints import reference_checkpoint

VARIANTS = ["deepseek_v3-tiny", "longcat_flash-tiny"]  # sigmoid router and shared expert; zero-computation experts

WIDTH = 192  # a block of 128 channels and a partial one


def layer(
    variant: str,
    parallel: ParallelContext,
    dtype: torch.dtype,
    fp8: bool = True,
    device: str = "cpu",
    folder: Path | None = None,
) -> MoE:
    config = load_model_config(folder or reference_checkpoint(variant))
    assert config.moe is not None
    weights = Weights(RandomSource(fp8), torch.device(device), dtype, keep_fp8=fp8, prefix="moe.")
    moe = replace(config.moe, expert_intermediate_size=128)  # a quantized gate and up lie one above the other in whole blocks
    return MoE(weights, moe, WIDTH, parallel, router="r", bias="r.bias")


def awkward_rows(count: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of all sizes: zeros, amax around the floor of the scale, large, with outliers."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    sizes = torch.tensor([1.0, 0.0, 2e-5, 4e-5, 3e-3, 300.0])
    x *= sizes[torch.arange(count) % len(sizes), None]
    x[:, ::37] *= 50
    return x.to(dtype)


def batch_of(rows: int, ep_rows: int, device: str = "cpu") -> ForwardBatch:
    none = torch.empty(0, dtype=torch.int64, device=device)
    meta = AttentionMetadata(0, 1, none, none.int().view(0, 1), none.int(), None, None, None)
    live = torch.arange(rows, device=device) % 5 != 3
    return ForwardBatch(torch.zeros(rows, dtype=torch.int64, device=device), none, meta, [], row_mask=live, ep_rows=ep_rows)


def rank_main(device: str, worlds: list[str]) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    torch.distributed.init_process_group("gloo")
    for world in worlds:
        dp, tp = map(int, world.split("x"))
        (check_world if device == "cpu" else check_world_of_gpus)(ParallelContext.create(dp, tp, device))
    torch.distributed.destroy_process_group()


def check_world(plain: ParallelContext) -> None:
    sent: list[int] = []
    for variant in VARIANTS:
        for dtype in (torch.bfloat16, torch.float32):
            exact = layer(variant, plain, dtype)
            quantized = copy.copy(exact)
            quantized.dispatch = replace(exact.dispatch, parallel=replace(plain, fp8_dispatch=True))
            rows = 0 if plain.dp_rank == 1 else 9 + plain.dp_rank  # one replica has nothing to do
            x = awkward_rows(rows, exact.router.shape[1], dtype, plain.dp_rank)
            with torch.inference_mode():
                want, got = (moe(x, batch_of(rows, 13)) for moe in (exact, quantized))
            assert torch.equal(want, got), f"{variant} {dtype}: rank {plain.rank} differs"
            assert rows == 0 or bool((got != 0).any())
            sent.append(quantized.dispatch._rows_of_all(exact.dispatch.own_rows(x, 13)).quantized.data.stride(0))
    assert all(stride % 16 == 0 for stride in sent)


def check_world_of_gpus(plain: ParallelContext) -> None:
    """Shapes of the published models but for the widths. Rows of a decode step, eager and in a graph, and of prompts."""
    for shape in ("deepseek_v3.1", "longcat_flash"):
        exact = layer(shape, plain, torch.bfloat16, device="cuda", folder=SHAPES / shape)
        quantized = copy.copy(exact)
        quantized.dispatch = replace(exact.dispatch, parallel=replace(plain, fp8_dispatch=True))
        with torch.inference_mode():
            for most in (13, 3000):
                rows = 0 if plain.dp_rank == 1 and most == 13 else most - plain.dp_rank
                x = awkward_rows(rows, WIDTH, torch.bfloat16, plain.dp_rank).cuda()
                batch = batch_of(rows, most, "cuda")
                want, got = (moe(x, batch) for moe in (exact, quantized))
                assert isinstance(quantized.dispatch._rows_of_all(exact.dispatch.own_rows(x, most)), Activation)
                assert_alike(x, got, want, f"{shape} {most}: rank {plain.rank}")
                assert rows == 0 or bool((got != 0).any())
                if most == 13:
                    graph, replayed = GraphPool().record(functools.partial(quantized, x, batch))
                    x.copy_(awkward_rows(rows, WIDTH, torch.bfloat16, 7 + plain.dp_rank))
                    graph.replay()
                    assert_alike(x, replayed, exact(x, batch), f"{shape} in a graph: rank {plain.rank}")


def assert_alike(x: torch.Tensor, got: torch.Tensor, want: torch.Tensor, where: str) -> None:
    """Results of rows `x` up to the last bits of sums that are split in any order, which a quantized inner row may amplify to
    some percent of a row; tiny rows, whose inner rows are made of zeros and the smallest code, apart."""
    loud = x.float().norm(dim=-1) > 1
    # A padded row without a shared expert is zero in both.
    error = (got.float() - want.float()).norm(dim=-1)[loud] / want.float().norm(dim=-1)[loud].clamp_min(1e-30)
    assert not got.isnan().any()
    assert not len(error) or (float(error.max()) < 0.08 and float(error.mean()) < 0.02), f"{where}: {error}"


@pytest.mark.multigpu
def test_two_gpus() -> None:
    """Over NCCL, in data and in tensor parallel layouts."""
    run_ranks(2, "cuda", "2x1", "1x2", module="tests.distributed.test_fp8_dispatch", timeout_s=120)


@pytest.mark.parametrize(("world_size", "worlds"), [(2, ["2x1", "1x2"]), (4, ["2x2", "4x1"])])
def test_same_bits_as_unquantized_rows(world_size: int, worlds: list[str]) -> None:
    for variant in VARIANTS:
        reference_checkpoint(variant)  # once, not in every rank
    run_ranks(world_size, "cpu", *worlds, module="tests.distributed.test_fp8_dispatch", timeout_s=120)


def test_a_simulated_rank_takes_the_same_way() -> None:
    moe = layer("deepseek_v3-tiny", ParallelContext.simulated(4, 1), torch.bfloat16)
    quantized = copy.copy(moe)
    quantized.dispatch = replace(moe.dispatch, parallel=ParallelContext.simulated(4, 1, fp8_dispatch=True))
    x = awkward_rows(6, moe.router.shape[1], torch.bfloat16, 0)
    with torch.inference_mode():
        assert torch.equal(moe(x, batch_of(6, 6)), quantized(x, batch_of(6, 6)))
        rows = quantized.dispatch.gather(x, quantized.route(x))[0]
    assert isinstance(rows, Activation) and rows.quantized.data.shape == (24, x.shape[1]) and rows.plain is None


def test_experts_that_do_not_quantize_are_refused() -> None:
    with pytest.raises(ValueError, match="fp8_dispatch: these experts do not quantize"):
        layer("deepseek_v3-tiny", ParallelContext.simulated(2, 1, fp8_dispatch=True), torch.float32, fp8=False)
    with pytest.raises(ConfigError, match="fp8_dispatch: one rank has all experts"):
        EngineConfig("m", fp8_dispatch=True)
    assert EngineConfig("m", fp8_dispatch=True, parallel=ParallelConfig(2, 1)).fp8_dispatch


if __name__ == "__main__":
    rank_main(sys.argv[1], sys.argv[2:])
