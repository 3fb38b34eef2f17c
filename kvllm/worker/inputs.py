"""The inputs of a step, in one piece of memory: a single copy takes them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvllm.attention.base import AttentionBatch, HostRows
from kvllm.worker.features.base import StepFeature
from kvllm.worker.state import BlockTables, PartTables, SequenceState
from kvllm.worker.step_inputs import InputShape, StepInputs, write, write_rows
from kvllm.worker.transfer import to_device

AHEAD = 2
"""Steps whose inputs may be on their way to the device while those of the next one are written."""


class InputPreparer:
    """Prepares the inputs of steps in the host's memory, from the sequences' states and tables as they are.

    `prepare` returns all inputs of a step but its tokens. Pieces of memory take turns, one more than may be on their
    way to the device, `ahead`.

    A step that computes one more token of each sequence of an earlier one writes over that one's inputs, of which the
    tables and whatever belongs to the batch stay.

    Most inputs follow from lengths and tables alone. `prepare_ahead` writes these for the next step while the device
    still works on this one, and is never more than a guess: `prepare` takes them if the step is of that batch, shape
    and lengths, adds the blocks that tables have grown by, and writes all anew otherwise.

    A shape may have room for more sequences, of one query token each; beside chunks of prompts the first of them has
    all query tokens that fill the step up, and others have none. They store nothing, and their query tokens attend to a
    single KV pair; tensors of features have their padding there.
    """

    def __init__(
        self, tables: PartTables, device: torch.device, features: Sequence[StepFeature] = (), ahead: int = AHEAD
    ) -> None:
        self.tables = tables
        self.device = device
        self._features = [feature for feature in features if feature.tensors]
        self._tensors = tuple(tensor for feature in self._features for tensor in feature.tensors)
        self._num_memories = ahead + 1
        self.clear()

    def clear(self) -> None:
        """Forget a step that was cut short. The device may still read the memory that it had."""
        self._memories = [_InputMemory() for _ in range(self._num_memories)]  # the first is free
        self._ahead: _PartialInputs | None = None

    def shape(self, num_query_tokens: int, num_seqs: int, *num_blocks: int, num_logits: int = 0) -> InputShape:
        """num_blocks: columns of the block tables of each part."""
        return InputShape(num_query_tokens, num_seqs, num_blocks, self._tensors, num_logits)

    def prepare(self, states: list[SequenceState], num_tokens: list[int], shape: InputShape) -> StepInputs:
        """Inputs of the step that computes the next `num_tokens[i]` tokens of each sequence, which have their blocks.
        All but the tokens themselves: see `StepInputs.write_tokens`.

        shape: with room for as many query tokens, sequences, and blocks of each.
        """
        inputs, self._ahead = self._ahead, None
        if inputs is None or not inputs.are_of(states, num_tokens, shape, self.tables):
            inputs = self._begin(states, num_tokens, shape)
        inputs.add_new_blocks(self.tables)
        inputs.write_slots(self.tables)
        for feature in self._features:
            feature.write(inputs.tensors, inputs.table_slots, inputs.kv_lengths, is_new=inputs.is_new)
        inputs.is_new = False
        self._memories.append(self._memories.pop(0))
        return inputs.tensors

    def prepare_ahead(self, states: list[SequenceState], num_tokens: list[int], shape: InputShape) -> None:
        """Write what is known of a step before its new blocks are. The next one is likely to be it."""
        self._ahead = self._begin(states, num_tokens, shape)

    def _begin(self, states: list[SequenceState], num_tokens: list[int], shape: InputShape) -> _PartialInputs:
        memory = self._memories[0]
        if memory.inputs and shape.is_decode and memory.inputs.are_of_batch(states, num_tokens, shape, self.tables):
            memory.inputs.go_on(self.tables)
        else:
            tensors = memory.of(shape, pinned=self.device.type == "cuda")
            memory.inputs = _PartialInputs.of(states, num_tokens, tensors, self.tables)
        return memory.inputs


class _InputMemory:
    """Memory for the inputs of a step. A step of the same shape as the last one in it gets the same views.

    inputs: those of that step.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._tensors: StepInputs | None = None
        self.inputs: _PartialInputs | None = None

    def of(self, shape: InputShape, *, pinned: bool) -> StepInputs:
        if self._tensors is None or self._tensors.shape != shape:
            num_bytes = shape.num_bytes
            if self._memory.numel() < num_bytes:
                size = 1 << (num_bytes - 1).bit_length()  # so that growing shapes seldom need other memory
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._tensors = StepInputs(shape, self._memory)
        return self._tensors


