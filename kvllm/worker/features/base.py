"""The interface of what keeps state beside the KV pool in a worker."""
# ruff: noqa: B027 - a feature need not answer to every event

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend
from kvllm.compression.registry import MethodInputs
from kvllm.config import EngineConfig
from kvllm.core.protocol import CompressionJob, SequenceStart, StepPlan, StepResult
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.recurrent import RecurrentStep
from kvllm.kvcache.tiers.host import HostStore
from kvllm.lora.product import AdapterRows
from kvllm.models.base import Decoder
from kvllm.stats import MemoryField
from kvllm.worker.drafter import Drafter
from kvllm.worker.loaded_adapters import LoadedAdapters
from kvllm.worker.state import PartTables, SequenceState
from kvllm.worker.step_batch import StepBatch
from kvllm.worker.step_inputs import StepInputs, StepTensor
from kvllm.worker.windows import Move, PartWindows


@dataclass(frozen=True)
class WorkerParts:
    """What the parts of a worker share. store: None without host memory. draft: the model that drafts, if one does.
    adapters: None if the engine takes none.
    features: those that were made so far."""

    model: Decoder
    config: EngineConfig
    operations: KVOperations
    backend: AttentionBackend
    tables: PartTables
    store: HostStore | None = None
    draft: Drafter | None = None
    adapters: LoadedAdapters | None = None
    features: list[StepFeature] = field(default_factory=list)

    @property
    def shape(self) -> CacheShape:
        return self.operations.cache.shape

    @property
    def device(self) -> torch.device:
        return self.operations.cache.data.device


@dataclass
class PassAttention:
    """Attention of one pass, which features change before it is planned.

    inputs: on the model's device; their tokens are not there yet. fields: of the AttentionBatch of each part.
    recurrent: of recurrent layers, if there are any. adapters: of the tokens that have one.
    """

    inputs: StepInputs
    backend: AttentionBackend
    fields: list[dict[str, Any]]
    recurrent: RecurrentStep | None = None
    adapters: AdapterRows | None = None


Attend = Callable[[PassAttention], None]
Restore = Callable[[int], None]
"""Called with a table slot."""


class StepFeature(ABC):
    """Is told of every event in a sequence's life, of every compression and of every pass, in the order of the methods
    here. A method that a feature has no use for does nothing. Sequences are known by their table slots.

    tensors: that it has among the inputs of every step.
    reads_hidden: whether `computed` is called.
    captures: whether a graph may hold the passes that `before_pass` says nothing about.
    overlaps: whether a plan may be prepared, while the pass of the one before it runs.
    """

    tensors: tuple[StepTensor, ...] = ()
    reads_hidden: bool = False
    captures: bool = True
    overlaps: bool = True

    @classmethod
    @abstractmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        """The feature, if the options ask for it."""

    @classmethod
    def num_bytes(cls, config: EngineConfig, shape: CacheShape) -> dict[MemoryField, int]:
        """Memory of a rank that it takes beside the pool, by the field of EngineStats that counts it."""
        return {}

    # A plan, before its pass

    def reset(self) -> None:
        """Forget everything: a step was cut short."""

    def accepted(self, states: Sequence[SequenceState], counts: Sequence[int]) -> None:
        """In the pass before, sequences had drafts, of which so many tokens were right: what the pass has done for
        others is to be undone. Lengths do not have the right ones yet."""

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        """Nothing has changed yet: the sequences that the plan drops are among `states`, those that it starts are not,
        and blocks hold what they held after the last pass."""

    def start(self, table_slot: int, start: SequenceStart) -> None:
        """A sequence gets a table slot, whoever had it before."""

    def before_compression(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        """All sequences have started."""

    def after_compression(self, plan: StepPlan) -> None:
        """Nothing in this step reads blocks any more that the plan gives to others."""

    # A compression

    def before_choice(self, job: CompressionJob, blocks: np.ndarray) -> None:
        """Survivors are about to be chosen in the first part. blocks: ids of the region's."""

    def method_inputs(self, layers: Sequence[int], windows: PartWindows) -> MethodInputs:
        """Those that come from it, with a row for each window in the first layer, then in the next."""
        return {}

    def read_fields(self, table_slots: list[int]) -> dict[str, torch.Tensor]:
        """Fields of the AttentionBatch of a pass that computes queries again, and only reads the cache."""
        return {}

    def move(self, moves: Sequence[Move]) -> None:
        """KV pairs of a part are about to move: take along what belongs to them."""

    def compacted(self, job: CompressionJob, state: SequenceState) -> None:
        """All parts of a sequence are compacted."""

    # A pass

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> Attend | None:
        """Tables are those of the pass, lengths those before it. What this returns changes the attention of this pass,
        which then is not replayed from a graph."""

    def write(self, inputs: StepInputs, table_slots: np.ndarray, kv_lengths: np.ndarray, *, is_new: bool) -> None:
        """Write its tensors on the host. kv_lengths: int64 `[parts, S]`, before the pass. is_new: whether these inputs
        were written for another batch, or before a change of its tables that is not an append."""

    def attend(self, attention: PassAttention) -> None:
        """Change the attention of every pass, also of those that graphs record."""

    def computed(self, batch: StepBatch, positions: np.ndarray, hidden: torch.Tensor) -> None:
        """A pass has computed the hidden states `[T, hidden_size]` of its query tokens, at positions `[T]`."""

    def fork(self, parent: int, child: int) -> None:
        """A sequence branches after a pass, before it was ever compressed."""
        self.save(parent)(child)

    def reports(self, plan: StepPlan) -> bool:
        """Whether it is asked to add to the result of a plan, which is then made before the next one changes
        anything."""
        return not self.overlaps

    def after_pass(self, plan: StepPlan, result: StepResult) -> None:
        """Add to the result of a plan that it reports on, whose pass has run."""

    # Sequences that go to the host and come back

    def save(self, table_slot: int) -> Restore:
        """Copy all that is known of a sequence. What this returns lets one that has started go on as it was."""
        return lambda table_slot: None

    def close(self) -> None:
        """No plan comes any more."""
