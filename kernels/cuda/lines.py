"""decode_lines and accept_tokens (csrc/sampling/lines.cu)."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch

from kernels.cuda import binding
from kernels.layout import DecodeLines, Drafts, SamplingTable

_THREADS = 128

_LinesArgs = binding.struct("_LinesArgs", [
    *((name, c_void_p) for name in ("starts", "num_drafts", "num_slots", "table")),
    *((name, c_void_p) for name in ("positions", "slots", "live", "seq_lens", "kept", "num_query")),
    ("table_stride", c_int64), ("sequences", c_int), ("query_len", c_int),
])  # fmt: skip
_AcceptArgs = binding.struct("_AcceptArgs", [
    *((name, c_void_p) for name in ("tokens", "rows", "drafts", "num_drafts", "accepted", "history")),
    ("drafts_stride", c_int64), ("vocab", c_int64), ("lines", c_int), ("sequences", c_int), ("query_len", c_int),
])  # fmt: skip


def decode_lines(
    starts: torch.Tensor, num_drafts: torch.Tensor | None, num_slots: torch.Tensor, block_table: torch.Tensor, query_len: int
) -> DecodeLines:
    """See ops.decode_lines."""
    b, device = len(starts), starts.device
    positions, slots = torch.empty(2, b, query_len, dtype=torch.int64, device=device)
    live = torch.empty(b, query_len, dtype=torch.bool, device=device)
    seq_lens, num_query = torch.empty(2, b, dtype=torch.int32, device=device)
    kept = torch.empty(b, dtype=torch.int64, device=device)
    inputs = (starts, num_drafts, num_slots, block_table)
    outputs = (positions, slots, live, seq_lens, kept, num_query)
    args = _LinesArgs(*(binding.pointer(t) for t in (*inputs, *outputs)), block_table.stride(0), b, query_len)
    _launch("decode_lines", device, b * query_len, args)
    return DecodeLines(*outputs)


def accept_tokens(tokens: torch.Tensor, rows: torch.Tensor, table: SamplingTable, drafts: Drafts | None) -> torch.Tensor:
    """See ops.accept_tokens."""
    args = _AcceptArgs()
    args.query_len = 1
    if drafts is not None:
        args.sequences, args.query_len = drafts.tokens.shape[0], drafts.tokens.shape[1] + 1
        args.drafts, args.num_drafts = drafts.tokens.data_ptr(), drafts.counts.data_ptr()
        args.drafts_stride = drafts.tokens.stride(0)
    accepted = torch.empty(args.sequences, dtype=torch.int64, device=tokens.device)
    args.tokens, args.rows, args.history = tokens.data_ptr(), rows.data_ptr(), table.history.data_ptr()
    args.accepted, args.vocab, args.lines = accepted.data_ptr(), table.vocab_size, len(tokens)
    _launch("accept_tokens", tokens.device, args.sequences + len(tokens) - args.sequences * args.query_len, args)
    return accepted


def _launch(name: str, device: torch.device, threads: int, args: ctypes.Structure) -> None:
    if threads:
        with torch.cuda.device(device):
            kernel = binding.kernel("lines", name, device.index)
            kernel.launch(-(-threads // _THREADS), _THREADS, args, overlap=True)