@dataclass
class _PartialInputs:
    """Inputs of a step without the slots of its tokens, and what they follow from.

    table_slots, logical_lengths: `[S]`, of the sequences; token_slots, `[T]`, of the query tokens. Of each part of the
    KV groups: num_blocks and kv_lengths, `[parts, S]`, in the tables of the sequences; num_replacements and
    num_appends, of the tables; kv_index, `[parts, T]`, where in its sequence's table the KV pair of each query token
    will be. is_new: whether features have not written theirs.
    """

    states: list[SequenceState]
    num_tokens: list[int]
    logical_lengths: np.ndarray
    num_blocks: np.ndarray
    num_replacements: list[int]
    num_appends: list[int]
    table_slots: np.ndarray
    token_slots: np.ndarray
    kv_lengths: np.ndarray
    kv_index: np.ndarray
    tensors: StepInputs
    is_new: bool = True

    @staticmethod
    def of(
        states: list[SequenceState], num_tokens: list[int], tensors: StepInputs, tables: PartTables
    ) -> _PartialInputs:
        starts = np.concatenate([[0], np.cumsum(num_tokens)])
        offset = np.arange(starts[-1]) - np.repeat(starts[:-1], num_tokens)
        table_slots = np.array([state.table_slot for state in states])
        logical_lengths = tables.logical[table_slots]
        kv_lengths = tables.kv_lengths(table_slots)
        kv_index = np.repeat(kv_lengths, num_tokens, axis=1) + offset
        spare = tensors.shape.num_seqs - len(states)
        write(tensors.array("positions"), np.repeat(logical_lengths, num_tokens) + offset)
        write_rows(tensors.array("last_kv_index"), kv_index)
        for index, (part, num_blocks) in enumerate(zip(tables.parts, tensors.shape.num_blocks, strict=True)):
            write(tensors.array(f"block_tables_{index}"), part.table[table_slots, :num_blocks])
        ends = (
            starts[-1] + 1 + np.arange(spare) if tensors.shape.is_decode else [tensors.shape.num_query_tokens] * spare
        )
        write(tensors.array("query_start_loc"), np.concatenate([starts, ends]))
        return _PartialInputs(
            states,
            num_tokens,
            logical_lengths,
            tables.num_blocks[:, table_slots],
            [part.num_replacements for part in tables.parts],
            [part.num_appends for part in tables.parts],
            table_slots,
            np.repeat(table_slots, num_tokens),
            kv_lengths,
            kv_index,
            tensors,
        )

    def are_of(self, states: list[SequenceState], num_tokens: list[int], shape: InputShape, tables: PartTables) -> bool:
        """Whether all that is written is right for a step, but for blocks at the ends of tables."""
        return self.are_of_batch(states, num_tokens, shape, tables) and np.array_equal(
            tables.logical[self.table_slots], self.logical_lengths
        )

    def are_of_batch(
        self, states: list[SequenceState], num_tokens: list[int], shape: InputShape, tables: PartTables
    ) -> bool:
        """Whether all but what follows from lengths, and blocks at the ends of tables, is right for a step."""
        return (
            shape == self.tensors.shape
            and [part.num_replacements for part in tables.parts] == self.num_replacements
            and num_tokens == self.num_tokens
            and states == self.states
        )

    def go_on(self, tables: PartTables) -> None:
        """Write what follows from the lengths, which are others now, of sequences with one query token each."""
        self.logical_lengths = tables.logical[self.table_slots]
        self.kv_lengths = self.kv_index = tables.kv_lengths(self.table_slots)
        write(self.tensors.array("positions"), self.logical_lengths)
        write_rows(self.tensors.array("last_kv_index"), self.kv_index)

    def add_new_blocks(self, tables: PartTables) -> None:
        """Tables that have grown since they were written."""
        num_appends = [part.num_appends for part in tables.parts]
        if num_appends == self.num_appends:
            return
        num_blocks = tables.num_blocks[:, self.table_slots]
        grown = num_blocks != self.num_blocks
        for index in np.flatnonzero(grown.any(axis=1)):
            rows, block_tables = np.flatnonzero(grown[index]), self.tensors.array(f"block_tables_{index}")
            block_tables[rows] = tables.parts[index].table[self.table_slots[rows], : block_tables.shape[1]]
        self.num_appends, self.num_blocks = num_appends, num_blocks

    def write_slots(self, tables: PartTables) -> None:
        """Where the KV pairs of the tokens are stored."""
        write_rows(self.tensors.array("slot_mapping"), tables.slot_mapping(self.token_slots, self.kv_index), padding=-1)


def read_batch(tables: BlockTables, table_slots: list[int], index: np.ndarray, device: torch.device) -> AttentionBatch:
    """The attention batch of a pass over query tokens that are cached already.

    index: `[S, query tokens]`, where in its sequence's cache the KV pair of each is. table_slots: of the S.
    """
    rows = HostRows(np.arange(0, index.size + 1, index.shape[1], dtype=np.int32), index.astype(np.int32).ravel())
    num_blocks = int(index.max()) // tables.block_size + 1
    return AttentionBatch(
        to_device(rows.query_start_loc, device),
        to_device(rows.last_kv_index, device),
        to_device(tables.table[table_slots, :num_blocks], device),
        on_host=rows,
    )
