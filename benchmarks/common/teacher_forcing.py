"""Engines that are given their output token by token, as if they had generated it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from kvllm import LLM, RequestOutput, SamplingParams
from kvllm.core.executor import Executor
from kvllm.core.protocol import SampledToken, StepPlan, StepResult
from kvllm.worker.inline import InlineExecutor

Observe = Callable[[torch.Tensor, list[int], list[int]], None]


class Forced(Executor):
    """Runs plans, and gives tokens in place of those that are sampled. For an engine that has run nothing yet.

    forced: by sequence, the first tokens of its output; behind them it goes on by itself.
    observe: called at every step with the logits `[R, V]` that tokens are chosen from, the sequence of each row, and
        how many tokens that had before.
    """

    def __init__(self, inner: InlineExecutor, forced: Sequence[list[int]], observe: Observe | None = None) -> None:
        self.inner = inner
        self.runner = inner.runner
        self.forced = forced
        self.observe = observe
        self.counts = [0] * len(forced)
        self._logits = torch.empty(0)
        self._compute, self.runner.model.logits = self.runner.model.logits, self._record

    def _record(self, hidden: torch.Tensor) -> torch.Tensor:
        self._logits = self._compute(hidden)
        return self._logits

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        sampled = [item.seq_id for item in plan.scheduled if item.samples]
        if self.observe and sampled:
            self.observe(self._logits, sampled, [self.counts[seq_id] for seq_id in sampled])
        pairs = zip(sampled, result.tokens, strict=True)
        return msgspec.structs.replace(result, tokens=[self._choose(seq_id, token) for seq_id, token in pairs])

    def _choose(self, seq_id: int, sampled: SampledToken) -> SampledToken:
        count, forced = self.counts[seq_id], self.forced[seq_id]
        self.counts[seq_id] += 1
        return SampledToken(forced[count]) if count < len(forced) else sampled

    def close(self) -> None:
        self.inner.close()


def feed(
    llm: LLM,
    prompts: Sequence[list[int]],
    forced: Sequence[list[int]],
    params: Sequence[SamplingParams],
    observe: Observe | None = None,
) -> list[RequestOutput]:
    """Complete prompts in a fresh engine, the first tokens of each output given. Raises the first request's error."""
    llm.llm_engine.executor = Forced(llm.llm_engine.executor, forced, observe)  # pyright: ignore[reportArgumentType]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs
