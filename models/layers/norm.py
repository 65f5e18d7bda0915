"""RMSNorm with its weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import ops


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
