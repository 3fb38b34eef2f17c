"""The tensors of a step's inputs, as views of one piece of memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from kvllm.attention.base import AttentionBatch, HostRows, Recording

ALIGNMENT = 64
"""Bytes. Triton compiles its kernels anew for pointers that are aligned otherwise."""
OF_PARTS = ("slot_mapping", "last_kv_index")
"""Tensors with a row for each part of the KV groups."""
LOGIT_TOKENS = "logit_tokens"
"""The query tokens that have logits."""


class StepTensor(NamedTuple):
    """An int32 tensor `[*before, S, *after]` of a feature, which attention gets as the field of its name in the
    AttentionBatch of the first part; or one with a row for each of the first `parts`, which get these.

    padding: for what fills up a batch.
    """

    name: str
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    padding: int = 0
    parts: int = 0

    def of_part(self, inputs: StepInputs, part: int) -> torch.Tensor | None:
        """None: it does not stand beside this part."""
        tensor = inputs.by_name[self.name]
        return None if part >= max(1, self.parts) else tensor[part] if self.parts else tensor


class InputShape(NamedTuple):
    """num_blocks: columns of the block tables of each part of the KV groups. tensors: those of features.
    num_logits: query tokens with logits, if inputs say which, as those of decodes need not; 0: they do not."""

    num_query_tokens: int
    num_seqs: int
    num_blocks: tuple[int, ...]
    tensors: tuple[StepTensor, ...] = ()
    num_logits: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one query token."""
        return self.num_query_tokens == self.num_seqs

    @property
    def num_bytes(self) -> int:
        return max(end for *_, end in self.layout())

    @property
    def of_parts(self) -> set[str]:
        """Tensors with a row for each part of the KV groups, which begins at a multiple of ALIGNMENT."""
        return {*OF_PARTS, *(tensor.name for tensor in self.tensors if tensor.parts)}

    def layout(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        """Name, type and size of every tensor, its first byte and the one after its last."""
        begin, of_parts = 0, self.of_parts
        for name, dtype, size in self._tensors():
            rows, sizes = (size[0], size[1:]) if name in of_parts else (1, size)
            end = begin + rows * _aligned(dtype.itemsize * prod(sizes))
            yield name, dtype, size, begin, end
            begin = end

    def _tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        parts = len(self.num_blocks)
        for name in ("token_ids", "positions"):
            yield name, torch.int64, (self.num_query_tokens,)
        if self.num_logits and not self.is_decode:
            yield LOGIT_TOKENS, torch.int64, (self.num_logits,)
        yield "query_start_loc", torch.int32, (self.num_seqs + 1,)
        yield "slot_mapping", torch.int64, (parts, self.num_query_tokens)
        yield "last_kv_index", torch.int32, (parts, self.num_query_tokens)
        for tensor in self.tensors:
            rows = (tensor.parts,) if tensor.parts else ()
            yield tensor.name, torch.int32, (*rows, *tensor.before, self.num_seqs, *tensor.after)
        for part, num_blocks in enumerate(self.num_blocks):  # these last: see StepInputs.take
            yield f"block_tables_{part}", torch.int32, (self.num_seqs, num_blocks)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PartInputs(NamedTuple):
    """The inputs that the parts of KV groups do not share."""

    slot_mapping: torch.Tensor
    last_kv_index: torch.Tensor
    block_tables: torch.Tensor


class StepInputs:
    """Views of `memory`, uint8: token ids and positions, int64 `[num_query_tokens]`; and the tensors of an
    AttentionBatch, with a row for each part of the KV groups in `slot_mapping` (int64 `[parts, num_query_tokens]`) and
    `last_kv_index`. `parts` has these row by row.

    by_name: all tensors, those of features too. on_host: for a copy on a device, the inputs that it is of.
    recordings: one for each part, where a graph reads them.
    """

    def __init__(self, shape: InputShape, memory: torch.Tensor) -> None:
        self.shape = shape
        self.on_host: StepInputs | None = None
        self.recordings: list[Recording | None] = [None] * len(shape.num_blocks)
        self.memory = memory[: shape.num_bytes]
        self.by_name: dict[str, torch.Tensor] = {}
        of_parts = shape.of_parts
        for name, dtype, size, begin, end in shape.layout():
            sizes = size[1:] if name in of_parts else size
            rows = memory[begin:end].view(dtype).view(size[0] if name in of_parts else 1, -1)[:, : prod(sizes)]
            self.by_name[name] = rows if name in of_parts else rows[0].view(size)
        self.token_ids, self.positions = self.by_name["token_ids"], self.by_name["positions"]
        self.query_start_loc = self.by_name["query_start_loc"]
        self.slot_mapping, self.last_kv_index = (self.by_name[name] for name in OF_PARTS)
        self.parts = [self._part(index) for index in range(len(shape.num_blocks))]
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str) -> np.ndarray:
        """A tensor on the host as an array in the same memory."""
        if name not in self._arrays:
            self._arrays[name] = self.by_name[name].numpy()
        return self._arrays[name]

    def write_tokens(self, token_ids: np.ndarray) -> None:
        """The query tokens of the step, int64; fewer than there is room for are filled up."""
        write(self.array("token_ids"), token_ids)

    def write_logit_tokens(self, tokens: np.ndarray) -> None:
        """The query tokens that have logits, if it is not each one; fewer than there is room for are filled up."""
        if not self.shape.is_decode:
            write(self.array(LOGIT_TOKENS), tokens)

    def clear(self) -> None:
        """Become the inputs of a step without sequences: nothing is stored."""
        self.memory.zero_()
        self.slot_mapping.fill_(-1)
        for tensor in self.shape.tensors:
            self.by_name[tensor.name].fill_(tensor.padding)
        if self.shape.is_decode:
            self.query_start_loc.copy_(torch.arange(len(self.query_start_loc)))
        else:
            self.query_start_loc[1:] = self.shape.num_query_tokens

    def to(self, device: torch.device) -> StepInputs:
        """A copy that nobody waits for; on the CPU these inputs themselves."""
        if device.type == "cpu":
            return self
        copy = StepInputs(self.shape, self.memory.to(device, non_blocking=True))
        copy.on_host = self
        return copy

    def take(self, source: StepInputs) -> None:
        """Become copies of inputs on the host whose block tables may have fewer columns. What the columns after them
        hold stays. Nobody waits for that."""
        self.on_host = source
        [begin] = [begin for name, _, _, begin, _ in self.shape.layout() if name == "block_tables_0"]
        self.memory[:begin].copy_(source.memory[:begin], non_blocking=True)
        for part, given in zip(self.parts, source.parts, strict=True):
            part.block_tables[:, : given.block_tables.shape[1]].copy_(given.block_tables, non_blocking=True)

    def _part(self, index: int) -> PartInputs:
        return PartInputs(self.slot_mapping[index], self.last_kv_index[index], self.by_name[f"block_tables_{index}"])

    def fields(self) -> list[dict[str, Any]]:
        """Those of the AttentionBatch of each part that are here."""
        found = []
        for index, part in enumerate(self.parts):
            fields: dict[str, Any] = {
                "query_start_loc": self.query_start_loc,
                "last_kv_index": part.last_kv_index,
                "block_tables": part.block_tables,
                "on_host": self._rows_on_host(index),
                "recording": self.recordings[index],
            }
            for tensor in self.shape.tensors:
                fields[tensor.name] = tensor.of_part(self, index)
            found.append(fields)
        return found

    def batches(self) -> list[AttentionBatch]:
        """Those of all parts, without what features add to them."""
        return [AttentionBatch(**fields) for fields in self.fields()]

    def _rows_on_host(self, part: int) -> HostRows | None:
        if self.on_host is None:
            return None
        return HostRows(self.on_host.array("query_start_loc"), self.on_host.array("last_kv_index")[part])


def write(array: np.ndarray, values: list[int] | np.ndarray, *, padding: int = 0) -> None:
    """`values`, then `padding`, along the first dimension."""
    array[: len(values)] = values
    if len(values) < len(array):
        array[len(values) :] = padding


def write_rows(array: np.ndarray, values: np.ndarray, *, padding: int = 0) -> None:
    """Rows of `values`, each followed by `padding`."""
    count = values.shape[1]
    array[:, :count] = values
    if count < array.shape[1]:
        array[:, count:] = padding
