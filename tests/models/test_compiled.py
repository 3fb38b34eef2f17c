"""The layers as one operator against the loop over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvllm.attention.cpu import CpuBackend
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.paged_model import PagedModel, load, tokens

CASES = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CASES)
def test_compiled_layers_equal_the_loop(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Prefill, decode and a mixed step: the same bits, hidden states and cache."""
    make_checkpoint(tmp_path, family, **CASES[family])
    model, config = load(tmp_path, dtype)
    compiled, looped = (PagedModel(model, config, dtype, CpuBackend) for _ in range(2))
    assert model._compiled is not None and model._compiled.serves(compiled.context(None, torch.empty(0)))
    steps = [{0: tokens(20), 1: tokens(7, 2)}, {0: [5], 1: [9]}, {0: [3], 2: tokens(33, 3)}, {1: [1]}]
    found = [compiled.forward(step) for step in steps]
    model._compiled = None
    for hidden, step in zip(found, steps, strict=True):
        assert torch.equal(hidden, looped.forward(step))
    assert torch.equal(compiled.cache.data.nan_to_num(), looped.cache.data.nan_to_num())


def test_layers_are_not_compiled_where_something_comes_between(tmp_path: Path) -> None:
    """A pass that reads the cache only, and attention that is not the CPU's own."""
    make_checkpoint(tmp_path, "llama")
    paged = PagedModel(*load(tmp_path))
    assert paged.model._compiled is not None
    assert not paged.model._compiled.serves(paged.context(None, torch.empty(0)))
    paged = PagedModel(*load(tmp_path), backend=CpuBackend)
    assert not paged.model._compiled.serves(paged.context(None))


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
    with pytest.raises(RuntimeError, match="what make_decoder returned"):
        torch.ops.kvllm.run_decoder(
            torch.zeros(8, dtype=torch.uint8), *[torch.zeros(1, 1)] * 8, *[None] * 4, 0, 0, 0, False, 1.0
        )
