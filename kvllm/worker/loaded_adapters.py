"""The adapters that a rank holds, and which of its sequences have one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvllm.config import EngineConfig
from kvllm.errors import RequestError
from kvllm.lora.product import (
    NO_ADAPTER,
    AdaptedMatrix,
    AdapterRows,
    LowRank,
    PackedAdapters,
    PassAdapters,
    StackedAdapters,
)
from kvllm.lora.request import Adapter
from kvllm.models.base import Decoder
from kvllm.models.weights import LinearWeight
from kvllm.worker.adapter_weights import adaptable_weights, adapted_matrices, read_adapter
from kvllm.worker.step_inputs import StepInputs
from kvllm.worker.transfer import to_device

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """Why an adapter cannot be read."""

    digest: str
    error: str


class LoadedAdapters:
    """Reads adapters when a sequence first needs them, and holds the `max_loras` that were used last. The scheduler
    lets no more be in use at once. Their numbers are below `max_loras`.

    failures: of the sequences whose adapters cannot be read, by table slot.
    numbers: int64 `[max_num_seqs]`, that of the adapter of each table slot's sequence, NO_ADAPTER for none.
    """

    def __init__(self, model: Decoder, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._most = config.max_loras
        self._weights = adaptable_weights(model.weights())
        self._shard = model.lm_head.shard
        self._device = device
        self._dtype = dtype
        self._number_of: OrderedDict[str, int] = OrderedDict()  # by digest, the one that was used last at the end
        self.failures: dict[int, Failure] = {}
        self.numbers = np.full(config.max_num_seqs, NO_ADAPTER)
        ranks = adapted_matrices(self._weights, config.max_lora_rank)
        self._matrices = {matrix: self._adapted(matrix, rank, model.adapters) for matrix, rank in ranks.items()}
        for matrix, adapted in self._matrices.items():
            matrix.adapters = adapted

    def _adapted(self, matrix: LinearWeight, rank: int, current: PassAdapters) -> AdaptedMatrix:
        if self._device.type == "cpu" and matrix.in_features * self._dtype.itemsize % 4 == 0:
            return PackedAdapters(current)
        size = matrix.out_features, matrix.in_features
        return StackedAdapters(current, self._most, rank, size, self._dtype, self._device)

    def launch_few(self) -> None:
        """Launch what a step of few tokens does, of which none has an adapter, for every matrix."""
        for matrix, adapted in self._matrices.items():
            adapted.current.rows = AdapterRows(to_device([NO_ADAPTER], self._device), self._most)
            x = torch.zeros(1, matrix.in_features, dtype=self._dtype, device=self._device)
            adapted.add(x, x.new_zeros(1, matrix.out_features))

    def use(self, table_slot: int, adapter: Adapter | None) -> None:
        """A sequence begins in a table slot."""
        self.release(table_slot)
        if adapter is None:
            return
        if adapter.digest in self._number_of:
            self._number_of.move_to_end(adapter.digest)
        elif error := self._failure(adapter) or self._load(adapter):
            self.failures[table_slot] = Failure(adapter.digest, error)
            return
        self.numbers[table_slot] = self._number_of[adapter.digest]

    def fork(self, parent: int, child: int) -> None:
        """A sequence branches off."""
        self.release(child)
        self.numbers[child] = self.numbers[parent]

    def release(self, table_slot: int) -> None:
        """The sequence of a table slot is gone. Its adapter stays until there is no room."""
        self.numbers[table_slot] = NO_ADAPTER
        self.failures.pop(table_slot, None)

    def reset(self) -> None:
        """All sequences are gone."""
        self.numbers[:] = NO_ADAPTER
        self.failures = {}

    def rows(
        self, table_slots: Sequence[int] | np.ndarray, num_tokens: Sequence[int] | np.ndarray
    ) -> AdapterRows | None:
        """Those of a pass over so many tokens of each of some sequences, one after the other; on a CPU, None without
        adapters."""
        numbers = self.numbers[table_slots]
        if self._device.type == "cpu" and (numbers == NO_ADAPTER).all():
            return None
        return AdapterRows(to_device(np.repeat(numbers, num_tokens), self._device), self._most)

    def rows_of(self, inputs: StepInputs, name: str) -> AdapterRows | None:
        """The same for a step, of which an input has the number of each sequence's adapter. A graph may hold it."""
        numbers, starts = inputs.by_name[name], inputs.query_start_loc
        if numbers.is_cpu and bool((numbers == NO_ADAPTER).all()):
            return None
        if not inputs.shape.is_decode:
            numbers = numbers.repeat_interleave(starts.diff(), output_size=inputs.shape.num_query_tokens)
        return AdapterRows(numbers.long(), self._most)

    def _failure(self, adapter: Adapter) -> str | None:
        """Why a running sequence has not got the adapter. Others must not get it beside that one, with whose blocks,
        computed without it, they might begin."""
        return next((each.error for each in self.failures.values() if each.digest == adapter.digest), None)

    def _load(self, adapter: Adapter) -> str | None:
        """Read an adapter, on all ranks or none. Returns why that is impossible."""
        self._make_room()
        error, found = None, dict[LinearWeight, LowRank]()
        try:
            found = read_adapter(adapter, self._weights, self._dtype)
        except (RequestError, OSError) as failure:
            error = f"the adapter {adapter.name!r} cannot be read: {failure}"
            logger.warning(error)
        if self._shard.world_size > 1:
            here = torch.tensor([[int(error is None)]], device=self._device)
            if not bool(self._shard.all_gather_last_dim(here).all()):
                return error or f"the adapter {adapter.name!r} cannot be read by another rank"
        if error:
            return error
        number = min({*range(self._most)} - {*self._number_of.values()})
        self._number_of[adapter.digest] = number
        for matrix, low_rank in found.items():
            self._matrices[matrix].put(number, low_rank)
        return None

    def _make_room(self) -> None:
        in_use = set(self.numbers.tolist())
        for digest, number in list(self._number_of.items()):
            if len(self._number_of) < self._most:
                return
            if number not in in_use:
                del self._number_of[digest]
                for adapted in self._matrices.values():
                    adapted.drop(number)
