"""Advice to the kernel about the memory pages of tensors on the CPU."""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""None where the system has no such pages."""


def use_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages after a contiguous tensor on the CPU, best before it is first written. Returns the tensor.

    One core reads memory at 1.2 to 1.4 times the speed when a page is 2 MiB instead of 4 KiB: the processor finds the
    address of a page less often. Linux gives huge pages only to those who ask ("madvise" in
    /sys/kernel/mm/transparent_hugepage/enabled, the default of most distributions). A request that the system declines
    changes nothing.
    """
    if HUGE is not None and tensor.device.type == "cpu" and not tensor.is_meta:
        _advise(tensor, HUGE)
    return tensor


def forget_pages(tensor: torch.Tensor) -> None:
    """Give back the memory after a contiguous tensor that views a file, which is read again where it is still needed.

    A page of a file that was read counts as memory of the process. Of any other tensor, the values are lost.
    """
    _advise(tensor, mmap.MADV_DONTNEED)


def _advise(tensor: torch.Tensor, advice: int) -> None:
    """Tell the kernel about all pages that hold nothing but the tensor."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
