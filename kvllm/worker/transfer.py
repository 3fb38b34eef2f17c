"""Copies between the host and a device that nobody waits for. On the CPU nothing is copied twice."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import ArrayLike


def to_device(values: ArrayLike, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor of numbers in (nested) lists or a NumPy array. A GPU gets it when it comes to that point."""
    on_gpu = device.type == "cuda"
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values)  # torch would keep the order of its memory
    tensor = torch.tensor(values, dtype=dtype)
    if on_gpu:
        tensor = tensor.pin_memory()  # after the copy: torch.tensor() pins no memory for NumPy arrays
    return tensor.to(device, non_blocking=on_gpu)


def to_device_early(values: ArrayLike, device: torch.device) -> torch.Tensor:
    """The same for what comes after all that was launched: a GPU gets it meanwhile."""
    if device.type != "cuda":
        return to_device(values, device)
    uploads, current = _upload_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(uploads):
        tensor = to_device(values, device)
    current.wait_stream(uploads)
    tensor.record_stream(current)  # whose memory goes back to the other stream
    return tensor


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Download:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> torch.Tensor:
        """The copy, once it is complete."""
        if self._copied:
            self._copied.synchronize()
        return self._tensor
