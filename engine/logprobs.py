"""Log probabilities of tokens, as pure functions over tensors, on any device. Their choice is `ops.choose_tokens`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
