"""The layers as one operator against the loop over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvllm.attention.cpu import CpuBackend
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.paged_model import PagedModel, load, tokens

CASES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "sliding": ("mistral", {"sliding_window": 8}),
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
    with pytest.raises(RuntimeError, match="what make_decoder returned"):
        torch.ops.kvllm.run_decoder(
            torch.zeros(8, dtype=torch.uint8), *[torch.zeros(1, 1)] * 8, *[None] * 4, 0, 0, 0, False, 1.0
        )
