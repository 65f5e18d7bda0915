"""Exact latents, keys and queries to study attention on: the demo model's own, and synthetic ones with the paper's ranges.

The demo model's come from the engine itself: `LLM` in this process with an exact FP32 cache continues held-out text, and a
stand-in for ops.mla_decode keeps the queries of its decode steps and, at the end, what each layer's cache holds.

Synthetic: latents are normal times a magnitude per token, log-uniform over 30x, so that they stay near +-10 (Fig. 3a); keys'
RoPE is normal but for four channels that are large and nearly the same for every token, as outlier channels of trained models
are, up to 1e3; they shift logits more than they spread them. Queries are scaled so that logits have a standard deviation of LOGIT_STD nats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.schemes import decode_attention
from kernels import ops
from kernels.layout import BLOCK_SIZE

HELD_OUT = Path(__file__).parent / "demo_model" / "heldout.jsonl"
LOGIT_STD = 1.0
OUTLIERS = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True)
class Attention:
    """One layer, one sequence, FP32. content [L, C], rope [L, R]; queries [n, H, C] and [n, H, R]; visible int64 [n]."""

    content: torch.Tensor
    rope: torch.Tensor
    query: tuple[torch.Tensor, torch.Tensor]
    visible: torch.Tensor
    softmax_scale: float

    def to(self, device: str) -> Attention:
        """The same on another device."""
        moved = (t.to(device) for t in (self.content, self.rope, *self.query, self.visible))
        content, rope, q_content, q_rope, visible = moved
        return Attention(content, rope, (q_content, q_rope), visible, self.softmax_scale)

    def beginning(self, tokens: int, queries: int) -> Attention:
        """The same keys and queries, fewer of them; every query sees all that is left."""
        few = slice(0, queries)
        return Attention(
            self.content[:tokens], self.rope[:tokens], (self.query[0][few], self.query[1][few]),
            torch.full_like(self.visible[few], tokens), self.softmax_scale,
        )  # fmt: skip


def held_out_ids(encode: Callable[[str], list[int]]) -> dict[str, list[int]]:
    """Token ids of each held-out document by title. encode: text -> ids."""
    documents = map(json.loads, HELD_OUT.read_text(encoding="utf-8").splitlines())
    return {document["title"]: encode(document["text"]) for document in documents}


def demo_layers(lengths: Sequence[int], *, queries: int = 16, device: str = "cpu") -> Iterator[tuple[int, list[Attention]]]:
    """(length, one Attention a layer) for each length: `queries` decode steps after that much held-out text."""
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    most = max(lengths) + queries + 1
    options = {"max_model_len": most, "num_cache_blocks": most // BLOCK_SIZE + 8, "max_num_seqs": 1}
    llm = LLM(
        "demo", cache_format="fp32", dtype="float32", device=device, kernels="reference", max_num_batched_tokens=2048, **options
    )
    documents = held_out_ids(lambda text: llm.tokenizer.encode(text))
    text = [token for ids in documents.values() for token in ids]
    text = (text * (most // len(text) + 1))[:most]
    params = SamplingParams(temperature=0.0, max_tokens=queries + 1, ignore_eos=True)
    layers = llm.info.model_config.num_attention_layers
    decode = ops.mla_decode
    for length in sorted(lengths):
        seen: list[tuple] = []

        def keep(query, cache, block_table, seq_lens, *args, seen=seen, **kwargs):
            seen.append((query, cache, block_table[0].clone(), int(seq_lens[0]), kwargs["softmax_scale"]))
            return decode(query, cache, block_table, seq_lens, *args, **kwargs)

        with decode_attention(keep):
            llm.generate({"prompt_token_ids": text[:length]}, params, use_tqdm=False)
        yield length, [_captured(seen[layer::layers]) for layer in range(layers)]


def _captured(steps: list[tuple]) -> Attention:
    """One layer's decode steps, joined; the last step's table covers all keys."""
    _, cache, table, length, softmax_scale = steps[-1]
    ids = table[: -(-length // BLOCK_SIZE)].long()
    return Attention(
        cache.content[ids].flatten(0, 1)[:length],
        cache.rope[ids].flatten(0, 1)[:length],
        (torch.cat([step[0].content[0] for step in steps]), torch.cat([step[0].rope[0] for step in steps])),
        torch.tensor([step[3] for step in steps], device=cache.content.device),
        softmax_scale,
    )


def synthetic(length: int, outlier: float, *, mean: float = 0.0, heads: int = 8, queries: int = 4, seed: int = 0) -> Attention:
    """A layer with RoPE channels up to `outlier`; mean: of the latents before their magnitude, in standard deviations."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    magnitude = (torch.rand(length, 1, generator=gen) * np.log(30.0)).exp() * 0.1
    content = (normal(length, 512) + mean) * magnitude
    rope = normal(length, 64)
    channels = torch.tensor([3, 17, 35, 49])
    size = outlier * torch.tensor([1.0, -0.7, 0.5, -0.3])
    q_content, q_rope = normal(queries, heads, 512), normal(queries, heads, 64)
    if outlier > 1.0:
        rope[:, channels] = size * (1.0 + 0.05 * normal(length, 4))
    softmax_scale = 192**-0.5
    probe = slice(0, min(length, 4096))
    scores = (q_content.flatten(0, 1) @ content[probe].T + q_rope.flatten(0, 1) @ rope[probe].T) * softmax_scale
    factor = (LOGIT_STD / scores.std(-1)).view(queries, heads, 1)
    return Attention(content, rope, (q_content * factor, q_rope * factor), torch.full((queries,), length), softmax_scale)
