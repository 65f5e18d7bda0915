"""Drives a model without the engine: builds ForwardBatch by hand for prefill, chunked prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels import ops
from kernels.layout import BLOCK_SIZE, CacheFormat, LatentCache
from models.batch import AttentionMetadata, ContextPiece, ForwardBatch, PrefillMetadata
from models.causal_lm import CausalLM
from models.config import ModelConfig


@dataclass
class Driver:
    """Sequences with permuted blocks; `lengths` counts the tokens each has in the cache."""

    model: CausalLM
    config: ModelConfig
    fmt: CacheFormat = CacheFormat.FP32
    num_blocks: int = 64
    device: str = "cpu"
    ep_rows: int = 0
    context_piece: int = 1 << 20  # most context tokens of one piece and sequence
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        c = self.config
        layers = c.num_attention_layers + (self.model.mtp is not None)
        self.caches = [
            LatentCache.allocate(self.fmt, self.num_blocks, c.kv_lora_rank, c.qk_rope_head_dim, self.device)
            for _ in range(layers)
        ]
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.free = order

    def _grow(self, sequence: int, count: int) -> list[int]:
        """Positions of `count` new tokens; takes blocks as needed."""
        while len(self.tables) <= sequence:
            self.tables.append([])
            self.lengths.append(0)
        first = self.lengths[sequence]
        self.lengths[sequence] += count
        while len(self.tables[sequence]) * BLOCK_SIZE < self.lengths[sequence]:
            self.tables[sequence].append(self.free.pop())
        return list(range(first, first + count))

    def _int32(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _table(self, sequences: list[int]) -> torch.Tensor:
        width = max((len(self.tables[s]) for s in sequences), default=1) + 1
        return self._int32([self.tables[s] + [-1] * (width - len(self.tables[s])) for s in sequences]).view(-1, width)

    def batch(self, decodes: dict[int, list[int]], prefills: dict[int, list[int]]) -> ForwardBatch:
        """Decode rows first; every decode sequence brings the same number of tokens."""
        ids, positions, slots = [], [], []
        context = [self.lengths[s] if s < len(self.lengths) else 0 for s in prefills]
        for sequence, tokens in (*decodes.items(), *prefills.items()):
            new = self._grow(sequence, len(tokens))
            ids += tokens
            positions += new
            slots += [self.tables[sequence][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in new]
        query_len = len(next(iter(decodes.values()), [0]))
        seq_lens = self._int32([self.lengths[s] for s in decodes])
        plan = None
        if decodes:
            plan = ops.plan_decode(seq_lens, query_len=query_len, num_heads=self.config.num_heads, fmt=self.fmt)
        meta = AttentionMetadata(
            num_decode_seqs=len(decodes),
            query_len=query_len,
            slots=torch.tensor(slots, dtype=torch.int64, device=self.device),
            block_table=self._table(list(decodes)),
            seq_lens=seq_lens,
            num_query=None,
            decode_plan=plan,
            prefill=self._prefill(prefills, context) if prefills else None,
        )
        tensors = [torch.tensor(v, dtype=torch.int64, device=self.device) for v in (ids, positions)]
        return ForwardBatch(*tensors, attention=meta, caches=self.caches, ep_rows=self.ep_rows or len(ids))

    def _prefill(self, prefills: dict[int, list[int]], context: list[int]) -> PrefillMetadata:
        lens = [len(t) for t in prefills.values()]
        pieces = []
        for start in range(0, max(context), self.context_piece):
            part = [min(max(c - start, 0), self.context_piece) for c in context]
            pieces.append(ContextPiece(self._int32([start] * len(part)), self._cumulative(part), sum(part), max(part)))
        return PrefillMetadata(self._table(list(prefills)), self._cumulative(lens), max(lens), pieces)

    def _cumulative(self, lens: list[int]) -> torch.Tensor:
        return self._int32([0, *torch.tensor(lens).cumsum(0).tolist()])

    def step(self, decodes: dict[int, list[int]] | None = None, prefills: dict[int, list[int]] | None = None) -> torch.Tensor:
        """Hidden states [T, D] of the step's rows."""
        with torch.inference_mode():
            return self.model.forward(self.batch(decodes or {}, prefills or {}))

    def greedy(self, prompt: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens after a prompt, and the logits of every position of prompt and tokens but the last."""
        logits = [self.model.logits(self.step(prefills={0: prompt}))]
        tokens = [int(logits[0][-1].argmax())]
        for _ in range(steps - 1):
            logits.append(self.model.logits(self.step(decodes={0: [tokens[-1]]})))
            tokens.append(int(logits[-1][-1].argmax()))
        return tokens, torch.cat(logits)
