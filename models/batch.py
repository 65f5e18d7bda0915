"""What one forward pass is told: tokens, positions, where their keys go, and which caches to read.

The engine fills these once per step; layers only read them. Rows are packed, decode rows first:

    [ decode sequence 0: S rows | decode sequence 1: S rows | ... | prefill chunk 0 | prefill chunk 1 | ... ]

Decode rows run absorbed attention against the cache, prefill rows expanded attention (models/layers/mla.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.layout import DecodePlan, ExactCopy, LatentCache


@dataclass(frozen=True)
class ContextPiece:
    """Part of the cached context of the prefill chunks, small enough for the expansion workspace.

    Piece i of every sequence is fetched, expanded and attended at once; parts are merged by lse.
    starts: int32 [P] first cached token; cu_lens: int32 [P + 1]; total, max_len: host integers of cu_lens.
    lens: [P] tokens of each sequence on the host; without them a GPU waits to read cu_lens back, in every layer.
    """

    starts: torch.Tensor
    cu_lens: torch.Tensor
    total: int
    max_len: int
    lens: list[int] | None = None


@dataclass(frozen=True)
class PrefillMetadata:
    """The prefill chunks of a step: P sequences, packed.

    block_table: int32 [P, max_blocks]
    cu_lens_q:   int32 [P + 1]  cumulative chunk lengths
    max_len_q:   longest chunk
    context:     cached tokens before each chunk, in bounded pieces; empty when no chunk has any
    lens_q:      [P] chunk lengths on the host, as ContextPiece.lens
    """

    block_table: torch.Tensor
    cu_lens_q: torch.Tensor
    max_len_q: int
    context: list[ContextPiece] = field(default_factory=list)
    lens_q: list[int] | None = None


@dataclass(frozen=True)
class AttentionMetadata:
    """Where keys of this step are written and what each row may see; the same object for every layer.

    num_decode_seqs: B; the first B * query_len rows are decode rows
    query_len:       S, rows per decode sequence (1 + drafts); rows a sequence does not use have slot -1
    slots:           int64 [T]      block * 64 + offset of each row's key, -1 writes nothing
    block_table:     int32 [B, max_blocks] of the decode sequences
    seq_lens:        int32 [B]      tokens in the cache, this step's own included; 0 for a padded sequence
    num_query:       int32 [B] or None  live rows of each decode sequence; None means all S
    decode_plan:     made by ops.plan_decode once per step; None without decode rows
    prefill:         None without prefill rows
    """

    num_decode_seqs: int
    query_len: int
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_query: torch.Tensor | None
    decode_plan: DecodePlan | None
    prefill: PrefillMetadata | None

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode_seqs * self.query_len


class AttentionProbe(Protocol):
    """Watches attention from inside its layers, where unquantized values are. engine/fidelity.py has the one there is.

    comparing: whether this step's layers call `compare`
    """

    comparing: bool

    def copy(self, layer: int, rows: int) -> ExactCopy | None:
        """Where ops.append_kv also writes a layer's keys of the step's `rows` lines, unquantized."""

    def compare(
        self,
        layer: int,
        q_content: torch.Tensor,
        q_rope: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        softmax_scale: float,
    ) -> None:
        """A layer's decode rows, queries as ops.quantize_q takes them, got `out` [B, S, H, C] from ops.mla_decode."""


@dataclass(frozen=True)
class ForwardBatch:
    """Argument of every forward.

    input_ids: int64 [T], positions: int64 [T]; padded rows have id 0, position 0 and slot -1
    caches:    one LatentCache per attention layer (two per LongCat decoder layer), then the draft layer's if any
    row_mask:  bool [T] or None; False marks padded rows, which must not reach experts or statistics
    ep_rows:   rows every expert-parallel rank pads to this step, so that collectives have one shape; T on a single rank
    probe:     told of every attention; None costs nothing
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    caches: list[LatentCache]
    row_mask: torch.Tensor | None = None
    ep_rows: int = 0
    probe: AttentionProbe | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]
