"""The choice of tokens on Hopper: one launch for greedy and drawn lines, drafts and their verification (csrc/sampling/choose.cu)."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch

from kernels.cuda import binding
from kernels.errors import KernelContractError
from kernels.layout import MAX_EDITS, Drafts, SamplingTable

_CLUSTER, _THREADS = 8, 512  # of csrc/sampling/choose.cu
_SLICES = (1024, 4096, 8192, 16384, 20480, 32768, 49152)  # values a CTA can hold: 8 times as many are a vocabulary

_COLUMNS = (
    "temperature", "seeds", "min_p", "top_k", "top_p", "repetition", "presence", "frequency", "history", "masked", "masks",
    "num_edits", "edit_tokens", "edit_values", "edit_until",
)  # fmt: skip
_ChooseArgs = binding.struct("_ChooseArgs", [
    *((name, c_void_p) for name in ("logits", "positions", "rows", *_COLUMNS, "drafts", "num_drafts", "probs", "tokens")),
    *((name, c_int64) for name in ("stride", "drafts_stride", "probs_row_stride", "probs_stride")),
    *((name, c_int) for name in ("vocab", "slice", "words", "max_edits", "verified", "query_len", "drafting")),
])  # fmt: skip


def choose_tokens(
    logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable, drafts: Drafts | None
) -> torch.Tensor:
    """See ops.choose_tokens."""
    args = _ChooseArgs()
    args.query_len = 1
    if drafts is not None and len(drafts.tokens):
        args.query_len = drafts.tokens.shape[1] + 1
        args.verified = len(drafts.tokens) * args.query_len
        args.drafts, args.num_drafts = drafts.tokens.data_ptr(), drafts.counts.data_ptr()
        args.drafts_stride = drafts.tokens.stride(0)
        if (probs := drafts.probs) is not None:
            args.probs, args.probs_row_stride, args.probs_stride = probs.data_ptr(), probs.stride(0), probs.stride(1)
    return _launch("choose_tokens", logits, positions, rows, table, args)


def draft_tokens(
    logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable, probs: torch.Tensor | None
) -> torch.Tensor:
    """See ops.draft_tokens."""
    args = _ChooseArgs()
    args.drafting = args.query_len = 1
    if probs is not None:
        args.probs, args.probs_row_stride = probs.data_ptr(), probs.stride(0)
    return _launch("draft_tokens", logits, positions, rows, table, args)


def _launch(
    op: str, logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable, args: ctypes.Structure
) -> torch.Tensor:
    """Fill in what both have, and launch."""
    device, (lines, vocab) = logits.device, logits.shape
    share = -(-vocab // _CLUSTER)
    room = next((size for size in _SLICES if size >= share), None)
    if room is None:
        raise KernelContractError(op, f"at most {_CLUSTER * _SLICES[-1]} tokens, got {vocab}")
    tokens = torch.empty(lines, dtype=torch.int64, device=device)
    if lines == 0:
        return tokens
    for name in _COLUMNS:
        setattr(args, name, getattr(table, name).data_ptr())
    args.logits, args.positions, args.rows = logits.data_ptr(), positions.data_ptr(), rows.data_ptr()
    args.tokens, args.stride, args.vocab, args.slice = tokens.data_ptr(), logits.stride(0), vocab, share
    args.words, args.max_edits = table.masks.shape[1], MAX_EDITS
    with torch.cuda.device(device):
        kernel = binding.kernel("choose", "choose_tokens", device.index, (("SLICE", room),))
        kernel.launch(lines * _CLUSTER, _THREADS, args, cluster=_CLUSTER, overlap=True)
    return tokens
