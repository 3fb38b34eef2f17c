"""The choice from scores serves all layers at once, and says what a choice for each layer would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvllm import CompressionConfig
from kvllm.compression.specs import SPECS
from kvllm.worker import selector as selector_module
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import fitting
from tests.helpers.engines import greedy, make_llm, random_prompts, tokens

LAYERS = 4
METHODS = [name for name, spec in SPECS.items() if spec.scores]


class Operations(TorchDispatchMode):
    """Counts what reaches the device, by name, and collects the choices of a compressor."""

    def __init__(self, compressor: Any) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.chosen: list[torch.Tensor] = []
        self.compressor, self.compress = compressor, compressor.compress
        self.choose = compressor.selector.choose
        compressor.selector.choose, compressor.compress = self._choose, self._compress

    def _choose(self, *args: Any, **options: Any) -> torch.Tensor:
        self.chosen.append(self.choose(*args, **options))
        return self.chosen[-1]

    def _compress(self, *args: Any) -> None:
        with self:
            self.compress(*args)

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


checkpoint = checkpoint_fixture("qwen3", head_dim=16, num_hidden_layers=LAYERS)


def run(checkpoint: Path, method: str) -> tuple[list[list[int]], Operations, int]:
    options = fitting(
        method,
        period=8,
        max_sequences=2,
        window_blocks=3,
        buffer=8,
        chunk_budget=6,
        query_window=8,
    )
    llm = make_llm(checkpoint, compression=CompressionConfig(**options))
    operations = Operations(llm.llm_engine.executor.runner.compressor)
    found = tokens(llm, random_prompts(256, (21, 40)), greedy(90))
    return found, operations, llm.stats().compression_events


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if i % 2 == 0 else pytest.mark.long) for i, name in enumerate(METHODS)]
)
def test_layers_are_chosen_from_at_once(checkpoint: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for the scores of one layer alone, each is chosen from on its own: as many operators for each of them,
    and the same choices."""
    found, together, events = run(checkpoint, method)
    monkeypatch.setattr(selector_module, "MAX_SCORE_BYTES", 1)
    expected, one_by_one, _ = run(checkpoint, method)
    assert len(together.chosen) == events > 0 and len(one_by_one.chosen) == LAYERS * events
    assert found == expected
    assert torch.equal(torch.cat(together.chosen), torch.cat(one_by_one.chosen))
    assert LAYERS * together.counts["choose_chunks"] == one_by_one.counts["choose_chunks"] > 0
