"""Gated MLP, its hidden units split over the replica."""

from __future__ import annotations

import torch

from kernels import ops
from kernels.layout import Rows
from models.layers.norm import InputNorm, RMSNorm
from models.parallel import ParallelContext
from models.weights import Part, Weights


class MLP:
    """gate_up: [2 I / tp, D], the two halves one above the other; down: [D, I / tp]."""

    def __init__(self, weights: Weights, hidden: int, inter: int, parallel: ParallelContext) -> None:
        share = parallel.tp_rank, parallel.tp
        self.gate_up = weights.matrix(*(Part.of_rows(n, inter, hidden, *share) for n in ("gate_proj", "up_proj")))
        self.down = weights.matrix(Part.of_cols("down_proj", hidden, inter, *share))
        self.parallel = parallel

    def input_norm(self, norm: RMSNorm) -> InputNorm:
        """`norm` as it makes this layer's rows."""
        return InputNorm(norm, self.gate_up)

    def __call__(self, x: Rows) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        return self.parallel.tp_all_reduce(ops.gated_mlp(x, self.gate_up, self.down))
