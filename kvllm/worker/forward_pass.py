"""A pass of the model over a batch of query tokens: kernel by kernel, or replayed from a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvllm.attention.base import AttentionBatch
from kvllm.attention.context import Attention, AttentionContext, PartedAttention
from kvllm.core.protocol import StepPlan
from kvllm.worker.draws import reads_in_place
from kvllm.worker.features.base import Attend, PassAttention, WorkerParts
from kvllm.worker.graph_sizes import GraphSize, GraphSizes
from kvllm.worker.graphs import Capture, StepGraphs
from kvllm.worker.inputs import AHEAD, InputPreparer
from kvllm.worker.last_logits import LastLogits
from kvllm.worker.logit_parts import LogitParts
from kvllm.worker.prompt_logprobs import PromptReports
from kvllm.worker.state import part_of_layers, table_widths
from kvllm.worker.step_batch import StepBatch
from kvllm.worker.step_inputs import LOGIT_TOKENS, InputShape, StepInputs
from kvllm.worker.transfer import to_device

Place = Callable[[torch.Tensor], None]
"""Writes tokens that are on the device already into the token ids `[T]` of a step there."""

LastRows = Callable[[Sequence[int]], LastLogits]
"""The logits of some of the step's tokens that have them, by their numbers among these."""

Compute = Callable[[StepInputs, Place | None], LastRows]
"""The pass, over inputs on the host."""


