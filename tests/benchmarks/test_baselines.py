"""Adapters of other MLA kernels, called through fakes that have the published signatures and compute with plain torch."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from benchmarks import baselines
from kernels import ops
from kernels.layout import BLOCK_SIZE, CacheFormat, LatentCache, LatentQuery

SCALE = 192**-0.5
LENS = [130, 64]


def attention(q: torch.Tensor, pages: torch.Tensor, ids: torch.Tensor, length: int, scale: float) -> torch.Tensor:
    """[S, H, 512] of one sequence; row s sees all but the last S - 1 - s tokens. q: [S, H, 576], pages: [n, 64, 576]."""
    keys = pages[ids.long()].flatten(0, 1)[:length].float()
    scores = torch.einsum("shd,td->sht", q.float(), keys) * scale
    seen = torch.arange(length) < length - len(q) + 1 + torch.arange(len(q)).unsqueeze(1)
    return torch.einsum("sht,tc->shc", scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1), keys[:, :512])


class FakeWrapper:
    """flashinfer.mla.BatchMLAPagedAttentionWrapper, as its documentation has it."""

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, backend="auto"
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.numel() >= 128 << 20 and backend == "fa3"

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
        q_data_type, kv_data_type, use_profiler=False,
    ) -> None:  # fmt: skip
        assert {t.dtype for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        assert (head_dim_ckv, head_dim_kpe, page_size, causal) == (512, 64, BLOCK_SIZE, True)
        self.rows, self.starts, self.pages, self.lens, self.scale = qo_indptr, kv_indptr, kv_indices, kv_len_arr, sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False) -> torch.Tensor:
        q, pages = torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1)
        found = [
            attention(
                q[self.rows[i] : self.rows[i + 1]], pages, self.pages[self.starts[i] : self.starts[i + 1]], int(self.lens[i]), self.scale
            )
            for i in range(len(self.lens))
        ]  # fmt: skip
        return torch.cat(found)


def fake_flash_mla(calls: list[str]) -> ModuleType:
    """flash_mla as its interface file has it; the schedule is made in the first call, as newer versions do."""
    module = ModuleType("flash_mla")

    def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k) -> tuple[object, None]:
        calls.append(f"{num_q_tokens_per_head_k} x {num_heads_k}")
        return object(), None

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None, causal=False
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert k_cache.shape[1:] == (BLOCK_SIZE, 1, 576) and head_dim_v == 512 and causal and num_splits is None
        blocks = [-(-int(n) // BLOCK_SIZE) for n in cache_seqlens]
        rows = [
            attention(q[i], k_cache[:, :, 0], block_table[i, : blocks[i]], int(n), softmax_scale)
            for i, n in enumerate(cache_seqlens)
        ]
        return torch.stack(rows), None

    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("name", ["flash_mla", "flashinfer"])
def test_adapters_compute_what_our_kernel_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = LatentCache(*(torch.randn(8, BLOCK_SIZE, d, generator=generator).bfloat16() for d in (512, 64)), None)
    query = LatentQuery(*(torch.randn(2, 2, 4, d, generator=generator).bfloat16() for d in (512, 64)), None)
    tables = [torch.randperm(8, generator=generator)[:6].view(2, 3).int() for _ in range(2)]
    lens = torch.tensor(LENS, dtype=torch.int32)
    made: list[str] = []
    flashinfer, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper = FakeWrapper  # type: ignore[attr-defined]
    for module in (flashinfer, mla, fake_flash_mla(made)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    calls = baselines.ADAPTERS[name](query, baselines.joined_cache(cache), tables, lens, SCALE)
    assert len(calls) == len(tables)
    plan = ops.plan_decode(lens, query_len=2, num_heads=4, fmt=CacheFormat.BF16)
    for call, table in zip(calls, tables):
        want, _ = ops.mla_decode(
            query, cache, table, lens, softmax_scale=SCALE, causal=True, plan=plan, out_dtype=torch.bfloat16
        )  # fmt: skip
        got = call()
        got = got[0] if isinstance(got, tuple) else got
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got.view_as(want), want.float(), rtol=0.02, atol=0.02)
    assert made == (["8 x 1"] if name == "flash_mla" else [])


def test_absent_kernels_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: object() if name == "flashinfer" else None)
    assert list(baselines.installed()) == ["flashinfer"]
    assert capsys.readouterr().out == "flash_mla: not installed, its kernel is left out\n"
