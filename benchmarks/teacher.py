"""The demo model told what to say: logits of known text, computed by the decode path through a cache.

Every token is a decode row of its own that reads the latents of all tokens up to itself from the cache, exactly as if the
text were generated token by token; up to CHUNK tokens share a forward pass, as sequences over one block table whose lengths
differ. Prefill, where asked for, is the engine's expanded form and reads nothing from the cache.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.hub import resolve_model
from kernels import ops
from kernels.layout import BLOCK_SIZE, CacheFormat, LatentCache
from models.batch import AttentionMetadata, ForwardBatch, PrefillMetadata
from models.causal_lm import CausalLM, load_model
from models.config import ModelConfig, load_model_config
from models.parallel import ParallelContext

CHUNK = 64  # tokens of a forward pass
ROWS = 4  # query rows a sequence: the most that mla_decode takes


def load_demo(device: str, max_model_len: int) -> tuple[CausalLM, ModelConfig, Path]:
    """The bundled model in FP32 on a CPU, in BF16 on a GPU, its config and folder."""
    folder = resolve_model("demo")
    config = load_model_config(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load_model(
        folder,
        config,
        ParallelContext.single(),
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        progress=lambda *_: None,
    )
    return model, config, folder


class Teacher:
    """One sequence over one cache. `length` tokens are in it and may be set back to drop the rest."""

    def __init__(self, model: CausalLM, config: ModelConfig, fmt: CacheFormat, max_tokens: int, device: str) -> None:
        blocks = -(-max_tokens // BLOCK_SIZE)
        self.model, self.fmt, self.device, self.length = model, fmt, device, 0
        self._heads = config.num_heads
        self._table = torch.arange(blocks, dtype=torch.int32, device=device)
        self.caches = [
            LatentCache.allocate(fmt, blocks, config.kv_lora_rank, config.qk_rope_head_dim, device)
            for _ in range(config.num_attention_layers)
        ]

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> None:
        """Put an empty cache's first tokens in, all at once."""
        assert self.length == 0, "prefill is the first thing"
        cu = torch.tensor([0, len(ids)], dtype=torch.int32, device=self.device)
        self._forward(ids, 0, 1, None, PrefillMetadata(self._table.view(1, -1), cu, len(ids)))

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """FP32 [n, V] after each of the next tokens, read through the cache."""
        return torch.cat([self._decode(ids[start : start + CHUNK]) for start in range(0, len(ids), CHUNK)])

    def _decode(self, ids: list[int]) -> torch.Tensor:
        full = len(ids) // ROWS * ROWS  # a rest of one to three tokens runs as sequences of one row
        parts = [(ids[:full], ROWS), (ids[full:], 1)]
        hidden = [
            self._forward(part, len(part) // rows, rows, self._ends(len(part), rows), None) for part, rows in parts if part
        ]
        return self.model.logits(torch.cat(hidden))

    def _ends(self, count: int, rows: int) -> torch.Tensor:
        return torch.arange(rows, count + 1, rows, dtype=torch.int32, device=self.device) + self.length

    def _forward(
        self, ids: list[int], sequences: int, rows: int, seq_lens: torch.Tensor | None, prefill: PrefillMetadata | None
    ) -> torch.Tensor:
        positions = torch.arange(self.length, self.length + len(ids), device=self.device)
        plan = None
        if seq_lens is None:
            sequences, seq_lens = 0, torch.zeros(0, dtype=torch.int32, device=self.device)
        else:
            plan = ops.plan_decode(seq_lens, query_len=rows, num_heads=self._heads, fmt=self.fmt)
        meta = AttentionMetadata(
            num_decode_seqs=sequences,
            query_len=rows,
            slots=positions,  # block i of the sequence is block i of the cache
            block_table=self._table.expand(sequences, -1).contiguous(),
            seq_lens=seq_lens,
            num_query=None,
            decode_plan=plan,
            prefill=prefill,
        )
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.device)
        self.length += len(ids)
        return self.model.forward(ForwardBatch(tokens, positions, meta, self.caches, ep_rows=len(ids)))
