"""A compression method on one rank of several: each decides for its own KV heads, as one rank would for all.

Most methods look at one KV head at a time, so ranks have nothing to tell each other. Two cases differ:

- Replicas of a KV head hold a part of its query heads each. They gather the queries, and sum the attention mass that
  each has observed, or take the highest of what each has received, before they select: so all of them keep the same KV
  pairs.
- Some methods compare the heads of a layer, or number them. These see all heads, and every rank takes what is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvllm.compression.mass import Softmax
from kvllm.compression.paged_keys import Keys
from kvllm.compression.registry import METHODS
from kvllm.parallel import KVHeads, Shard


class ShardedMethod:
    """`METHODS[name]` for the KV heads `heads` of a rank; called like a `Method`, by all ranks together. A rank chooses
    from its scores alone."""

    def __init__(self, name: str, heads: KVHeads, shard: Shard) -> None:
        self.method = METHODS[name]
        self.whole_layer = self.method.spec.whole_layer
        self.heads = heads
        self.shard = shard

    def __call__(self, queries: Tensor | None, keys: Keys, **options: Any) -> Tensor:
        if self.whole_layer:
            assert isinstance(keys, Tensor)
            return self._of_whole_layer(queries, keys, options)
        queries, options = self._with_replicas(queries, options)
        return self.method(queries, keys, **options)

    def score(self, queries: Tensor | None, keys: Keys, **options: Any) -> Tensor:
        """The first half of a call, for a method that has halves."""
        assert not self.whole_layer
        queries, options = self._with_replicas(queries, options)
        return self.method.score(queries, keys, **options)

    def _with_replicas(self, queries: Tensor | None, options: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
        """The arguments of a call with what replicas of these KV heads know."""
        if self.heads.replicas > 1:
            if queries is not None:
                queries = self._of_replicas(queries).flatten(1, 2)
                options["softmax"] = self._with_sinks(options["softmax"], self._of_replicas)
            for name in {"mass", "observed"} & set(options):
                options[name] = self._of_replicas(options[name]).sum(dim=1)
            if "received" in options:
                options["received"] = self._of_replicas(options["received"]).amax(dim=1)
        return queries, options

    def _of_whole_layer(self, queries: Tensor | None, keys: Tensor, options: dict[str, Any]) -> Tensor:
        if queries is not None:
            queries = self._gather(queries).flatten(1, 2)
            options["softmax"] = self._with_sinks(options["softmax"], self._gather)
        keys = self._of_all_heads(keys)
        if "values" in options:
            options["values"] = self._of_all_heads(options["values"])
        if "evicted_mask" in options:
            options["evicted_mask"] = self._of_all_heads(options["evicted_mask"].byte()).bool()
        kept = self.method(queries, keys, **options)
        return kept[:, self.heads.first : self.heads.first + self.heads.count]

    def _with_sinks(self, softmax: Softmax, gather: Callable[[Tensor], Tensor]) -> Softmax:
        """The softmax of all query heads that `gather` brings together."""
        if softmax.sinks is None:
            return softmax
        return replace(softmax, sinks=gather(softmax.sinks[None]).flatten())

    def _of_all_heads(self, x: Tensor) -> Tensor:
        """`[S, kv_heads of this rank, ...]` -> `[S, all KV heads, ...]`."""
        return self._gather(x)[:, :: self.heads.replicas].flatten(1, 2)

    def _of_replicas(self, x: Tensor) -> Tensor:
        """`[S, heads, ...]` -> `[S, replicas, heads, ...]`, from the ranks that hold the same KV head."""
        first = self.heads.first * self.heads.replicas
        return self._gather(x)[:, first : first + self.heads.replicas]

    def _gather(self, x: Tensor) -> Tensor:
        """`[S, heads, ...]` -> `[S, ranks, heads, ...]`."""
        gathered = self.shard.all_gather_last_dim(x.flatten(1).contiguous())
        return gathered.view(x.shape[0], self.shard.world_size, *x.shape[1:])
