"""The parts of an engine in this process that its interface does not give, for the benchmarks that look inside."""

from __future__ import annotations

from kvllm import LLM
from kvllm.core.engine import LLMEngine
from kvllm.core.executor import Executor
from kvllm.worker.inline import InlineExecutor
from kvllm.worker.model_runner import ModelRunner


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


def runner_of(llm: LLM) -> ModelRunner:
    """The runner of an executor in this process, or of one that wraps it and has its `runner`."""
    runner = getattr(engine_of(llm).executor, "runner", None)
    if not isinstance(runner, ModelRunner):
        raise TypeError(f"an executor in this process is needed, not {type(engine_of(llm).executor).__name__}")
    return runner


def replace_executor(llm: LLM, executor: Executor) -> None:
    """Let the engine send its plans to another executor, which may pass them on."""
    engine_of(llm).executor = executor
