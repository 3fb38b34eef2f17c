"""Steps as recordings: a CUDA graph launches all kernels of a step at once, as they were when it was captured.

So the kernels' arguments must stay where they are. Inputs are copied into one static piece of memory, and a step is
filled up to one of a few sizes, for each of which there is a graph, captured before the first request. Block tables
have room for the longest sequence; only columns that a step needs are copied into them. What changes tables and lengths
between two steps, such as a compression, does not concern graphs: each step brings its own inputs.

A graph ends with the logits of each sequence's last token, or of all tokens of one with a draft, and the most likely
token of each: a batch that samples no other needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from kvllm.attention.base import Recording
from kvllm.worker.graph_sizes import GraphSize, GraphSizes
from kvllm.worker.inputs import InputPreparer
from kvllm.worker.last_logits import LastLogits
from kvllm.worker.state import SequenceState
from kvllm.worker.step_inputs import InputShape, StepInputs

Step = Callable[[], LastLogits]
Capture = Callable[[Step], Step]
"""Makes of a step one that does the same with the same memory, and returns the same tensors."""

LEAST_KV_PAIRS = 1024
"""For which the narrowest block tables that are copied have room."""


class StepGraphs:
    """Recorded steps: decodes, and chunks of prompts with decodes.

    compute: inputs on the device, and memory that logits are written to, if there is some -> those of the tokens that
        have them. It must read nothing back to the host.
    capture: `cuda_capture()`; where there are no graphs, anything that keeps the step.
    inputs: prepares the inputs of other steps, too. widths: columns of the block tables of each part of the KV groups,
        for the largest of the sizes; those of parts that attend all tokens are as wide as the batch needs.
    before_replay: called with the inputs of a step once they are in the memory that its graph reads.
    """

    def __init__(
        self,
        compute: Callable[[StepInputs, torch.Tensor | None], LastLogits],
        capture: Capture,
        inputs: InputPreparer,
        sizes: GraphSizes,
        widths: Sequence[int],
        before_replay: Callable[[StepInputs], None] | None = None,
    ) -> None:
        self.inputs = inputs
        self.sizes = sizes
        self._widths = widths
        self._compute = compute
        self._capture = capture
        self._before_replay = before_replay
        self._steps: dict[GraphSize, Step] = {}
        self._inputs: dict[GraphSize, StepInputs] = {}
        self._last: LastLogits | None = None
        num_bytes = max(self._widest(size).num_bytes for size in sizes.all())
        self._static = torch.zeros(num_bytes, dtype=torch.uint8, device=inputs.device)

    def prepare(self, states: list[SequenceState], num_tokens: list[int], size: GraphSize) -> StepInputs:
        """Inputs of the step that computes the next `num_tokens[i]` tokens of each sequence. size: that of such a step.

        The caller writes the tokens.
        """
        return self.inputs.prepare(states, num_tokens, self._shape_of(states, num_tokens, size))

    def run(
        self, inputs: StepInputs, size: GraphSize, place: Callable[[torch.Tensor], None] | None = None
    ) -> LastLogits:
        """Compute a step of a size. place: writes tokens that are on the device already into the token ids there.

        Returns the rows of all tokens with logits, and more, valid until the next call; on a GPU the step has only been
        launched.
        """
        static = self._inputs_of(size)
        static.take(inputs)
        if place:
            place(static.token_ids)
        if self._before_replay:
            self._before_replay(static)
        return self._step(size)()

    def prepare_ahead(self, states: list[SequenceState]) -> None:
        """Prepare what can be of the inputs of the step that computes the next token of each sequence."""
        num_tokens = [1] * len(states)
        size = self.sizes.of(num_tokens)
        assert size
        self.inputs.prepare_ahead(states, num_tokens, self._shape_of(states, num_tokens, size))

    def capture(self, sizes: Iterable[GraphSize]) -> None:
        """Capture the graphs of some sizes ahead of time: no step then waits for that. Nothing is stored meanwhile."""
        for size in sizes:
            self._inputs_of(size).clear()
            self._step(size)

    def _widest(self, size: GraphSize) -> InputShape:
        return self._shape(size, *self._widths)

    def _shape_of(self, states: list[SequenceState], num_tokens: list[int], size: GraphSize) -> InputShape:
        """With tables for the longest sequence, and as seldom as possible another one than in the step before."""
        tables, block_size = self.inputs.tables, self.inputs.tables.block_size
        table_slots = np.array([state.table_slot for state in states])
        num_equal = max(1, tables.full_parts)
        last = int((tables.kv_lengths(table_slots)[:num_equal] + num_tokens).max()) - 1
        width = max(-(-LEAST_KV_PAIRS // block_size), 1 << (last // block_size).bit_length())
        return self._shape(size, *[min(width, self._widths[0])] * num_equal, *self._widths[num_equal:])

    def _shape(self, size: GraphSize, *num_blocks: int) -> InputShape:
        return self.inputs.shape(*size, *num_blocks, num_logits=self.sizes.num_logits(size))

    def _inputs_of(self, size: GraphSize) -> StepInputs:
        """Those that the graph of a size reads."""
        if size not in self._inputs:
            inputs = self._inputs[size] = StepInputs(self._widest(size), self._static)
            inputs.recordings = [Recording(part) for part in range(len(inputs.parts))]
        return self._inputs[size]

    def _step(self, size: GraphSize) -> Step:
        if size not in self._steps:
            static = self._inputs_of(size)
            self._steps[size] = self._capture(lambda: self._computed(static))
        return self._steps[size]

    def _computed(self, static: StepInputs) -> LastLogits:
        """In memory that all sizes share: what a graph itself returns stays allocated as long as the graph."""
        if self._last:
            return self._last.take(self._compute(static, self._last.logits))
        last, sizes = self._compute(static, None), self.sizes.all()
        num_tokens = max(size.num_query_tokens for size in sizes)
        self._last = last.room_for(max(map(self.sizes.num_logits, sizes)), num_tokens)
        return last


def cuda_capture(stream: torch.cuda.Stream | None = None) -> Capture:
    """Captures CUDA graphs that share their memory: only one of them runs at a time. stream: to capture on."""
    pool = torch.cuda.graph_pool_handle()
    stream = stream or torch.cuda.Stream()

    def capture(step: Step) -> Step:
        step()  # compiles the kernels that were never used: a capture must not do that
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            last = step()
        graph.replay()  # with its first launch a graph takes memory of the driver: not while a request waits

        def replay() -> LastLogits:
            graph.replay()
            return last

        return replay

    return capture
