"""What sampling needs beside the choice of a token, which is `ops.choose_tokens`: log probabilities, and the history that
penalties count. Pure functions over tensors, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.layout import SamplingTable


@dataclass(frozen=True)
class TokenScores:
    """Log probabilities of n tokens under the raw distribution, their ranks (1 is best), and the best alternatives.

    logprob FP32 [n], rank int64 [n], top_ids int64 [n, k], top_logprobs FP32 [n, k]
    """

    logprob: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def score(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenScores:
    """Log-softmax of raw logits [n, vocab] FP32 at `tokens` int64 [n], ranks, and the num_top best alternatives."""
    norm = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return TokenScores((chosen - norm)[:, 0], (logits > chosen).sum(-1) + 1, top.indices, top.values - norm)


def count_tokens(table: SamplingTable, rows: torch.Tensor, tokens: torch.Tensor, live: torch.Tensor | None) -> None:
    """Add tokens, int64 [n], to the histories of their rows, int64 [n]. live: bool [n], False where a token was dropped."""
    counted = tokens >= 0 if live is None else live & (tokens >= 0)
    table.history.view(-1).scatter_add_(0, rows * table.vocab_size + tokens.clamp(min=0), counted.to(torch.int32))
