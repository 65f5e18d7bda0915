"""Moving small host arrays to the device and results back, without making the host wait.

A step's metadata is a dozen short arrays. On a GPU they travel as one copy from pinned memory; on a CPU nothing moves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_ALIGN = 16  # bytes; every array starts on a multiple, as kernels that read several values at once like it


@dataclass(frozen=True)
class _Group:
    """Arrays of one dtype, beside each other in the packed bytes.

    indices: of the arrays; first, end: bytes; sizes: elements of each array and of the padding behind it, in turn
    """

    dtype: torch.dtype
    indices: list[int]
    first: int
    end: int
    sizes: list[int]
    paddings: list[np.ndarray]


@functools.lru_cache(maxsize=512)  # a step's arrays have the sizes of the step before, mostly
def _layout(shape: tuple[tuple[np.dtype, int], ...]) -> list[_Group]:
    """Where arrays of these dtypes and sizes lie, each at a multiple of _ALIGN."""
    groups, first = [], 0
    for dtype in dict.fromkeys(dtype for dtype, _ in shape):
        indices = [i for i, (other, _) in enumerate(shape) if other == dtype]
        unit, end, sizes, paddings = _ALIGN // dtype.itemsize, first, [], []
        for i in indices:
            size = shape[i][1]
            sizes += [size, -size % unit]
            paddings.append(np.zeros(-size % unit, dtype))
            end += (size + -size % unit) * dtype.itemsize
        groups.append(_Group(torch.from_numpy(np.empty(0, dtype)).dtype, indices, first, end, sizes, paddings))
        first = end
    return groups


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, in order. On a CPU they share memory with the arrays, which must then not change.

    On a GPU the copy is asynchronous: torch's pinned allocator keeps the staging memory until the stream has passed it.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    groups = _layout(tuple((array.dtype, array.size) for array in arrays))
    return _unpacked(arrays, groups, _packed(arrays, groups).to(device, non_blocking=True))


def _packed(arrays: Sequence[np.ndarray], groups: list[_Group]) -> torch.Tensor:
    """uint8, pinned where there is a GPU: the arrays' bytes."""
    pinned = torch.empty(max(groups[-1].end, 1) if groups else 1, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    flat = pinned.numpy()
    for group in groups:
        parts = []
        for i, padding in zip(group.indices, group.paddings):
            parts += [arrays[i].reshape(-1), padding]
        np.concatenate(parts, out=flat[group.first : group.end].view(padding.dtype))
    return pinned


def _unpacked(arrays: Sequence[np.ndarray], groups: list[_Group], moved: torch.Tensor) -> list[torch.Tensor]:
    """Views of the packed bytes. Few calls for all of them: a step of a small model is bound by what the host does."""
    found: dict[int, torch.Tensor] = {}
    for group in groups:
        found |= zip(group.indices, moved[group.first : group.end].view(group.dtype).split_with_sizes(group.sizes)[::2])
    return [found[i] if array.ndim == 1 else found[i].view(array.shape) for i, array in enumerate(arrays)]


class HostCopy:
    """Tensors on their way to the host; `wait` blocks until they and everything before them on the stream are done. Their
    memory may be used again by whatever is enqueued next."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        device = tensors[0].device if tensors else torch.device("cpu")
        if device.type == "cpu":
            self._tensors = [t.clone() for t in tensors]
        else:
            self._tensors = [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors
