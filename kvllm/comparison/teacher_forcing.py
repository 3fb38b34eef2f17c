"""Teacher forcing: an engine is given its output token by token, as if it had generated it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from kvllm.core.engine import LLMEngine
from kvllm.core.executor import BlockingExecutor
from kvllm.core.protocol import SampledToken, StepPlan, StepResult
from kvllm.llm import LLM
from kvllm.outputs import RequestOutput
from kvllm.sampling_params import SamplingParams
from kvllm.worker.inline import InlineExecutor

Observe = Callable[[torch.Tensor, list[int], list[int]], object]
"""Called at every step with the logits `[R, V]` of the tokens, the sequence of each row, and the number of output
tokens that the sequence had before."""


class TeacherForcing(BlockingExecutor):
    """Runs the plans of an engine in this process, and replaces sampled tokens by given ones.

    The engine must not have run before, and runs `feed` once.

    observing_seconds: what the observer took.
    """

    def __init__(self, llm: LLM) -> None:
        engine = llm.llm_engine
        if not isinstance(engine, LLMEngine) or not isinstance(engine.executor, InlineExecutor):
            raise TypeError(f"an engine of one rank in this process is needed, not {type(engine).__name__}")
        self.llm, self.inner, self.runner = llm, engine.executor, engine.executor.runner
        self.forced: Sequence[list[int]] = ()
        self.observe: Observe | None = None
        self.counts: list[int] = []
        self.observing_seconds = 0.0
        self._logits = torch.empty(0)
        self._compute, self.runner.model.logits = self.runner.model.logits, self._record
        engine.executor = self

    def feed(
        self,
        prompts: Sequence[list[int]],
        forced: Sequence[list[int]],
        params: Sequence[SamplingParams],
        observe: Observe | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, where the first tokens of each output are given. The tokens after them are sampled.

        Raises the error of the first request that has one.
        """
        self.forced, self.observe, self.counts = forced, observe, [0] * len(prompts)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        sampled = plan.decodes.seq_ids + [chunk.seq_id for chunk in plan.chunks if chunk.samples]
        if self.observe and sampled:
            begin = time.perf_counter()
            self.observe(self._logits.float(), sampled, [self.counts[seq_id] for seq_id in sampled])
            self.observing_seconds += time.perf_counter() - begin
        pairs = zip(sampled, result.tokens, strict=True)
        return msgspec.structs.replace(result, tokens=[self._choose(seq_id, token) for seq_id, token in pairs])

    def close(self) -> None:
        self.inner.close()

    def _record(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        self._logits = self._compute(hidden, **options)
        return self._logits

    def _choose(self, seq_id: int, sampled: SampledToken) -> SampledToken:
        count, forced = self.counts[seq_id], self.forced[seq_id]
        self.counts[seq_id] += 1
        return SampledToken(forced[count]) if count < len(forced) else sampled
