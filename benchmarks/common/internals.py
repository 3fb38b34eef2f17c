"""The parts of an engine in this process that its interface does not give, for the benchmarks that look inside."""

from __future__ import annotations

import random

from kvllm import LLM, RequestOutput, SamplingParams
from kvllm.core.engine import LLMEngine
from kvllm.worker.inline import InlineExecutor


def engine_of(llm: LLM) -> LLMEngine:
    engine = llm.llm_engine
    if not isinstance(engine, LLMEngine):
        raise TypeError(f"an engine in this process is needed, not {type(engine).__name__}")
    return engine


def executor_of(llm: LLM) -> InlineExecutor:
    executor = engine_of(llm).executor
    if not isinstance(executor, InlineExecutor):
        raise TypeError(f"an executor in this process is needed, not {type(executor).__name__}")
    return executor


def add_sequences(llm: LLM, number: int, context: int, max_tokens: int | None = None) -> list[RequestOutput]:
    """Sequences of random tokens, once their prompts are computed. Without `max_tokens` they never end."""
    params, engine = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), engine_of(llm)
    rng, vocabulary = random.Random(0), range(llm.model_config.vocab_size)
    outputs = [engine.add_request(str(i), rng.choices(vocabulary, k=context), params) for i in range(number)]
    while not all(output.outputs[0].token_ids for output in outputs):
        engine.step()
    return outputs
