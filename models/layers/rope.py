"""The table of rotary angles, with YaRN; built once per model."""

from __future__ import annotations

import math

import torch

from models.config import RopeConfig, YarnConfig


def rope_table(rope: RopeConfig, dim: int, num_positions: int, device: torch.device | str) -> torch.Tensor:
    """FP32 [num_positions, dim]: cosines then sines, each times YaRN's angle factor.

    Angles are FP32 products of position and frequency, as the models were trained with.
    """
    if torch.device(device).type == "meta":  # where torch would load its compiler for an arange, which takes seconds
        return torch.empty(num_positions, dim, device=device)
    frequency = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    factor = 1.0
    if rope.yarn is not None:
        frequency = _yarn_frequency(frequency, rope.theta, dim, rope.yarn)
        factor = rope.yarn.angle_factor
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device=device), frequency)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(factor)


def _yarn_frequency(frequency: torch.Tensor, theta: float, dim: int, yarn: YarnConfig) -> torch.Tensor:
    """Fast dimensions keep their frequency, slow ones are divided by the factor, a linear ramp lies between."""

    def dim_of_turns(turns: float) -> float:
        """The pair that makes `turns` turns over the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of_turns(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=frequency.device) - low) / max(high - low, 0.001)
    slow = ramp.clamp(0, 1)
    return frequency / yarn.factor * slow + frequency * (1 - slow)
