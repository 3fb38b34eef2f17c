"""The inputs of a step, in one piece of memory: a single copy takes them to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from kvllm.attention.base import AttentionBatch
from kvllm.worker.attention_state import RaggedLengths
from kvllm.worker.state import BlockTables, SequenceState

ALIGNMENT = 64
"""Bytes. Triton compiles its kernels anew for pointers that are aligned otherwise."""


class InputShape(NamedTuple):
    """rows: of queries. width: columns of the block tables. heads: layers and KV heads, if their lengths differ.
    observed: whether attention is added up."""

    rows: int
    sequences: int
    width: int
    heads: tuple[int, int] | None = None
    observed: bool = False

    @property
    def num_bytes(self) -> int:
        return max(end for *_, end in self.layout())

    def layout(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        """Name, type and size of every tensor, its first byte and the one behind its last."""
        begin = 0
        for name, dtype, size in self._tensors():
            end = begin + dtype.itemsize * prod(size)
            yield name, dtype, size, begin, end
            begin = -(-end // ALIGNMENT) * ALIGNMENT

    def _tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        for name in ("token_ids", "positions", "slots"):
            yield name, torch.int64, (self.rows,)
        yield "query_start_loc", torch.int32, (self.sequences + 1,)
        yield "last_kv_index", torch.int32, (self.rows,)
        yield "block_tables", torch.int32, (self.sequences, self.width)
        if self.heads:
            layers, kv_heads = self.heads
            yield "packed_len", torch.int32, (self.sequences,)
            yield "head_lengths", torch.int32, (layers, self.sequences, kv_heads)
        if self.observed:
            yield "table_rows", torch.int32, (self.sequences,)


class StepInputs:
    """Views of `memory`, uint8: the tensors of an AttentionBatch; and token ids, positions, slots, int64 `[rows]`."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    last_kv_index: torch.Tensor
    block_tables: torch.Tensor
    packed_len: torch.Tensor | None = None
    head_lengths: torch.Tensor | None = None
    table_rows: torch.Tensor | None = None

    def __init__(self, shape: InputShape, memory: torch.Tensor) -> None:
        self.shape = shape
        self.memory = memory[: shape.num_bytes]
        for name, dtype, size, begin, end in shape.layout():
            setattr(self, name, memory[begin:end].view(dtype).view(size))

    def to(self, device: torch.device) -> StepInputs:
        """A copy that nobody waits for; on the CPU these inputs themselves."""
        if device.type == "cpu":
            return self
        return StepInputs(self.shape, self.memory.to(device, non_blocking=True))

    def attention_batch(self) -> AttentionBatch:
        return AttentionBatch(
            self.query_start_loc,
            self.last_kv_index,
            self.block_tables,
            self.packed_len,
            self.head_lengths,
            self.table_rows,
        )


class HostInputs:
    """Writes the inputs of a batch: first what follows from the sequences' lengths, then what only a plan tells.

    The shape may have room for more sequences of one row each. These store nothing and attend a single entry; what they
    attend to is added up behind the rows of all sequences.
    """

    def __init__(self, shape: InputShape, memory: torch.Tensor) -> None:
        self.shape = shape
        self.tensors = StepInputs(shape, memory)
        self._arrays = {name: getattr(self.tensors, name).numpy() for name, *_ in shape.layout()}

    @property
    def memory(self) -> torch.Tensor:
        return self.tensors.memory

    @classmethod
    def allocate(cls, shape: InputShape, device: torch.device) -> HostInputs:
        """In memory that `device` can read."""
        return cls(shape, torch.empty(shape.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"))

    def place(
        self, states: list[SequenceState], num_tokens: np.ndarray, tables: BlockTables, ragged: RaggedLengths | None
    ) -> None:
        """The next `num_tokens[i]` tokens of each sequence."""
        starts = np.concatenate([[0], np.cumsum(num_tokens)])
        offset = np.arange(starts[-1]) - np.repeat(starts[:-1], num_tokens)
        rows = np.array([state.row for state in states])
        cached = np.array([state.cached_length for state in states])
        logical = np.array([state.logical_length for state in states])
        self._rows = np.repeat(rows, num_tokens)
        self._index = np.repeat(cached, num_tokens) + offset
        self._write("positions", np.repeat(logical, num_tokens) + offset)
        self._write("last_kv_index", self._index)
        self._write("block_tables", tables.table[rows, : self.shape.width])
        spare = self.shape.sequences - len(states)
        self._write("query_start_loc", np.concatenate([starts, starts[-1] + 1 + np.arange(spare)]))
        if ragged:
            self._write("packed_len", ragged.packed_len[rows])
            self._write("head_lengths", ragged.head_lengths[:, rows], axis=1)
        if self.shape.observed:
            self._write("table_rows", rows, spare=len(tables.table))

    def refresh(self, sequences: Iterable[int], tables: BlockTables) -> None:
        """Tables that have grown since they were placed, of sequences with one row each."""
        for i in sequences:
            self._arrays["block_tables"][i] = tables.table[self._rows[i], : self.shape.width]

    def complete(self, states: list[SequenceState], num_tokens: np.ndarray, tables: BlockTables) -> None:
        """The tokens themselves, and where they are stored."""
        token_ids: list[int] = []
        for state, count in zip(states, num_tokens.tolist(), strict=True):
            token_ids += state.token_ids[state.logical_length : state.logical_length + count]
        self._write("token_ids", token_ids)
        self._write("slots", tables.slots(self._rows, self._index), spare=-1)

    def _write(self, name: str, values: list[int] | np.ndarray, *, axis: int = 0, spare: int = 0) -> None:
        array = np.moveaxis(self._arrays[name], axis, 0)
        values = np.moveaxis(np.asarray(values), axis, 0)
        array[: len(values)] = values
        array[len(values) :] = spare
