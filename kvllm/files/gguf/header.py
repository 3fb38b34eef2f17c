"""The header of a GGUF file: metadata, and where tensors lie.

Every count, length and offset is compared with the file's size before anything is made of it: a damaged or hostile file
is refused, and takes neither memory nor time. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvllm.errors import CheckpointError
from kvllm.files.gguf.paths import MAGIC

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_BYTES = 1 << 28
"""Of a header. Those of published models, which have the vocabulary, are below 2 ** 25."""
LONGEST_STRING = 1 << 24
MOST_ITEMS = 1 << 23
"""Of an array, such as the merges of a vocabulary."""
MOST_DIMENSIONS = 4
MOST_NUMBERS = 1 << 42
SETTLED = 2 * 10**9
"""Nanoseconds after a write from which on a file is known by its size and time."""
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""The types of numbers, as `struct` writes them."""
LENGTH = struct.Struct("<Q")
TYPES = {kind.value: kind for kind in GGMLQuantizationType}


class TensorInfo(NamedTuple):
    """Where a tensor lies. shape: as torch has it. start: its first byte in the file."""

    file: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class Strings(NamedTuple):
    """An array of strings in a file. They are read when they are asked for."""

    file: Path
    start: int
    end: int

    def read(self) -> list[str]:
        """Raises CheckpointError where one is not UTF-8."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        try:
            return [data[begin:end].decode() for begin, end in _string_bounds(data, 0, len(data))]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file} has a text that is not UTF-8 ({error}): download it again") from None


class Header(NamedTuple):
    """metadata: numbers, strings, arrays of numbers as NumPy's, and `Strings`, by their keys."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _BrokenError(Exception):
    """What is wrong with a header."""


def read_header(file: Path, size: int | None = None) -> Header:
    """Read the header of a GGUF file.

    size: bytes of the whole file where only its beginning is here.

    Raises CheckpointError for what is no GGUF file, damaged, or of a version or type that is not known.
    """
    try:
        stat = file.stat()
        # Two writes of the last moments may have one time: a file that is so new is read again.
        read = _read if time.time_ns() - stat.st_mtime_ns > SETTLED else _read.__wrapped__
        return read(file.absolute(), size or stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except (_BrokenError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not a complete GGUF file: {error}. Download it again") from None


@lru_cache(maxsize=8)  # a start asks four times, and goes through each word of the vocabulary
def _read(file: Path, size: int, modified: int) -> Header:
    with file.open("rb") as opened:
        if opened.seek(0, 2) < 24:
            raise _BrokenError("it has fewer bytes than a header")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(file, data, size).header()


class _Reader:
    """Goes through the header of a file."""

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self.file, self.data, self.size = file, data, size
        self.at = 0

    def header(self) -> Header:
        num_tensors, num_values = self._start()
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in metadata:
                raise _BrokenError(f"its metadata has {key[:80]!r} twice")
            metadata[key] = self._value(self._number("<I"))
        found = {}
        for _ in range(num_tensors):
            name = self._string()
            if name in found:
                raise _BrokenError(f"it has the tensor {name[:80]!r} twice")
            found[name] = self._tensor(name)
        return Header(metadata, self._placed(found, _alignment(metadata)))

    def _start(self) -> tuple[int, int]:
        """How many tensors and values there are."""
        if self.data[:4] != MAGIC:
            raise _BrokenError("it does not begin with GGUF")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self.data, 4)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = f"version {version}" if swapped not in VERSIONS else "big-endian"
            raise CheckpointError(f"{self.file} is a GGUF file of {what}; kvllm reads version 2 and 3, little-endian")
        self.at = 24
        # A value takes at least 13 bytes, a tensor 36.
        if num_values * 13 + num_tensors * 36 > min(len(self.data), MOST_BYTES):
            raise _BrokenError(f"{num_values:,} values and {num_tensors:,} tensors are more than it has room for")
        return num_tensors, num_values

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self._skip(struct.calcsize(form))
        return value

    def _skip(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at > min(len(self.data), MOST_BYTES):
            raise _BrokenError("its header does not end where the file does, or is absurdly long")

    def _string(self) -> str:
        begin, end = next(_string_bounds(self.data, self.at, len(self.data), 1))
        self._skip(end - self.at)
        return self.data[begin:end].decode()

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise _BrokenError(f"its metadata has a value of the unknown type {kind}")
        kind, count = self._number("<I"), self._number("<Q")
        if count > MOST_ITEMS:
            raise _BrokenError(f"its metadata has an array of {count:,} items")
        start = self.at
        if kind == STRING:
            for _, end in _string_bounds(self.data, start, len(self.data), count):
                self.at = end
            self._skip(0)
            return Strings(self.file, start, self.at)
        if kind not in SCALARS:
            raise _BrokenError(f"its metadata has an array of type {kind}, which is no number and no text")
        dtype = np.dtype(SCALARS[kind])
        self._skip(count * dtype.itemsize)
        return np.frombuffer(self.data[start : self.at], dtype)

    def _tensor(self, name: str) -> TensorInfo:
        """With a start that counts from where the data begins."""
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise _BrokenError(f"{name[:80]!r} has {num_dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        kind, start = self._number("<I"), self._number("<Q")
        if 0 in shape or math.prod(shape) > MOST_NUMBERS:
            raise _BrokenError(f"{name[:80]!r} has the shape {shape}")
        if kind not in TYPES:
            raise CheckpointError(
                f"{self.file}: {name[:80]!r} has a type of number {kind}, which is not known: use another file of the "
                "model"
            )
        type = TYPES[kind]
        block, block_bytes = GGML_QUANT_SIZES[type]
        if shape[-1] % block:
            raise _BrokenError(
                f"{name[:80]!r} has rows of {shape[-1]} numbers, no multiple of {block} as {type.name} has"
            )
        return TensorInfo(self.file, type, shape, start, math.prod(shape) // block * block_bytes)

    def _placed(self, found: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors, with starts that count from where the file begins."""
        data_start = -(-self.at // alignment) * alignment
        for name, info in found.items():
            end = data_start + info.start + info.num_bytes
            if info.start % alignment or end > self.size:
                raise _BrokenError(
                    f"{name[:80]!r} lies at {info.start:,} and has {info.num_bytes:,} bytes, but there are "
                    f"{max(0, self.size - data_start):,} bytes of data, in units of {alignment}"
                )
        return {name: info._replace(start=data_start + info.start) for name, info in found.items()}


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment.bit_count() != 1 or not 8 <= alignment <= 1 << 20:
        raise _BrokenError(f"general.alignment is {alignment!r:.80}, but must be a power of two from 8 on")
    return alignment


def _string_bounds(data: Any, at: int, size: int, count: int | None = None) -> Iterator[tuple[int, int]]:
    """Where each of `count` strings begins and ends, or of those up to `size`."""
    while at < size if count is None else count > 0:
        (length,) = LENGTH.unpack_from(data, at)
        begin, at = at + 8, at + 8 + length
        if length > LONGEST_STRING or at > size:
            raise _BrokenError(f"a text of {length:,} bytes is longer than the file, or absurd")
        yield begin, at
        count = None if count is None else count - 1
