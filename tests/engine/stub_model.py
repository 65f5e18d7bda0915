"""A model whose output depends on every cached token, small enough to be computed by hand.

With x(p) = embedding[token p] * cos(p): hidden(p) = 2 x(p) + sum over q <= p of x(q) / sqrt(p + 1); logits = hidden @ head.
It reads the whole past through the paged cache exactly as a real model is told to: wrong slots, tables, lengths or context
pieces change its tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from kernels.layout import BLOCK_SIZE, CacheFormat
from models.batch import ForwardBatch
from models.config import ModelConfig, RopeConfig
from models.parallel import ParallelContext

VOCAB, WIDTH = 50, 16


def stub_config(**changes: object) -> ModelConfig:
    values = {
        "family": "deepseek", "architecture": "Stub", "vocab_size": VOCAB, "hidden_size": WIDTH, "num_heads": 2, "num_decoder_layers": 1,
        "num_attention_layers": 1, "q_lora_rank": None, "kv_lora_rank": WIDTH, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "intermediate_size": 16, "moe": None, "rope": RopeConfig(1e4, None), "softmax_scale": 0.25, "rms_norm_eps": 1e-6, "latent_norm_eps": 1e-6,
        "q_norm_factor": 1.0, "latent_norm_factor": 1.0, "max_position_embeddings": 1024, "num_mtp_layers": 0, "tie_word_embeddings": False,
        "announces_fp8": False,
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


class StubModel:
    """Stands in for CausalLM. broken_token: hidden states of sequences that contain it are NaN."""

    def __init__(self, device: torch.device | str = "cpu", broken_token: int = -1) -> None:
        generator = torch.Generator().manual_seed(11)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator).to(device)
        self.head = torch.randn(VOCAB, WIDTH, generator=generator).to(device)
        if broken_token >= 0:
            self.embedding[broken_token] = torch.nan
        self.rows_of_logits: list[int] = []

    def _fetch(self, batch: ForwardBatch, table: torch.Tensor, start: int, length: int) -> torch.Tensor:
        content = batch.caches[0].content
        at = torch.arange(start, start + length, device=content.device)
        return content[table[at // BLOCK_SIZE].long(), at % BLOCK_SIZE]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        meta = batch.attention
        x = self.embedding[batch.input_ids] * batch.positions.cos()[:, None]
        live = meta.slots >= 0
        batch.caches[0].content.view(-1, WIDTH)[meta.slots[live]] = x[live]
        hidden = torch.zeros_like(x)
        for row in range(meta.num_decode_seqs):
            hidden[row] = self._fetch(batch, meta.block_table[row], 0, int(meta.seq_lens[row])).sum(0)
        if meta.prefill is not None:
            pre = meta.prefill
            ends = (pre.cu_lens_q + meta.num_decode_tokens).tolist()
            for i, (start, end) in enumerate(itertools.pairwise(ends)):
                hidden[start:end] = x[start:end].cumsum(0)
                for piece in pre.context:
                    size = int(piece.cu_lens[i + 1] - piece.cu_lens[i])
                    hidden[start:end] += self._fetch(batch, pre.block_table[i], int(piece.starts[i]), size).sum(0)
                    assert size <= piece.max_len and int(piece.cu_lens[-1]) == piece.total
            assert max(b - a for a, b in itertools.pairwise(ends)) == pre.max_len_q
        return 2 * x + hidden / (batch.positions[:, None] + 1).sqrt()

    def expert_load(self) -> None:
        """It has no experts."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows_of_logits.append(len(hidden))
        return hidden @ self.head.T

    def expected_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), VOCAB], straight from the definition."""
        x = self.embedding[torch.tensor(tokens)] * torch.arange(len(tokens)).cos()[:, None]
        count = torch.arange(1, len(tokens) + 1)[:, None]
        return (2 * x + x.cumsum(0) / count.sqrt()) @ self.head.T

    def expected_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.expected_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def stub_runner(
    model: StubModel, *, num_blocks: int = 40, max_num_seqs: int = 8, max_model_len: int = 1024, **kw: object
) -> ModelRunner:
    device, config = model.head.device, stub_config()
    cache = KVCache.allocate(config, CacheFormat.FP32, num_blocks, device)
    for layer in cache.layers:
        layer.content.fill_(torch.nan)  # whatever is read without having been written shows
    return ModelRunner(
        model, config, cache, ParallelContext.single(),  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, device=device, **kw,  # type: ignore[arg-type]
    )  # fmt: skip
