"""Memory of a device, and accesses to it that nothing orders.

Time is a vector clock: of each stream, how many of its operations come before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

UNIT = 4
"""Bytes that are told apart."""
MOST_STREAMS = 16

Units = slice | np.ndarray
"""Places in a storage, in units."""
Clock = np.ndarray
"""int64 `[MOST_STREAMS]`."""


def new_clock() -> Clock:
    return np.zeros(MOST_STREAMS, dtype=np.int64)


class Storage:
    """Memory of one allocation, as long as a tensor has it, and who read and wrote it last.

    stream: that it was allocated on, by its number. recorded: others that it is not given back before.

    As long as all accesses come from one stream, only the last ones are kept.
    """

    def __init__(self, num_bytes: int, stream: int, freed: Callable[[Storage], None]) -> None:
        self.num_bytes = num_bytes
        self.stream = stream
        self.recorded: list[int] = []
        self._freed = freed
        self._user = -1
        self._last_write = self._last_read = 0
        self._by_unit: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        """Of each unit: the stream that wrote it, or -1, and when; and when each stream read it since."""

    @property
    def is_shared(self) -> bool:
        """Whether several streams have used it."""
        return self._by_unit is not None

    def __del__(self) -> None:
        self._freed(self)

    def access(self, units: Callable[[], Units], stream: int, clock: Clock, *, writes: bool) -> str | None:
        """Note an access by the last operation of a stream. Returns what is wrong with it."""
        if self._by_unit is None and self._user not in (-1, stream):
            self._tell_apart()
        if self._by_unit is None:
            self._user = stream
            if writes:
                self._last_write = clock[stream]
            else:
                self._last_read = clock[stream]
            return None
        where = units()
        writers, written, read = self._by_unit
        problem = self._unordered(where, clock, with_reads=writes)
        if writes:
            writers[where], written[where] = stream, clock[stream]
            read[:, where] = 0
        else:
            read[stream, where] = clock[stream]
        return problem

    def unordered(self, clock: Clock) -> str | None:
        """What is still under way at some time, other than what is recorded, if anything is."""
        if self._by_unit is None and self._user not in (-1, self.stream):
            self._tell_apart()
        clock = clock.copy()
        clock[self.recorded] = np.iinfo(np.int64).max
        return self._unordered(slice(None), clock, with_reads=True) if self._by_unit else None

    def _unordered(self, where: Units, clock: Clock, *, with_reads: bool) -> str | None:
        assert self._by_unit
        writers, written, read = (array[..., where] for array in self._by_unit)
        late = (writers >= 0) & (written > clock[writers])
        if late.any():
            return f"what stream {writers[late][0]} writes"
        if with_reads and (late_reads := (read > clock[:, None]).any(axis=1)).any():
            return f"what stream {late_reads.argmax()} reads"
        return None

    def _tell_apart(self) -> None:
        count = -(-self.num_bytes // UNIT)
        self._by_unit = (
            np.full(count, self._user if self._last_write else -1, dtype=np.int64),
            np.full(count, self._last_write, dtype=np.int64),
            np.zeros((MOST_STREAMS, count), dtype=np.int64),
        )
        self._by_unit[2][self._user] = self._last_read


def units_of(tensor: torch.Tensor) -> Units:
    """Those that a tensor has in its storage."""
    first, size = tensor.storage_offset() * tensor.itemsize, tensor.itemsize
    if tensor.is_contiguous():
        return slice(first // UNIT, -(-(first + tensor.numel() * size) // UNIT))
    return units_at(offsets_of(tensor), size)


def units_at(offsets: np.ndarray, itemsize: int) -> np.ndarray:
    """Those of elements, by their offsets in a storage."""
    begin = offsets.reshape(-1) * itemsize // UNIT
    return np.concatenate([begin + i for i in range(max(1, itemsize // UNIT))])


def offsets_of(tensor: torch.Tensor) -> np.ndarray:
    """Of all elements in the storage, int64 of the tensor's shape."""
    offsets = np.array(tensor.storage_offset(), dtype=np.int64)
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size) * stride
    return offsets


INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_select.default,
    torch.ops.aten.index_select.out,
}
"""Operations on some elements of their first argument."""


def indexed_units(func: Any, args: Any) -> np.ndarray:
    """Those of the elements that one of `INDEXED` reads or writes in its first argument."""
    numbers = torch.from_numpy(offsets_of(args[0]))
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        found = torch.ops.aten.index.Tensor(numbers, args[1])
    else:
        found = numbers.index_select(*args[1:3])
    return units_at(found.numpy(), args[0].itemsize)
