"""The parts of an engine in this process that its interface does not give, for the benchmarks that look inside."""

from __future__ import annotations

from kvllm import LLM
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
