"""Decode steps as recordings: a CUDA graph launches all kernels of a step at once, as they were when it was captured.

So the kernels' arguments must stay where they are. Inputs are copied into one static piece of memory; a batch is filled
up to one of a few sizes, and its block tables to one of a few widths. There is a graph for each of these shapes, all
captured before the first request. What changes tables and lengths between two steps, such as a compression, does not
concern graphs: each step brings its own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kvllm.worker.inputs import InputPreparer
from kvllm.worker.state import SequenceState
from kvllm.worker.step_inputs import InputShape, StepInputs

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], Step]
"""Makes of a step one that does the same with the same memory, and returns the same tensor."""

LEAST_KV_PAIRS = 1024
"""For which the narrowest block tables have room."""


class DecodeGraphs:
    """Recorded decode steps: one token of each sequence.

    forward: the model's pass over inputs on the device -> hidden states `[num_query_tokens, hidden_size]`. It must read
        nothing back to the host. capture: `cuda_capture()`; where there are no graphs, anything that keeps the step.
    inputs: prepares the inputs of other steps, too. max_blocks: of one sequence in the first part of the KV groups.
    others: columns of the block tables of the other parts, where a step has one token of each sequence. full_parts: the
        first parts, in which tables are as wide as the batch needs.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        capture: Capture,
        inputs: InputPreparer,
        max_blocks: int,
        others: tuple[int, ...] = (),
        full_parts: int = 1,
    ) -> None:
        self.inputs = inputs
        self.full_parts = full_parts
        max_num_seqs = len(inputs.tables[0].table)
        self.largest = inputs.shape(max_num_seqs, max_num_seqs, max_blocks, *others)
        self._forward = forward
        self._capture = capture
        self._steps: dict[InputShape, Step] = {}
        self._hidden: torch.Tensor | None = None
        self._static = torch.zeros(self.largest.num_bytes, dtype=torch.uint8, device=inputs.device)

    def run(self, states: list[SequenceState]) -> torch.Tensor:
        """Compute the next token of each sequence.

        Returns hidden states `[at least S, hidden_size]`, valid until the next call; on a GPU the step has only been
        launched.
        """
        inputs = self.inputs.prepare(states, [1] * len(states), self._shape_of(states))
        self._static[: inputs.shape.num_bytes].copy_(inputs.memory, non_blocking=True)
        return self._step(inputs.shape)()

    def prepare_ahead(self, states: list[SequenceState]) -> None:
        """Prepare what can be of the inputs of the step that computes the next token of each sequence."""
        self.inputs.prepare_ahead(states, [1] * len(states), self._shape_of(states))

    def capture(self, shapes: Iterable[InputShape]) -> None:
        """Capture the graphs of some shapes ahead of time: no step then waits for that. Nothing is stored meanwhile."""
        for shape in shapes:
            self._static.zero_()
            inputs = StepInputs(shape, self._static)
            for part in inputs.parts:
                part.slot_mapping.fill_(-1)
                if part.window_start is not None:
                    part.window_start.fill_(torch.iinfo(torch.int32).max)
            inputs.query_start_loc.copy_(torch.arange(len(inputs.query_start_loc)))
            if inputs.table_slots is not None:
                inputs.table_slots.fill_(len(self.inputs.tables[0].table))
            self._step(shape)

    def graph_batch_sizes(self) -> list[InputShape]:
        """The shape of every batch that there can be. The first takes most memory, in which the others have room."""
        widths = [1 << power for power in range(self.largest.num_blocks.bit_length() + 1)]
        sizes = range(1, self.largest.num_seqs + 1)
        return sorted({self.shape_for(size, width) for size in sizes for width in widths}, reverse=True)

    def shape_for(self, num_seqs: int, num_blocks: int) -> InputShape:
        """The least shape for so many sequences, of so many blocks at most. Of many, an eighth at most is padding."""
        bits = (num_seqs - 1).bit_length()
        size = 1 << bits if num_seqs <= 8 else _rounded_up(num_seqs, max(16, 1 << (bits - 4)))
        size = min(size, self.largest.num_seqs)
        width = max(-(-LEAST_KV_PAIRS // self.inputs.tables[0].block_size), 1 << (num_blocks - 1).bit_length())
        width = min(width, self.largest.num_blocks)
        full = max(0, self.full_parts - 1)
        return self.inputs.shape(size, size, *[width] * (1 + full), *self.largest.others[full:])

    def _shape_of(self, states: list[SequenceState]) -> InputShape:
        full = self.inputs.tables[1 : self.full_parts]
        longest = max(state.cached_length for state in states)
        longest = max(longest, *(int(part.kv_lengths(states).max()) for part in full)) if full else longest
        return self.shape_for(len(states), longest // self.inputs.tables[0].block_size + 1)

    def _step(self, shape: InputShape) -> Step:
        if shape not in self._steps:
            static = StepInputs(shape, self._static)
            self._steps[shape] = self._capture(lambda: self._kept(self._forward(static)))
        return self._steps[shape]

    def _kept(self, hidden: torch.Tensor) -> torch.Tensor:
        """A copy in memory that all shapes share: what a graph itself returns stays allocated as long as the graph."""
        if self._hidden is None:
            self._hidden = hidden.new_empty(self.largest.num_query_tokens, hidden.shape[1])
        return self._hidden[: len(hidden)].copy_(hidden)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


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
