"""From a method's name to what is called: `METHODS` has the function of every spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypedDict

from torch import Tensor

from kvllm.compression.gates import Gates
from kvllm.compression.mass import Softmax
from kvllm.compression.methods import token2chunk
from kvllm.compression.paged_keys import Keys
from kvllm.compression.specs import SPECS, TOKEN2CHUNK, Function, MethodSpec
from kvllm.compression.statistics import QueryStatistics

BY_LAYER = ("layer", "num_layers", "capacity", "evicted_mask", "mass")
"""Inputs of one layer. A method that takes one of them chooses for each layer on its own."""


class MethodInputs(TypedDict, total=False):
    """Inputs from the engine, beside queries, keys, `retain`, `buffer` and a method's options. A method gets those that
    its function has as keyword arguments. The S rows of a call are regions of sequences; without queries, in several
    layers at once, of which the first has the first rows.

    layer, num_layers: which layer of the model this is, from 0, and of how many.
    softmax: with queries, that of the layer's attention.
    seeds: one for each row, at least 0, that depends on the sequence and on the region's position alone.
    starts: one for each row, the KV pairs of its cache in front of the region.
    last_positions: one for each row, the position in the text of the region's last KV pair. The positions in front
        of it have no gaps in a window, nor where queries are recomputed.
    values: `[S, Hkv, C, d]`, as keys are.
    value_norms: float32 `[S, Hkv, C]`, lengths of the values, which few bits tell faster than the values.
    frequencies: float32 `[d / 2]`, radians by which the rotary embedding turns each pair of channels per position.
    statistics: of the layers, for the query heads of these KV heads, from a text that the model read.
    gates: with `gated`, of the layers, for these KV heads.
    capacity: with `ragged`, the most KV pairs that one head or layer may keep.
    evicted_mask: with `ragged`, bool `[S, Hkv, C]`, the slots that an earlier selection left without a KV pair.
    mass: with `reads_mass`, float32 `[S, Hkv, C]`, the attention that each KV pair has received so far.
    received: with `repeats`, float32 `[S, Hkv, C]`, the highest attention that each KV pair received when the text of
        the region was repeated.
    ages: with `reselects`, float32 `[S, C]`, how many queries `observed` stands for, for each KV pair.
    observed: with `reselects`, float32 `[S, Hkv, C - buffer]`, the scores that were added up while decoding.
    """

    layer: int
    num_layers: int
    softmax: Softmax
    seeds: Sequence[int]
    starts: Sequence[int]
    last_positions: Sequence[int]
    values: Tensor
    value_norms: Tensor
    frequencies: Tensor
    statistics: QueryStatistics
    gates: Gates
    capacity: int
    evicted_mask: Tensor
    mass: Tensor
    received: Tensor
    ages: Tensor
    observed: Tensor


INPUTS = tuple(MethodInputs.__annotations__)


class Method:
    """The function of a compression method, called with what it asks for.

    Raises TypeError if the function and its spec do not go together: the function must take all options of the spec,
    and must need nothing but these and `INPUTS`.
    """

    def __init__(self, spec: MethodSpec) -> None:
        self.spec = spec
        self.select = _function(spec.function)
        self._scores = _function(spec.scores) if spec.scores else None
        self._score_arguments = inspect.signature(self._scores).parameters if self._scores else {}
        options = {option.name for option in spec.options}
        arguments = inspect.signature(self.select).parameters
        if missing := options - set(arguments):
            raise TypeError(f"method {spec.name!r} has an option {min(missing)!r} that its function does not take")
        self.arguments = frozenset(arguments) & (options | set(INPUTS))
        self.by_layer = not self.arguments.isdisjoint(BY_LAYER)
        needed = {name for name, argument in arguments.items() if argument.default is argument.empty}
        if unknown := needed - self.arguments - {"queries", "keys", "retain", "buffer"}:
            raise TypeError(
                f"the function of method {spec.name!r} needs {min(unknown)!r}, which is no option of its spec and "
                f"nothing that the engine offers: {', '.join(INPUTS)}"
            )

    def __call__(self, queries: Tensor | None, keys: Keys, *, retain: int, buffer: int, **offered: Any) -> Tensor:
        """Choose the KV pairs of a region to keep, per sequence and KV head.

        Args:
            queries: `[S, Hq, query tokens, d]`, rotated, of the region's last tokens, or None for a method that needs
                none, and
            keys: `[S, Hkv, C, d]`, rotated, bfloat16 or float32, on one device; or PagedKeys, as its spec says. Query
                head h reads KV head `h // (Hq // Hkv)`.
            retain: KV pairs kept of the C, buffer included; everything is kept if `retain >= C`.
            buffer: the last KV pairs of the region, always kept.
            offered: options and `INPUTS`; those that this method does not take are left out.

        Returns:
            int64 `[S, Hkv, min(retain, C)]`: ascending offsets in the region; with `ragged`, a head's may end in -1.
            The result for a sequence does not depend on the others in the batch.
        """
        return self.select(queries, keys, retain=retain, buffer=buffer, **_only(self.arguments, offered))

    @property
    def in_halves(self) -> bool:
        """Whether a call is `choose` of what `score` returns, so that `choose` may serve many layers at once."""
        return self._scores is not None

    def score(self, queries: Tensor | None, keys: Keys, *, buffer: int, **offered: Any) -> Tensor:
        """The first half of a call: float32 `[S, Hkv, ...]`. Arguments as there."""
        assert self._scores is not None
        return self._scores(queries, keys, buffer=buffer, **_only(self._score_arguments, offered))

    def choose(self, scores: Tensor, *, retain: int, buffer: int, **options: Any) -> Tensor:
        """The second half of a call, of as many rows as there are scores. The result is that of the call."""
        own = [option.name for option in TOKEN2CHUNK]
        return token2chunk.choose(scores, retain=retain, buffer=buffer, **_only(own, options))


def _only(names: Container[str], offered: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in offered.items() if name in names}


def _function(function: Function) -> Callable[..., Tensor]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(import_module(f"kvllm.compression.methods.{module}"), name)


class Methods(Mapping[str, Method]):
    """The methods of all specs, by name. One is made when it is asked for."""

    def __getitem__(self, name: str) -> Method:
        return _method(SPECS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(SPECS)

    def __len__(self) -> int:
        return len(SPECS)


@cache
def _method(spec: MethodSpec) -> Method:
    return Method(spec)


METHODS = Methods()
