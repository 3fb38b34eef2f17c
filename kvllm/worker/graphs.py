"""Decode steps as recordings: a CUDA graph launches all kernels of a step at once, as they were when it was captured.

So the kernels' arguments must stay where they are. Inputs are copied into one static piece of memory, and a batch is
filled up to one of a few sizes, for each of which there is a graph, captured before the first request. Block tables
have room for the longest sequence; only columns that a step needs are copied into them. What changes tables and lengths
between two steps, such as a compression, does not concern graphs: each step brings its own inputs.
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
"""For which the narrowest block tables that are copied have room."""


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
        self._steps: dict[int, Step] = {}
        self._inputs: dict[int, StepInputs] = {}
        self._hidden: torch.Tensor | None = None
        self._static = torch.zeros(self.largest.num_bytes, dtype=torch.uint8, device=inputs.device)

    def run(self, states: list[SequenceState], place: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Compute the next token of each sequence.

        place: writes tokens that are on the device already into the token ids there.

        Returns hidden states `[at least S, hidden_size]`, valid until the next call; on a GPU the step has only been
        launched.
        """
        inputs = self.inputs.prepare(states, [1] * len(states), self._shape_of(states))
        size = inputs.shape.num_seqs
        static = self._inputs_of(size)
        static.take(inputs)
        if place:
            place(static.token_ids)
        return self._step(size)()

    def prepare_ahead(self, states: list[SequenceState]) -> None:
        """Prepare what can be of the inputs of the step that computes the next token of each sequence."""
        self.inputs.prepare_ahead(states, [1] * len(states), self._shape_of(states))

    def capture(self, sizes: Iterable[int]) -> None:
        """Capture the graphs of some batch sizes ahead of time: no step then waits for that. Nothing is stored
        meanwhile."""
        for size in sizes:
            self._static.zero_()
            inputs = self._inputs_of(size)
            for part in inputs.parts:
                part.slot_mapping.fill_(-1)
                if part.window_start is not None:
                    part.window_start.fill_(torch.iinfo(torch.int32).max)
            inputs.query_start_loc.copy_(torch.arange(len(inputs.query_start_loc)))
            if inputs.table_slots is not None:
                inputs.table_slots.fill_(len(self.inputs.tables[0].table))
            self._step(size)

    def batch_sizes(self) -> list[int]:
        """The sizes that there are graphs for. The first takes most memory, in which the others have room."""
        return sorted({self.size_for(number) for number in range(1, self.largest.num_seqs + 1)}, reverse=True)

    def size_for(self, num_seqs: int) -> int:
        """The least size for so many sequences. Of many, an eighth at most is padding."""
        bits = (num_seqs - 1).bit_length()
        size = 1 << bits if num_seqs <= 8 else _rounded_up(num_seqs, max(16, 1 << (bits - 4)))
        return min(size, self.largest.num_seqs)

    def _shape_of(self, states: list[SequenceState]) -> InputShape:
        """With tables for the longest sequence, and as seldom as possible another one than in the step before."""
        block_size, size = self.inputs.tables[0].block_size, self.size_for(len(states))
        full = self.inputs.tables[1 : self.full_parts]
        longest = max(state.cached_length for state in states)
        longest = max(longest, *(int(part.kv_lengths(states).max()) for part in full)) if full else longest
        width = max(-(-LEAST_KV_PAIRS // block_size), 1 << (longest // block_size).bit_length())
        width = min(width, self.largest.num_blocks)
        return self.inputs.shape(size, size, *[width] * (1 + len(full)), *self.largest.others[len(full) :])

    def _inputs_of(self, size: int) -> StepInputs:
        """Those that the graph of a batch size reads."""
        if size not in self._inputs:
            shape = self.inputs.shape(size, size, self.largest.num_blocks, *self.largest.others)
            self._inputs[size] = StepInputs(shape, self._static)
        return self._inputs[size]

    def _step(self, size: int) -> Step:
        if size not in self._steps:
            static = self._inputs_of(size)
            self._steps[size] = self._capture(lambda: self._kept(self._forward(static)))
        return self._steps[size]

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
        graph.replay()  # with its first launch a graph takes memory of the driver: not while a request waits

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        return replay

    return capture
