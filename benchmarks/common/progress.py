"""Progress of long runs, as a plain line every few seconds: output that is no terminal cannot show the engine's bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvllm import LLM, RequestOutput

SECONDS = 5.0
SECONDS_SIDE_BY_SIDE = 30.0
"""The interval of runs that share the machine, each of which prints its own lines."""

Step = Callable[[], list[RequestOutput]]


@contextmanager
def wrapped_step(llm: LLM, wrap: Callable[[Step], Step]) -> Iterator[None]:
    """Replace the engine's step by `wrap(step)` while the block runs. Wrappers may be nested."""
    engine = llm.llm_engine
    replaced = vars(engine).get("step")
    engine.step = wrap(engine.step)
    try:
        yield
    finally:
        if replaced is None:
            del engine.step  # the method of the class is back
        else:
            engine.step = replaced


class Progress:
    """Counts the requests that end, and prints a line every `seconds`, at the end of a step.

    title: of the run, the beginning of each line. total: requests of the run.
    """

    def __init__(self, llm: LLM, title: str, total: int, seconds: float = SECONDS) -> None:
        self.stats = llm.stats()
        self.title = title.replace("\n", " ")
        self.total = total
        self.seconds = seconds
        self.done = 0
        self.begin = self.printed = time.monotonic()
        self.tokens_before = self.stats.output_tokens

    def watch(self, step: Step) -> Step:
        """For `wrapped_step`."""

        def watched() -> list[RequestOutput]:
            outputs = step()
            self.done += sum(output.finished for output in outputs)
            if time.monotonic() - self.printed >= self.seconds:
                self.print()
            return outputs

        return watched

    def print(self) -> None:
        """The line goes to stderr: the stdout of a process that runs a job carries its result."""
        self.printed = time.monotonic()
        seconds = self.printed - self.begin
        tokens = self.stats.output_tokens - self.tokens_before
        running, blocks = self.stats.timeline[-1] if self.stats.timeline else (0, 0)
        line = (
            f"  {self.title}: {self.done} of {self.total} requests, {tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            f"{running} running, KV pool {blocks / self.stats.num_blocks:.0%} in use, {seconds:.0f} s"
        )
        print(line, file=sys.stderr, flush=True)


@contextmanager
def show_progress(llm: LLM, title: str, total: int, seconds: float = SECONDS) -> Iterator[None]:
    """Print lines of progress while the block runs, and one when it ends. Without a title nothing is printed."""
    if not title:
        yield
        return
    progress = Progress(llm, title, total, seconds)
    with wrapped_step(llm, progress.watch):
        yield
    progress.print()
