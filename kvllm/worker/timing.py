"""How long the phases of a step take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

import torch

from kvllm.core.protocol import PhaseSeconds

Phase = Literal["model", "select", "score", "compact"]
"""The timed phases. "score" is a part of "select", whose rest is the recomputation of queries."""


class PhaseClock:
    """The phases of one step. A GPU times them where they run, by events: their launch returns at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Phase, Any, Any]] = []

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans.append((phase, begin, self._now()))

    def seconds(self) -> PhaseSeconds:
        """The sums. Waits for what was measured last."""
        if self._spans and self._on_gpu:
            self._spans[-1][2].synchronize()
        sums: dict[Phase, float] = {"model": 0.0, "select": 0.0, "score": 0.0, "compact": 0.0}
        for phase, begin, end in self._spans:
            sums[phase] += begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin
        recompute = sums["select"] - sums["score"]
        return PhaseSeconds(sums["model"], recompute, sums["score"], sums["compact"])

    def is_over(self) -> bool:
        """Whether `seconds` would not wait."""
        return not (self._spans and self._on_gpu) or self._spans[-1][2].query()

    def _now(self) -> Any:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
