"""Moving small host arrays to the device and results back, without making the host wait.

A step's metadata is a dozen short arrays. On a GPU they travel as one copy from pinned memory; on a CPU nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 16  # bytes; every array starts on a multiple, so that it can be viewed in its own dtype


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, in order. On a CPU they share memory with the arrays, which must then not change.

    On a GPU the copy is asynchronous: torch's pinned allocator keeps the staging memory until the stream has passed it.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays], out=starts[1:])
    pinned = torch.empty(max(int(starts[-1]), 1), dtype=torch.uint8, pin_memory=True)
    flat = pinned.numpy()
    for array, start in zip(arrays, starts):
        flat[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = pinned.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape) for array, start in zip(arrays, starts)
    ]


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


class HostCopy:
    """Tensors on their way to the host; `wait` blocks until they and everything before them on the stream are done.

    On a CPU the tensors are the originals: whoever reuses their memory must wait first.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        if device.type == "cuda":
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
