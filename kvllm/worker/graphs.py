"""Decode steps as recordings: a CUDA graph launches all kernels of a step at once, as they were when it was captured.

So the kernels' arguments must stay where they are. Inputs are copied into one static piece of memory; a batch is filled
up to one of a few sizes, and its block tables to one of a few widths. There is a graph for each of these shapes, all
captured before the first request. What changes tables and lengths between two steps, such as a compression, needs to
know nothing of graphs: each step brings its own inputs.

Most inputs follow from lengths alone. They are written for the next step while the GPU still works on this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from kvllm.worker.attention_state import RaggedLengths
from kvllm.worker.inputs import HostInputs, InputShape, StepInputs
from kvllm.worker.state import BlockTables, SequenceState

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], Step]
"""Makes of a step one that does the same with the same memory, and returns the same tensor."""

LEAST_ENTRIES = 1024
"""For which the narrowest block tables have room."""


class DecodeGraphs:
    """Recorded decode steps: one token of each sequence.

    forward: the model's pass over inputs on the device -> hidden states `[rows, hidden_size]`. It must read nothing
        back to the host. capture: `cuda_capture()`; where there are no graphs, anything that keeps the step.
    max_blocks: of one sequence. observed: as in InputShape.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        capture: Capture,
        device: torch.device,
        tables: BlockTables,
        max_blocks: int,
        ragged: RaggedLengths | None,
        observed: bool,
    ) -> None:
        self.tables = tables
        self.ragged = ragged
        max_num_seqs = len(tables.table)
        self.largest = InputShape(max_num_seqs, max_num_seqs, max_blocks, ragged.heads if ragged else None, observed)
        self._forward = forward
        self._capture = capture
        self._steps: dict[InputShape, Step] = {}
        self._hidden: torch.Tensor | None = None
        size = self.largest.num_bytes
        self._static = torch.zeros(size, dtype=torch.uint8, device=device)
        # One is written while the other may be on its way to the device.
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
        self._placed: tuple[list[SequenceState], HostInputs] | None = None

    def run(self, states: list[SequenceState], grown: Iterable[int]) -> torch.Tensor:
        """Compute the next token of each sequence. `grown` names those whose table is longer than a step ago.

        Returns hidden states `[at least S, hidden_size]`, valid until the next call; on a GPU the step has only been
        launched.
        """
        if not self._placed or self._placed[0] != states:
            self.place(states)
        assert self._placed
        inputs, self._placed = self._placed[1], None
        inputs.refresh(grown, self.tables)
        inputs.complete(states, _one_each(states), self.tables)
        self._static[: inputs.shape.num_bytes].copy_(inputs.memory, non_blocking=True)
        return self._step(inputs.shape)()

    def place(self, states: list[SequenceState]) -> None:
        """Write what is known of the step that computes the next token of each sequence."""
        self._host.reverse()
        inputs = HostInputs(self._shape_of(states), self._host[0])
        inputs.place(states, _one_each(states), self.tables, self.ragged)
        self._placed = states, inputs

    def forget(self) -> None:
        """Lengths or tables change otherwise than by one more token each, so what was placed is wrong."""
        self._placed = None

    def capture(self, shapes: Iterable[InputShape]) -> None:
        """Capture the graphs of some shapes ahead of time: no step then waits for that. Nothing is stored meanwhile."""
        for shape in shapes:
            self._static.zero_()
            inputs = StepInputs(shape, self._static)
            inputs.slots.fill_(-1)
            inputs.query_start_loc.copy_(torch.arange(len(inputs.query_start_loc)))
            if inputs.table_rows is not None:
                inputs.table_rows.fill_(len(self.tables.table))
            self._step(shape)

    def graph_batch_sizes(self) -> list[InputShape]:
        """The shape of every batch that there can be. The first takes most memory, in which the others have room."""
        most, _, widest, *_ = self.largest
        widths = [1 << power for power in range(widest.bit_length() + 1)]
        return sorted({self.shape_for(n, width) for n in range(1, most + 1) for width in widths}, reverse=True)

    def shape_for(self, num_seqs: int, num_blocks: int) -> InputShape:
        """The least shape for so many sequences, of so many blocks at most. Of many, an eighth at most is padding."""
        bits = (num_seqs - 1).bit_length()
        size = 1 << bits if num_seqs <= 8 else _rounded_up(num_seqs, max(16, 1 << (bits - 4)))
        width = max(-(-LEAST_ENTRIES // self.tables.block_size), 1 << (num_blocks - 1).bit_length())
        most, _, widest, *kept = self.largest
        return InputShape(min(size, most), min(size, most), min(width, widest), *kept)

    def _shape_of(self, states: list[SequenceState]) -> InputShape:
        longest = max(state.cached_length for state in states)
        return self.shape_for(len(states), longest // self.tables.block_size + 1)

    def _step(self, shape: InputShape) -> Step:
        if shape not in self._steps:
            static = StepInputs(shape, self._static)
            self._steps[shape] = self._capture(lambda: self._kept(self._forward(static)))
        return self._steps[shape]

    def _kept(self, hidden: torch.Tensor) -> torch.Tensor:
        """A copy in memory that all shapes share: what a graph itself returns stays allocated as long as the graph."""
        if self._hidden is None:
            self._hidden = hidden.new_empty(self.largest.rows, hidden.shape[1])
        return self._hidden[: len(hidden)].copy_(hidden)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _one_each(states: list[SequenceState]) -> np.ndarray:
    return np.ones(len(states), dtype=np.int64)


def cuda_capture() -> Capture:
    """Captures CUDA graphs that share their memory: only one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()

    def capture(step: Step) -> Step:
        step()  # compiles the kernels that were never used: a capture must not do that
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            hidden = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        return replay

    return capture
