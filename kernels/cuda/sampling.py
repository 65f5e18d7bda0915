"""The choice of tokens on Hopper: one launch for greedy and drawn rows alike (csrc/sampling/choose.cu)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch

from kernels.cuda import binding
from kernels.errors import KernelContractError
from kernels.layout import Draws

_CLUSTER, _THREADS = 8, 512  # of csrc/sampling/choose.cu
_SLICES = (1024, 4096, 8192, 16384, 20480, 32768, 49152)  # values a CTA can hold: 8 times as many are a vocabulary

_ChooseArgs = binding.struct("_ChooseArgs", [
    ("logits", c_void_p), ("positions", c_void_p), ("draw_rows", c_void_p), ("temperature", c_void_p), ("seeds", c_void_p),
    ("filter_rows", c_void_p), ("min_p", c_void_p), ("top_k", c_void_p), ("top_p", c_void_p), ("tokens", c_void_p),
    ("stride", c_int64), ("vocab", c_int), ("num_draws", c_int), ("num_filters", c_int), ("slice", c_int),
])  # fmt: skip


def choose_tokens(logits: torch.Tensor, positions: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    """See ops.choose_tokens."""
    op, device = "choose_tokens", logits.device
    lines, vocab = logits.shape
    share = -(-vocab // _CLUSTER)
    room = next((size for size in _SLICES if size >= share), None)
    if room is None:
        raise KernelContractError(op, f"at most {_CLUSTER * _SLICES[-1]} tokens, got {vocab}")
    if logits.stride(1) != 1 or not positions.is_contiguous():
        raise KernelContractError(op, "logits must be dense in their last dimension, positions contiguous")
    tokens = torch.empty(lines, dtype=torch.int64, device=device)
    if lines == 0:
        return tokens
    args = _ChooseArgs()
    args.logits, args.positions, args.tokens = logits.data_ptr(), positions.data_ptr(), tokens.data_ptr()
    args.stride, args.vocab, args.slice = logits.stride(0), vocab, share
    if draws is not None:
        args.num_draws = draws.rows.shape[0]
        args.draw_rows, args.temperature, args.seeds = (
            _address(t, dtype)
            for t, dtype in ((draws.rows, torch.int64), (draws.temperature, torch.float32), (draws.seeds, torch.int64))
        )
        if draws.filters is not None:
            f = draws.filters
            args.num_filters = f.rows.shape[0]
            args.filter_rows, args.min_p, args.top_k, args.top_p = (
                _address(t, dtype)
                for t, dtype in (
                    (f.rows, torch.int64),
                    (f.min_p, torch.float32),
                    (f.top_k, torch.int64),
                    (f.top_p, torch.float64),
                )
            )
    with torch.cuda.device(device):
        kernel = binding.kernel("choose", "choose_tokens", device.index, (("SLICE", room),))
        kernel.launch(lines * _CLUSTER, _THREADS, args, cluster=_CLUSTER, overlap=True)
    return tokens


def _address(t: torch.Tensor, dtype: torch.dtype) -> int:
    if t.dtype is not dtype or not t.is_contiguous():
        raise KernelContractError("choose_tokens", f"contiguous {dtype} expected, got {t.dtype} of strides {t.stride()}")
    return t.data_ptr()
