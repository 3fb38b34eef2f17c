"""A compression method together with what it is told about the model: the same in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvllm.compression.gates import Gates
from kvllm.compression.paged_keys import Keys
from kvllm.compression.registry import Method
from kvllm.compression.sharded_method import ShardedMethod
from kvllm.compression.statistics import QueryStatistics


class WithModelInputs:
    """A method that gets `frequencies`, `statistics` and `gates` in every call: `kvllm.compression.registry.INPUTS`.

    statistics, gates: of all layers; None for a method that takes none.
    """

    def __init__(
        self,
        method: Method | ShardedMethod,
        frequencies: Tensor,
        statistics: QueryStatistics | None = None,
        gates: Gates | None = None,
    ) -> None:
        self.method = method
        self.frequencies = frequencies
        self.statistics = statistics
        self.gates = gates

    def __call__(self, queries: Tensor | None, keys: Keys, *, layers: Sequence[int], **offered: Any) -> Tensor:
        """layers: those that the rows of `keys` are of, ascending."""
        if self.statistics:
            offered["statistics"] = self.statistics.of_layers(layers)
        if self.gates:
            offered["gates"] = self.gates.of_layers(layers)
        return self.method(queries, keys, frequencies=self.frequencies, **offered)

    def score(self, queries: Tensor | None, keys: Keys, *, layers: Sequence[int], **offered: Any) -> Tensor:
        """The first half of a call, for a method that has halves. Statistics and gates have no part in it."""
        return self.method.score(queries, keys, frequencies=self.frequencies, **offered)
