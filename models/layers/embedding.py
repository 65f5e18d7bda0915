"""Token embedding and output head, split over the vocabulary inside a replica."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import ops
from models.parallel import ParallelContext
from models.weights import Part, Weights


def _vocabulary_slice(weights: Weights, name: str, vocab: int, hidden: int, parallel: ParallelContext) -> torch.Tensor:
    """This rank's rows; the last rank's are padded with zeros to an equal share."""
    share = -(-vocab // parallel.tp)
    start = min(parallel.tp_rank * share, vocab)
    part = Part(name, vocab, hidden, (start, min(start + share, vocab)), (0, hidden))
    return weights.plain(part, padded_rows=share)


class Embedding:
    """weight: [ceil(V / tp), D]."""

    def __init__(self, weights: Weights, name: str, vocab: int, hidden: int, parallel: ParallelContext) -> None:
        self.weight = _vocabulary_slice(weights, name, vocab, hidden, parallel)
        self.parallel = parallel

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, D]."""
        if self.parallel.tp == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self.parallel.tp_rank * rows
        other = (local < 0) | (local >= rows)
        x = F.embedding(local.masked_fill(other, 0), self.weight).masked_fill(other.unsqueeze(-1), 0.0)
        return self.parallel.tp_all_reduce(x)


class Head:
    """weight: [ceil(V / tp), D], its own or the embedding's."""

    def __init__(self, weight: torch.Tensor, vocab: int, parallel: ParallelContext) -> None:
        self.weight, self.vocab, self.parallel = weight, vocab, parallel

    @staticmethod
    def load(weights: Weights, name: str, vocab: int, hidden: int, parallel: ParallelContext) -> Head:
        return Head(_vocabulary_slice(weights, name, vocab, hidden, parallel), vocab, parallel)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, D] -> FP32 logits [n, V] on every rank of the replica."""
        return self.parallel.tp_all_gather(self._local(hidden), dim=-1)[:, : self.vocab]

    def _local(self, hidden: torch.Tensor) -> torch.Tensor:
        """FP32 logits of this rank's tokens. BF16 products leave the tensor cores in FP32: rounded to BF16, the best tokens
        would often tie, and which of them is taken would depend on the batch."""
        if hidden.is_cuda and hidden.dtype is self.weight.dtype is torch.bfloat16:
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        return ops.linear(hidden, self.weight).float()
