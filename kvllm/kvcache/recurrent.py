"""The states of recurrent layers: of each running sequence one, whose size does not grow with the text.

They lie beside the KV pool, in a row for each table slot. A state is that after all tokens that are computed, so it
cannot be shared like a block, or taken back by a token: after wrong drafts, a copy from before is changed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

NO_ROWS = slice(0, 0)


@dataclass(frozen=True)
class StateShape:
    """Sizes of what one rank stores for each sequence.

    num_layers: those that have a state. channels, taps: of the convolution, whose last `taps - 1` inputs are held in
    `dtype`. heads, key_dim, value_dim: of the state itself, which is held in float32.
    """

    num_layers: int
    channels: int
    taps: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_sequence(self) -> int:
        inputs = self.channels * (self.taps - 1) * self.dtype.itemsize
        return self.num_layers * (inputs + 4 * self.heads * self.key_dim * self.value_dim)


class RecurrentStates:
    """The states of all table slots, and of rows after them that hold copies.

    inputs: `[layers, slots, taps - 1, channels]`, the last inputs of the convolution, the newest one last.
    states: float32 `[layers, slots, heads, key_dim, value_dim]`.
    """

    def __init__(self, shape: StateShape, num_slots: int, device: torch.device | str = "cpu") -> None:
        of_slots = (shape.num_layers, num_slots)
        self.inputs = torch.zeros((*of_slots, shape.taps - 1, shape.channels), dtype=shape.dtype, device=device)
        self.states = torch.zeros((*of_slots, shape.heads, shape.key_dim, shape.value_dim), device=device)

    def clear(self, table_slot: int) -> None:
        """Begin a sequence."""
        self.inputs[:, table_slot] = 0
        self.states[:, table_slot] = 0

    def copy(self, source: int, destination: int) -> None:
        """Let a slot have the state of another."""
        self.inputs[:, destination] = self.inputs[:, source]
        self.states[:, destination] = self.states[:, source]

    def save(self, table_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of a sequence's state in all layers."""
        return self.inputs[:, table_slot].clone(), self.states[:, table_slot].clone()

    def restore(self, table_slot: int, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Let a sequence go on from `saved`."""
        self.inputs[:, table_slot], self.states[:, table_slot] = saved


@dataclass(frozen=True)
class RecurrentStep:
    """What the recurrent layers of one pass read and write.

    slots: int32 `[S]`, the rows of the sequences. query_start_loc: int32 `[S + 1]`, where the query tokens of each
    begin. changes: where each change of states is noted.
    """

    states: RecurrentStates
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    changes: StateChanges | None = None


class StateChanges:
    """What a pass does to states, layer by layer, so that it can be done again for some of its tokens without weights.

    rows: the query tokens for which it is noted.
    """

    def __init__(self, rows: slice = NO_ROWS) -> None:
        self._rows = rows
        self._noted: list[tuple[Callable[..., object], list[torch.Tensor]]] = []

    def note(self, change: Callable[..., object], *tensors: torch.Tensor) -> None:
        """change: called with a RecurrentStep and rows of the `tensors` `[T, ...]`."""
        self._noted.append((change, [tensor[self._rows].clone() for tensor in tensors]))

    def repeat(self, step: RecurrentStep, rows: torch.Tensor) -> None:
        """Do it again. rows: int64, which of the noted ones."""
        for change, tensors in self._noted:
            change(step, *(tensor[rows] for tensor in tensors))


class RecordedChanges(StateChanges):
    """Those of passes that graphs hold, of all in the same memory: what the last one does.

    most_rows: query tokens for which it is noted.
    """

    def __init__(self, most_rows: int) -> None:
        super().__init__()
        self.most_rows = most_rows

    def begin(self, tokens: torch.Tensor) -> RecordedChanges:
        """A pass begins. tokens: int64, the query tokens that are noted, if there are not more than `most_rows`."""
        self._tokens, self._num_changes = tokens[: self.most_rows], 0
        return self

    def note(self, change: Callable[..., object], *tensors: torch.Tensor) -> None:
        if self._num_changes == len(self._noted):
            self._noted.append((change, [each.new_empty(self.most_rows, *each.shape[1:]) for each in tensors]))
        for memory, tensor in zip(self._noted[self._num_changes][1], tensors, strict=True):
            memory[: len(self._tokens)] = tensor[self._tokens]
        self._num_changes += 1
