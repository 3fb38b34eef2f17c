"""A step that a device may still execute: its result, and its tokens for the step after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from kvllm.core.protocol import PhaseSeconds, SampledToken, StepResult
from kvllm.worker.prompt_logprobs import PromptReport
from kvllm.worker.sampler import Samples
from kvllm.worker.state import SequenceState
from kvllm.worker.step_batch import StepBatch
from kvllm.worker.timing import PhaseClock


@dataclass
class Launched:
    """verified, event_bytes: see StepResult. complete: adds to the result what tiers have done, and drafts.
    batch: of the step. has_result: whether `result` was called."""

    samples: Samples | None = None
    verified: Sequence[list[SampledToken]] = ()
    clock: PhaseClock | None = None
    event_bytes: int = 0
    prompts: list[PromptReport] = field(default_factory=list)
    complete: Callable[[StepResult], None] | None = None
    batch: StepBatch | None = None
    has_result: bool = False
    _unknown: list[tuple[SequenceState, int, int]] = field(default_factory=list)
    """Sequences whose token at an index is the sample of a row, for which the next step did not wait."""

    @cached_property
    def tokens(self) -> list[SampledToken]:
        """Waits for the device."""
        return self.samples.tokens() if self.samples else []

    def is_due(self) -> bool:
        """Whether the result is to be made now: the device has executed the step, or the next one changes what the
        result reads."""
        return self.complete is not None or self.clock is None or self.clock.is_over()

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Waits for the device."""
        self.has_result = True
        for state, index, row in self._unknown:
            state.set_token(index, self.tokens[row].token_id)
        prompts = [prompt.wait() for prompt in self.prompts]
        seconds = self.clock.seconds() if self.clock else PhaseSeconds()
        result = StepResult(self.tokens, seconds, self.event_bytes, prompts, verified=list(self.verified))
        if self.complete:
            self.complete(result)
        return result

    def filled(self, token_ids: np.ndarray, pending: list[int], batch: StepBatch) -> np.ndarray:
        """A token of each sequence that decodes in the next step: what this one has sampled in place of those that are
        `pending`. Waits for the device."""
        assert self.samples
        sampled, is_same = self.samples.token_ids(), batch is self.batch
        if is_same and len(pending) == len(token_ids):
            return sampled
        filled = token_ids.copy()
        filled[pending] = sampled[pending if is_same else [batch.states[index].sampled_row for index in pending]]
        return filled

    def place(self, states: Sequence[SequenceState], places: list[int], token_ids: torch.Tensor) -> None:
        """Write the tokens sampled for sequences to places of the token ids `[T]`, all on the device. The sequences
        have them when the result is there."""
        if not states or not self.samples:
            return
        rows = [state.sampled_row for state in states]
        self._unknown += [(state, len(state.token_ids) - 1, row) for state, row in zip(states, rows, strict=True)]
        self.samples.place(rows, places, token_ids)