class ForwardPass:
    """Prepares passes, and runs them. samples: whether tokens are sampled here. ahead: as of InputPreparer."""

    def __init__(self, worker: WorkerParts, *, samples: bool, ahead: int = AHEAD) -> None:
        self.model = worker.model
        self.config = worker.config
        self.backend = worker.backend
        self.operations = worker.operations
        self.device = worker.device
        self.features = worker.features
        self._readers = [feature for feature in worker.features if feature.reads_hidden]
        self.samples = samples
        self.parts = LogitParts(self.model.lm_head)
        self.reports = PromptReports(self.model, self.parts, samples=samples)
        self.inputs = InputPreparer(worker.tables, self.device, worker.features, ahead)
        self.graphs: StepGraphs | None = None
        self._part_of = part_of_layers(worker.config, worker.shape.num_layers)
        self._shaped: tuple[StepBatch, list[tuple[int, int]], InputShape] | None = None
        """The last batch, how often tables had changed, and the shape of its inputs."""

    def clear(self) -> None:
        """Forget a step that was cut short."""
        self.reports.clear()
        self.inputs.clear()

    def prepare(self, plan: StepPlan, batch: StepBatch) -> tuple[StepInputs, Compute]:
        """The inputs of a pass without its tokens, and what computes it. Lengths are those before it."""
        attends = [attend for feature in self.features if (attend := feature.before_pass(plan, batch))]
        size = self.graphs.sizes.of(batch.num_tokens) if self.graphs else None
        if self.graphs and size and not (attends or self.reports.pending):
            inputs = self.graphs.prepare(batch.states, batch.num_tokens, size)
            inputs.write_logit_tokens(batch.last_tokens)
            return inputs, partial(self._replay, self.graphs, size, batch)
        inputs = self._prepare_inputs(batch)
        # A GPU gets its inputs when the tokens are in them.
        attention = self._attention(inputs, attends) if self.device.type == "cpu" else None
        return inputs, partial(self._compute, plan, batch, attends, attention)

    def _prepare_inputs(self, batch: StepBatch) -> StepInputs:
        """Those of a pass that is not recorded."""
        changes = [(part.num_appends, part.num_replacements) for part in self.inputs.tables.parts]
        if self._shaped is None or self._shaped[0] is not batch or self._shaped[1] != changes:
            num_blocks = self.inputs.tables.num_blocks[:, batch.table_slots].max(axis=1).tolist()
            shape = self.inputs.shape(sum(batch.num_tokens), len(batch.states), *num_blocks)
            self._shaped = batch, changes, shape
        return self.inputs.prepare(batch.states, batch.num_tokens, self._shaped[2])

    def _compute(
        self,
        plan: StepPlan,
        batch: StepBatch,
        attends: list[Attend],
        attention: Attention | None,
        inputs: StepInputs,
        place: Place | None,
    ) -> LastRows:
        """Kernel by kernel. attention: if it is known already."""
        positions = inputs.array("positions")
        inputs = inputs.to(self.device)
        if place:
            place(inputs.token_ids)
        attention = attention or self._attention(inputs, attends)
        last = None if batch.only_decodes else to_device(batch.last_tokens, self.device)
        # On a GPU, a product may have other bits with another number of rows; on a CPU it has not.
        all_wanted = self.device.type != "cpu" or bool(self.reports.pending or self._readers)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, attention, None if all_wanted else last)
        if self.reports.pending:
            self.reports.add(plan, batch.states, hidden)
        for feature in self._readers:
            feature.computed(batch, positions, hidden)
        if all_wanted and last is not None:
            hidden = hidden[last]
        return partial(self._last_logits, batch, hidden)

    def _attention(self, inputs: StepInputs, attends: Sequence[Attend] = ()) -> Attention:
        """Attention over inputs on the model's device, whose tokens it does not read. attends: of this pass alone."""
        attention = PassAttention(inputs, self.backend, inputs.fields())
        for feature in self.features:
            feature.attend(attention)
        for attend in attends:
            attend(attention)
        backend, parts = attention.backend, []
        for fields, part in zip(attention.fields, inputs.parts, strict=True):
            batch = AttentionBatch(**fields)
            plan = backend.plan(batch)
            held = (batch.residual, attention.recurrent, attention.adapters)
            parts.append(AttentionContext(backend, self.operations, plan, part.slot_mapping, *held))
        return parts[0] if len(parts) == 1 else PartedAttention(parts, self._part_of)

    def _last_logits(self, batch: StepBatch, hidden: torch.Tensor, numbers: Sequence[int]) -> LastLogits:
        """Of some sequences of a batch, from the hidden states `[S, hidden_size]` of the last tokens of all."""
        if batch.only_decodes:
            logits = self._logits(hidden, plain=batch.decode_rows.is_plain)
        else:
            rows = list(numbers)
            in_order = rows == list(range(len(rows)))
            logits = self._logits(hidden[: len(rows)] if in_order else hidden[to_device(rows, self.device)])
        return LastLogits(logits, None if self.parts.is_whole else self.parts.most_likely(logits))

    def _logits(self, hidden: torch.Tensor, into: torch.Tensor | None = None, *, plain: bool = False) -> torch.Tensor:
        """`[R, hidden_size]` -> `[R, vocab_size]`, of which every rank computes a part. into: memory of as many rows or
        more. plain: nothing but the largest of each row will be looked for."""
        into = None if into is None else into[: len(hidden)]
        return self.model.logits(hidden, rounded=plain or reads_in_place(hidden), into=into)

    # Graphs

    @torch.inference_mode()
    def use_graphs(self, capture: Capture, num_blocks: int, *, largest_alone: bool = False) -> None:
        """Record passes of every size, and replay them from now on. Where the attention backend or a feature cannot be
        recorded, they go on being launched as others are.

        num_blocks: in the pool. largest_alone: record the rest when it is needed.
        """
        if not self.backend.capturable or not all(feature.captures for feature in self.features):
            return
        config, num_equal = self.config, max(1, self.inputs.tables.full_parts)
        sizes = GraphSizes(config.max_num_seqs)
        if self.backend.captures_chunks:
            sizes = GraphSizes.with_chunks(config.max_num_seqs, config.max_num_batched_tokens, 1 + config.most_drafts)
        widths = table_widths(config, max(1, sizes.most_chunk_tokens))
        most = [min(num_blocks, width) if part < num_equal else width for part, width in enumerate(widths)]
        before_replay = self._plan_again if self.backend.plans_on_host else None
        self.graphs = StepGraphs(self._recorded, capture, self.inputs, sizes, most, before_replay)
        self.graphs.capture(sizes.all()[: 1 if largest_alone else None])

    def _recorded(self, inputs: StepInputs, into: torch.Tensor | None) -> LastLogits:
        """All of a step but draws, for a graph: the logits, the most likely token of each row, and hidden states.

        into: where the first rows of logits go.
        """
        hidden = self.model.forward(inputs.token_ids, inputs.positions, self._attention(inputs))
        logits = self._logits(hidden if inputs.shape.is_decode else hidden[inputs.by_name[LOGIT_TOKENS]], into)
        return LastLogits(logits, self.parts.most_likely(logits), hidden if self._readers else None)

    def _plan_again(self, inputs: StepInputs) -> None:
        """The part of attention that the host has in a step whose graph is about to be replayed."""
        for batch in inputs.batches():
            self.backend.before_replay(batch)

    def _replay(
        self, graphs: StepGraphs, size: GraphSize, batch: StepBatch, inputs: StepInputs, place: Place | None
    ) -> LastRows:
        """The same as `_compute`, recorded."""
        last, num_tokens = graphs.run(inputs, size, place), sum(batch.num_tokens)
        for feature in self._readers:
            assert last.hidden is not None
            feature.computed(batch, inputs.array("positions")[:num_tokens], last.hidden[:num_tokens])
        return last.rows
