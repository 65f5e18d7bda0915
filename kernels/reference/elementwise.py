"""RMSNorm, rotary embedding and the gated activation, all in FP32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the last dimension in FP32, not rounded to x's dtype."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        x = x + residual
    return normalize(x, weight, eps).to(x.dtype), x


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """`rope` in FP32, not rounded to x's dtype."""
    angles = cos_sin.index_select(0, positions)
    if x.ndim == 3:
        angles = angles.unsqueeze(1)
    cos, sin = angles.chunk(2, dim=-1)
    x = x.float()
    if interleaved:  # each pair is a complex number, turned by cos + i sin
        if x.storage_offset() % 2 or any(stride % 2 for stride in x.stride()[:-1]):
            x = x.contiguous()
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool, in_place: bool = False
) -> torch.Tensor:
    rotated = rotate(x, positions, cos_sin, interleaved=interleaved)
    return x.copy_(rotated) if in_place else rotated.to(x.dtype)


def join_heads(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    return torch.cat((own, shared.unsqueeze(1).expand(-1, own.shape[1], -1)), dim=-1)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return F.silu(gate).mul_(up)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)
