"""The tensors of a step's inputs, as views of one piece of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, cast

import numpy as np
import torch

from kvllm.attention.base import AttentionBatch, HostRows, Recording, ScoredChunk, ScoreWindows
from kvllm.kvcache.residual import ResidualStep

ALIGNMENT = 64
"""Bytes. Triton compiles its kernels anew for pointers that are aligned otherwise."""
OF_PARTS = ("slot_mapping", "last_kv_index", "window_start")
"""Tensors with a row for each part of the KV groups."""


class InputShape(NamedTuple):
    """num_blocks: columns of the block tables of each part of the KV groups. heads: layers and KV heads, where these
    hold different numbers of KV pairs. observed: whether attention is added up. scored: in how many parts windows are
    scored, the first ones."""

    num_query_tokens: int
    num_seqs: int
    num_blocks: tuple[int, ...]
    heads: tuple[int, int] | None = None
    observed: bool = False
    scored: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one query token."""
        return self.num_query_tokens == self.num_seqs

    @property
    def num_bytes(self) -> int:
        return max(end for *_, end in self.layout())

    def layout(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        """Name, type and size of every tensor, its first byte and the one after its last. Of those that are in
        `OF_PARTS`, each row begins at a multiple of ALIGNMENT."""
        begin = 0
        for name, dtype, size in self._tensors():
            rows, sizes = (size[0], size[1:]) if name in OF_PARTS else (1, size)
            end = begin + rows * _aligned(dtype.itemsize * prod(sizes))
            yield name, dtype, size, begin, end
            begin = end

    def _tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        parts = len(self.num_blocks)
        for name in ("token_ids", "positions"):
            yield name, torch.int64, (self.num_query_tokens,)
        yield "query_start_loc", torch.int32, (self.num_seqs + 1,)
        yield "slot_mapping", torch.int64, (parts, self.num_query_tokens)
        yield "last_kv_index", torch.int32, (parts, self.num_query_tokens)
        if self.heads:
            layers, kv_heads = self.heads
            yield "packed_len", torch.int32, (self.num_seqs,)
            yield "head_lengths", torch.int32, (layers, self.num_seqs, kv_heads)
        if self.observed:
            yield "table_slots", torch.int32, (self.num_seqs,)
        if self.scored:
            yield "window_start", torch.int32, (self.scored, self.num_seqs)
        for part, num_blocks in enumerate(self.num_blocks):  # these last: see StepInputs.take
            yield f"block_tables_{part}", torch.int32, (self.num_seqs, num_blocks)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PartInputs(NamedTuple):
    """The inputs that the parts of KV groups do not share."""

    slot_mapping: torch.Tensor
    last_kv_index: torch.Tensor
    block_tables: torch.Tensor
    window_start: torch.Tensor | None = None


class StepInputs:
    """Views of `memory`, uint8: token ids and positions, int64 `[num_query_tokens]`; and the tensors of an
    AttentionBatch, with a row for each part of the KV groups in `slot_mapping` (int64 `[parts, num_query_tokens]`),
    `last_kv_index` and `window_start`. `parts` has these row by row.

    on_host: for a copy on a device, the inputs that it is of. recordings: one for each part, where a graph reads them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    last_kv_index: torch.Tensor
    packed_len: torch.Tensor | None = None
    head_lengths: torch.Tensor | None = None
    table_slots: torch.Tensor | None = None
    window_start: torch.Tensor | None = None

    def __init__(self, shape: InputShape, memory: torch.Tensor) -> None:
        self.shape = shape
        self.on_host: StepInputs | None = None
        self.recordings: list[Recording | None] = [None] * len(shape.num_blocks)
        self.memory = memory[: shape.num_bytes]
        for name, dtype, size, begin, end in shape.layout():
            sizes = size[1:] if name in OF_PARTS else size
            rows = memory[begin:end].view(dtype).view(size[0] if name in OF_PARTS else 1, -1)[:, : prod(sizes)]
            setattr(self, name, rows if name in OF_PARTS else rows[0].view(size))
        self.parts = [self._part(index) for index in range(len(shape.num_blocks))]
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str) -> np.ndarray:
        """A tensor on the host as an array in the same memory."""
        if name not in self._arrays:
            self._arrays[name] = cast(torch.Tensor, getattr(self, name)).numpy()
        return self._arrays[name]

    def write_tokens(self, token_ids: np.ndarray) -> None:
        """The query tokens of the step, int64; fewer than there is room for are filled up."""
        array = self.array("token_ids")
        array[: len(token_ids)] = token_ids
        array[len(token_ids) :] = 0

    def to(self, device: torch.device) -> StepInputs:
        """A copy that nobody waits for; on the CPU these inputs themselves."""
        if device.type == "cpu":
            return self
        copy = StepInputs(self.shape, self.memory.to(device, non_blocking=True))
        copy.on_host = self
        return copy

    def take(self, others: StepInputs) -> None:
        """Become copies of inputs on the host whose block tables may have fewer columns. What the columns after them
        hold stays. Nobody waits for that."""
        self.on_host = others
        [begin] = [begin for name, _, _, begin, _ in self.shape.layout() if name == "block_tables_0"]
        self.memory[:begin].copy_(others.memory[:begin], non_blocking=True)
        for part, other in zip(self.parts, others.parts, strict=True):
            part.block_tables[:, : other.block_tables.shape[1]].copy_(other.block_tables, non_blocking=True)

    def _part(self, index: int) -> PartInputs:
        block_tables = cast(torch.Tensor, getattr(self, f"block_tables_{index}"))
        window_start = self.window_start[index] if self.window_start is not None and index < self.shape.scored else None
        return PartInputs(self.slot_mapping[index], self.last_kv_index[index], block_tables, window_start)

    def batches(
        self,
        windows: ScoreWindows | None = None,
        chunks: Sequence[tuple[ScoredChunk, ...]] = (),
        residual: ResidualStep | None = None,
    ) -> list[AttentionBatch]:
        """Those of all parts. What methods keep beside the cache stands beside the first alone.

        windows: those that are scored in the first parts. chunks: of each of these, what others score; none given:
            there are none. residual: of the step.
        """
        return [
            AttentionBatch(
                self.query_start_loc,
                part.last_kv_index,
                part.block_tables,
                None if index else self.packed_len,
                None if index else self.head_lengths,
                None if index else self.table_slots,
                window_start=part.window_start,
                windows=windows if part.window_start is not None else None,
                scored_chunks=chunks[index] if index < len(chunks) else (),
                residual=residual,
                on_host=self._rows_on_host(index),
                recording=self.recordings[index],
            )
            for index, part in enumerate(self.parts)
        ]

    def _rows_on_host(self, part: int) -> HostRows | None:
        if self.on_host is None:
            return None
        return HostRows(self.on_host.array("query_start_loc"), self.on_host.array("last_kv_index")[part])
