"""Huge pages for large tensors on the CPU.

One core reads memory at 1.2 to 1.4 times the speed when a page is 2 MiB instead of 4 KiB: the processor finds the
address of a page less often. Linux gives huge pages only to those who ask ("madvise" in
/sys/kernel/mm/transparent_hugepage/enabled, the default of most distributions).
"""

from __future__ import annotations

import ctypes
import mmap

import torch

ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""None where the system has no such pages."""


def use_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages behind a contiguous tensor on the CPU, best before it is first written. Returns the tensor.

    A request that the system declines changes nothing.
    """
    if ADVICE is None or tensor.device.type != "cpu" or tensor.is_meta:
        return tensor
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ADVICE)
    return tensor
