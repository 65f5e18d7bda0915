"""RMSNorm with its weight: in general, and of rows that products read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import ops
from kernels.layout import BlockScaledWeight, Rows, Weight


@dataclass(frozen=True)
class RMSNorm:
    """weight: FP32 [D]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        return ops.rms_norm(x, self.weight, eps=self.eps, residual=residual)


@dataclass(frozen=True)
class InputNorm:
    """RMSNorm whose rows [T, D] go into products: quantized in the same pass where those are block-scaled.

    reader: weight of these products; keep_plain: whether others read the rows unquantized
    """

    norm: RMSNorm
    reader: Weight
    keep_plain: bool = False

    def __call__(self, x: torch.Tensor) -> Rows:
        return self.add(x, None)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Rows, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        if not isinstance(self.reader, BlockScaledWeight):
            return self.norm.add(x, residual)
        norm = self.norm
        return ops.rms_norm_quantized(x, norm.weight, eps=norm.eps, residual=residual, keep_plain=self.keep_plain)
