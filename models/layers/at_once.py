"""Two independent parts of a layer at the same time: one on the current stream, one on a side stream of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def at_once(
    first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results. Neither may write what the other touches, and the second must not communicate: the order of two
    streams' collectives would be each rank's own.

    Memory stays ordered without marks: whatever either stream frees, it uses again itself, after the other was waited for.
    On a CPU one follows the other.
    """
    if device.type != "cuda":
        return first(), second()
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        beside = second()
    result = first()
    current.wait_stream(side)
    return result, beside


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
