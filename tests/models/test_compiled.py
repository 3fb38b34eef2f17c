"""The layers as one operator against the loop over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm.attention.base import AttentionBatch
from kvllm.attention.context import AttentionContext, PartedAttention
from kvllm.attention.cpu import CpuBackend
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.lora.product import NO_ADAPTER, AdapterRows, LowRank, PackedAdapters
from kvllm.models.base import Decoder
from kvllm.models.config import ModelConfig
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import MULTIPLIERS
from tests.helpers.paged_model import PagedModel, load, tokens
from tests.helpers.tensors import randn

CASES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "sliding": ("mistral", {"sliding_window": 8}),
    "multipliers": ("granite", MULTIPLIERS),
    "two rotations": ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "four norms": ("glm4", {"pad_token_id": 0}),
    "float32 norms": ("gemma3_text", {"sliding_window": 8}),
}
"""Families, with options of their checkpoints."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_equal_the_loop(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Prefill, decode and a mixed step: the same bits, hidden states and cache."""
    family, options = CASES[case]
    make_checkpoint(tmp_path, family, **options)
    model, config = load(tmp_path, dtype)
    compiled, looped = (PagedModel(model, config, dtype, CpuBackend) for _ in range(2))
    assert model._compiled is not None and model._compiled.serves(compiled.context(None, torch.empty(0)))
    steps = [{0: tokens(20), 1: tokens(7, 2)}, {0: [5], 1: [9]}, {0: [3], 2: tokens(33, 3)}, {1: [1]}]
    found = [compiled.forward(step) for step in steps]
    model._compiled = None
    for hidden, step in zip(found, steps, strict=True):
        assert torch.equal(hidden, looped.forward(step))
    assert torch.equal(compiled.cache.data.nan_to_num(), looped.cache.data.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_wanted_tokens_have_the_bits_that_they_have_among_all(
    tmp_path: Path, compiled: bool, dtype: torch.dtype
) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    model, config = load(tmp_path, dtype)
    model._compiled = model._compiled if compiled else None
    every, some = (PagedModel(model, config, dtype, CpuBackend) for _ in range(2))
    steps = [{0: tokens(20), 1: tokens(7, 2)}, {0: [5], 1: tokens(11, 3)}]
    for step, wanted in zip(steps, [[0, 19, 20, 26], [11]], strict=True):
        assert torch.equal(some.forward(step, wanted), every.forward(step)[wanted])
    assert torch.equal(some.cache.data.nan_to_num(), every.cache.data.nan_to_num())


class _Adapted(PagedModel):
    """Of the tokens of a step, the first two have an adapter, the third one has none, and all others another one."""

    def context(self, plan: Any, slot_mapping: torch.Tensor | None = None) -> AttentionContext:
        numbers = torch.full(plan.last_kv_index.shape, 2)
        numbers[:3] = torch.tensor([0, 0, NO_ADAPTER])[: len(numbers)]
        return replace(super().context(plan, slot_mapping), adapters=AdapterRows(numbers, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_with_adapters_equal_the_loop(tmp_path: Path, dtype: torch.dtype) -> None:
    """The first one changes all matrices, the other one those of outputs. Some steps want some tokens."""
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    model, config = load(tmp_path, dtype)
    assert model._compiled is not None
    for number, matrix in enumerate(model._compiled._matrices):
        matrix.adapters = PackedAdapters(model.adapters)
        size = matrix.out_features, matrix.in_features
        for adapter in (0, 2) if number % 4 == 1 else (0,):
            down, up = randn(4, size[1], dtype=dtype, seed=number), randn(size[0], 4, dtype=dtype, seed=adapter)
            matrix.adapters.put(adapter, LowRank(down / 8, up / 8))
    compiled, looped = (_Adapted(model, config, dtype, CpuBackend) for _ in range(2))
    plain = PagedModel(model, config, dtype, CpuBackend)
    assert model._compiled.serves(compiled.context(compiled.plan({0: 1}, [0])))
    steps = [({0: tokens(20), 1: tokens(7, 2)}, [1, 2, 19, 26]), ({0: [5]}, None), ({1: [9, 4, 4, 1]}, [2, 3])]
    found = [compiled.forward(*step) for step in steps]
    without = [plain.forward(*step) for step in steps]
    model._compiled = None
    for hidden, step, other in zip(found, steps, without, strict=True):
        assert torch.equal(hidden, looped.forward(*step))
        assert not any(torch.equal(*rows) for rows in zip(hidden, other, strict=True))
    assert torch.equal(compiled.cache.data.nan_to_num(), looped.cache.data.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_compiled_queries_equal_the_loop(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Those of some cached tokens of two sequences: the same bits, and the cache is left as it is."""
    family, options = CASES[case]
    make_checkpoint(tmp_path, family, **options)
    model, config = load(tmp_path, dtype)
    paged = PagedModel(model, config, dtype, CpuBackend)
    texts = {0: tokens(30), 2: tokens(17, 2)}
    paged.forward(texts)
    cache = paged.cache.data.clone()
    rows = {0: [*range(3, 24, 2), 27], 2: [2, 11, 12, 16]}
    index = [row for of_sequence in rows.values() for row in of_sequence]
    token_ids = torch.tensor([texts[s][row] for s, of_sequence in rows.items() for row in of_sequence])
    context = paged.context(paged.plan({s: len(of_sequence) for s, of_sequence in rows.items()}, index))
    found, looped = list[tuple[int, torch.Tensor]](), list[tuple[int, torch.Tensor]]()
    model.recompute_queries(token_ids, torch.tensor(index), context, lambda *visited: found.append(visited))
    model._compiled = None
    model.recompute_queries(token_ids, torch.tensor(index), context, lambda *visited: looped.append(visited))
    assert [layer for layer, _ in found] == [layer for layer, _ in looped] == list(range(config.num_layers))
    for (_, ours), (_, theirs) in zip(found, looped, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(paged.cache.data.nan_to_num(), cache.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_equal_the_loop_where_parts_have_tables_of_their_own(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    """Prefill, two decode steps whose queries score windows, and queries of cached tokens: the same bits."""
    family, options = CASES[case]
    make_checkpoint(tmp_path, family, **options)
    model, config = load(tmp_path, dtype)
    compiled, looped = _InParts(model, config, dtype), _InParts(model, config, dtype)
    assert model._compiled is not None and model._compiled.serves(compiled.context([20, 7], [0, 0]))

    def everything(parts: _InParts) -> list[torch.Tensor]:
        found = [parts.forward([20, 7], [0, 0])]
        found += [parts.forward([1, 1], cached, scored=True) for cached in ([20, 7], [21, 8])]
        token_ids, positions, context = parts.inputs([3, 2], [11, 4])
        model.recompute_queries(token_ids, positions, context, lambda _, queries: found.append(queries.clone()))
        return found

    ours = everything(compiled)
    model._compiled = None
    theirs = everything(looped)
    assert len(ours) == len(theirs) == 3 + config.num_layers
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert torch.equal(compiled.cache.data, looped.cache.data)
    assert compiled.cache.scores is not None and looped.cache.scores is not None
    assert torch.equal(compiled.cache.scores, looped.cache.scores)
    windowed = any(options.window for options in config.layers)
    assert (compiled.cache.scores.count_nonzero() == 0) == windowed


class _InParts:
    """Three layers in two parts of KV groups, of two sequences. The first and the last layer share a part; in the other
    one, more KV pairs lie before those of the tokens, each sequence has other blocks, and these hold one layer."""

    def __init__(self, model: Decoder, config: ModelConfig, dtype: torch.dtype) -> None:
        self.model = model
        shape = CacheShape(3, model.num_kv_heads, config.head_dim, 4, dtype, scored=True, places=(0, 0, 1))
        self.cache = PagedKVCache(shape, num_blocks=64)
        generator = torch.Generator().manual_seed(0)
        self.cache.data.normal_(generator=generator)
        assert self.cache.scores is not None
        self.cache.scores.zero_()
        self.backend = CpuBackend(self.cache, model.num_query_heads, config.scale, config.layers)
        self.operations = make_operations(self.cache)
        blocks = torch.randperm(64, generator=generator)
        self.tables = [blocks[:24].view(2, 12).int(), blocks[24:60].view(2, 18).int()]

    def forward(self, num_tokens: list[int], cached: list[int], *, scored: bool = False) -> torch.Tensor:
        token_ids, positions, context = self.inputs(num_tokens, cached, scored=scored)
        return self.model.forward(token_ids, positions, context)

    def inputs(
        self, num_tokens: list[int], cached: list[int], *, scored: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, PartedAttention]:
        positions = self.index(num_tokens, cached, [0, 0])
        return positions * 7 % 256, positions, self.context(num_tokens, cached, scored=scored)

    def context(self, num_tokens: list[int], cached: list[int], *, scored: bool = False) -> PartedAttention:
        starts = torch.tensor([0, *num_tokens]).cumsum(0).int()
        of_tokens = torch.arange(2).repeat_interleave(torch.tensor(num_tokens))
        parts = []
        for tables, ahead in zip(self.tables, ([0, 0], [5, 9]), strict=True):
            index = self.index(num_tokens, cached, ahead)
            slots = tables[of_tokens, index // 4].long() * 4 + index % 4
            batch = AttentionBatch(starts, index.int(), tables)
            if scored:
                batch = replace(batch, scored_from=torch.tensor(ahead).int())
            parts.append(AttentionContext(self.backend, self.operations, self.backend.plan(batch), slots))
        return PartedAttention(parts, [0, 1, 0])

    @staticmethod
    def index(num_tokens: list[int], cached: list[int], ahead: list[int]) -> torch.Tensor:
        starts = [a + b for a, b in zip(cached, ahead, strict=True)]
        return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, num_tokens, strict=True)])


def test_layers_are_not_compiled_where_attention_is_not_the_cpus_own(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    paged = PagedModel(*load(tmp_path))
    assert paged.model._compiled is not None
    assert not paged.model._compiled.serves(paged.context(None, torch.empty(0)))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    paged = PagedModel(*load(tmp_path), backend=CpuBackend)
    plan = paged.plan({0: 2}, [0, 1])
    context = paged.context(plan, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="position 512 is not among the 512 rows"):
        paged.model.forward(torch.tensor([1, 2]), torch.tensor([0, 512]), context)
    with pytest.raises(RuntimeError, match="positions is 3, not 2"):
        paged.model.forward(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), context)
    with pytest.raises(RuntimeError, match="slot"):
        paged.model.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), paged.context(plan, torch.tensor([0, 10**6])))
    for wanted in ([0, 0], [1, 0], [2], [-1]):
        with pytest.raises(RuntimeError, match="wanted has"):
            paged.model.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), context, torch.tensor(wanted))
    with pytest.raises(RuntimeError, match="layer_parts has 1, not below 1"):
        paged.model.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), PartedAttention([context], [0, 1, 0]))
    with pytest.raises(RuntimeError, match="layer_parts has 2 numbers, not 3"):
        paged.model.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), PartedAttention([context], [0, 0]))
    one = torch.zeros(1, 1)
    tables = [[one], one, one, one, [one], [one], None, None, [0], [0], [0], None, []]
    rest = [None] * 6 + [[], []]
    with pytest.raises(RuntimeError, match="what make_decoder returned"):
        torch.ops.kvllm.run_decoder(torch.zeros(8, dtype=torch.uint8), one, one, *tables, 1.0, *rest)
