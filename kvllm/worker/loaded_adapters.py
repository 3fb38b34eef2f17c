"""The adapters that a rank holds, and which of its sequences have one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from kvllm.config import EngineConfig
from kvllm.errors import RequestError
from kvllm.lora.product import NO_ADAPTER, AdaptedMatrix, AdapterRows, LowRank
from kvllm.lora.request import Adapter
from kvllm.models.base import Decoder
from kvllm.models.layers import MatrixRows
from kvllm.models.weights import LinearWeight
from kvllm.worker.adapter_weights import adaptable_weights, adapter_bytes, read_adapter

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """Why an adapter cannot be read."""

    digest: str
    error: str


class LoadedAdapters:
    """Reads adapters when a sequence first needs them, and holds the `max_loras` that were used last. The scheduler
    lets no more be in use at once.

    most_bytes: that they may take.
    failures: of the sequences whose adapters cannot be read, by table slot.
    numbers: int64 `[max_num_seqs]`, that of the adapter of each table slot's sequence, NO_ADAPTER for none.
    """

    def __init__(self, model: Decoder, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._most = config.max_loras
        self._weights = adaptable_weights(model.weights())
        self.most_bytes = self._most * adapter_bytes(self._weights, config.max_lora_rank, dtype)
        self._shard = model.lm_head.shard
        self._device = device
        self._dtype = dtype
        self._number_of: OrderedDict[str, int] = OrderedDict()  # by digest, the one that was used last at the end
        self._next = count()
        self.failures: dict[int, Failure] = {}
        self.numbers = np.full(config.max_num_seqs, NO_ADAPTER)
        self._matrices = {
            each.target.matrix: AdaptedMatrix(model.adapters)
            for each in self._weights.values()
            if isinstance(each.target, MatrixRows)
        }
        for matrix, adapted in self._matrices.items():
            matrix.adapters = adapted

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
        """Those of a pass over so many tokens of each of some sequences, one after the other; None without adapters."""
        numbers = self.numbers[table_slots]
        return AdapterRows(np.repeat(numbers, num_tokens), self._device) if (numbers != NO_ADAPTER).any() else None

    def _failure(self, adapter: Adapter) -> str | None:
        """Why a running sequence has not got the adapter. Others must not get it beside that one, with whose blocks,
        computed without it, they might begin."""
        return next((each.error for each in self.failures.values() if each.digest == adapter.digest), None)

    def _load(self, adapter: Adapter) -> str | None:
        """Read an adapter, on all ranks or none. Returns why that is impossible."""
        self._make_room()
        error, found = None, dict[LinearWeight, LowRank]()
        try:
            found = read_adapter(adapter, self._weights, self._dtype, self._device)
        except (RequestError, OSError) as failure:
            error = f"the adapter {adapter.name!r} cannot be read: {failure}"
            logger.warning(error)
        here = torch.tensor([[int(error is None)]], device=self._device)
        if not bool(self._shard.all_gather_last_dim(here).all()):
            return error or f"the adapter {adapter.name!r} cannot be read by another rank"
        number = self._number_of[adapter.digest] = next(self._next)
        for matrix, low_rank in found.items():
            self._matrices[matrix].adapters[number] = low_rank
        return None

    def _make_room(self) -> None:
        in_use = set(self.numbers.tolist())
        for digest, number in list(self._number_of.items()):
            if len(self._number_of) < self._most:
                return
            if number not in in_use:
                del self._number_of[digest]
                for adapted in self._matrices.values():
                    adapted.adapters.pop(number, None)
