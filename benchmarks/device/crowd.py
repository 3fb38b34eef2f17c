"""Sequences that decode together in one engine, and the time of its steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import count

from kvllm import LLM, RequestOutput, SamplingParams


class Crowd:
    """Grows by sequences of random prompts that never end by themselves; prompts cost more than decoding."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.outputs: list[RequestOutput] = []
        self._names = count()

    @property
    def kv_pairs(self) -> int:
        """Tokens of all sequences together."""
        return sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in self.outputs)

    def grow(self, size: int, prompt_length: int) -> float:
        """Let `size` sequences run: add what is missing and compute its prompts. Returns seconds."""
        new = [self.add(prompt_length) for _ in range(size - len(self.outputs))]
        begin = time.perf_counter()
        while not all(output.outputs[0].token_ids for output in new):
            self.llm.llm_engine.step()
        return time.perf_counter() - begin

    def add(self, prompt_length: int) -> RequestOutput:
        number = next(self._names)
        prompt = random.Random(number).choices(range(self.llm.model_config.vocab_size), k=prompt_length)
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        self.outputs.append(self.llm.llm_engine.add_request(str(number), prompt, params, stream=False))
        return self.outputs[-1]

    def disperse(self) -> None:
        for output in self.outputs:
            self.llm.llm_engine.abort(output.request_id)
        if self.outputs:
            self.llm.llm_engine.step()  # the worker drops them
        self.outputs.clear()

    def steps(self, num_steps: int, after_each: Callable[[], None] = lambda: None) -> list[float]:
        """Seconds of each of the next steps. A step ends when its tokens are on the host."""
        times = []
        for _ in range(num_steps):
            begin = time.perf_counter()
            self.llm.llm_engine.step()
            times.append(time.perf_counter() - begin)
            after_each()
        return times
