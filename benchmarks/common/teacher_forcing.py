"""Teacher forcing: an engine is given its output token by token, as if it had generated it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from benchmarks.common.internals import executor_of, replace_executor
from benchmarks.common.progress import show_progress
from kvllm import LLM, RequestOutput, SamplingParams
from kvllm.core.executor import BlockingExecutor
from kvllm.core.protocol import SampledToken, StepPlan, StepResult
from kvllm.worker.inline import InlineExecutor

Observe = Callable[[torch.Tensor, list[int], list[int]], None]


class Forced(BlockingExecutor):
    """Runs plans, and replaces sampled tokens by given ones. The engine must not have run before.

    forced: the first tokens of each sequence's output. The tokens behind them are sampled.
    observe: called at every step with the logits `[R, V]` of the tokens, the sequence of each row, and the number of
        output tokens that the sequence had before.
    """

    def __init__(self, inner: InlineExecutor, forced: Sequence[list[int]], observe: Observe | None = None) -> None:
        self.inner = inner
        self.runner = inner.runner
        self.forced = forced
        self.observe = observe
        self.counts = [0] * len(forced)
        self._logits = torch.empty(0)
        self._compute, self.runner.model.logits = self.runner.model.logits, self._record

    def _record(self, hidden: torch.Tensor, **options: bool) -> torch.Tensor:
        self._logits = self._compute(hidden, **options)
        return self._logits

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        sampled = plan.decodes.seq_ids + [chunk.seq_id for chunk in plan.chunks if chunk.samples]
        if self.observe and sampled:
            self.observe(self._logits.float(), sampled, [self.counts[seq_id] for seq_id in sampled])
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
    title: str = "",
) -> list[RequestOutput]:
    """Complete prompts in a fresh engine, where the first tokens of each output are given.

    Raises the error of the first request that has one. A run with a title shows its progress.
    """
    replace_executor(llm, Forced(executor_of(llm), forced, observe))
    with show_progress(llm, title, len(prompts)):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs
