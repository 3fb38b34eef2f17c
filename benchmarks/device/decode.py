"""The time of a decode step of the whole engine, against reading the weights and the cache once."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.device import ceilings
from benchmarks.device.ceilings import Ceilings
from benchmarks.device.crowd import Crowd
from benchmarks.device.log import Figures, LeftOut, Log
from benchmarks.device.shapes import LLAMA_8B, QWEN3_4B, decode_cost, write_shape
from benchmarks.device.target import Target
from kvllm import LLM, ConfigError

MODELS = (LLAMA_8B, QWEN3_4B)
BATCHES, TINY_BATCHES = (1, 32, 128, 256), (1, 3)
CONTEXTS, TINY_CONTEXTS = (1024, 4096), (24,)
WARM_UP, STEPS = 4, 24
ROOM = 512
"""Tokens that a sequence may generate while others are added and measured."""


def cases(target: Target) -> list[tuple[int, int]]:
    """Context and batch: batches grow at each context."""
    contexts, batches = target.size(CONTEXTS, TINY_CONTEXTS), target.size(BATCHES, TINY_BATCHES)
    return [(context, batch) for context in contexts for batch in batches]


def case_name(model: str, batch: int, context: int) -> str:
    return f"{model}: {batch} x {context}"


def run(target: Target, log: Log) -> None:
    peaks = ceilings.measure(target)
    for model in target.size(MODELS, MODELS[:1]):
        try:
            llm = make_llm(target, model)
        except (ConfigError, torch.OutOfMemoryError) as error:  # of a device with little memory
            log.left_out(model, str(error))
            continue
        decoding = Decoding(llm, log, peaks)
        for context, batch in cases(target):
            log.measure(case_name(model, batch, context), partial(decoding.measure, batch, context))
        del decoding, llm
        target.release_memory()


def make_llm(target: Target, model: str) -> LLM:
    with tempfile.TemporaryDirectory() as directory:
        return LLM(
            write_shape(target, model, Path(directory)),
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=max(target.size(CONTEXTS, TINY_CONTEXTS)) + ROOM,
            block_size=target.size(256, 16),
            max_num_seqs=max(target.size(BATCHES, TINY_BATCHES)),
            max_num_batched_tokens=target.size(8192, 32),
            enable_prefix_caching=False,
        )


class Decoding:
    def __init__(self, llm: LLM, log: Log, peaks: Ceilings) -> None:
        self.llm = llm
        self.log = log
        self.peaks = peaks
        self.crowd = Crowd(llm)
        self.prompt_length = 0
        self.prompt_tokens_per_s: float | None = None

    def measure(self, batch: int, context: int) -> Figures:
        """Where the pool is too small for all sequences, they have as many KV pairs as it holds."""
        block_size = self.llm.config.block_size
        fitting = self.llm.stats().num_blocks // batch * block_size - ROOM
        held = min(context, fitting)
        if held < context // 2:
            raise LeftOut(f"the pool holds {max(0, fitting)} KV pairs for each of {batch} sequences")
        self._gather(batch, held)
        times = self.crowd.steps(WARM_UP + STEPS)[WARM_UP:]
        kv_pairs = self.crowd.kv_pairs / batch
        seconds = median(times)
        floor = self.peaks.floor(*decode_cost(self.llm.model_config, batch, kv_pairs))
        return {
            "kv_pairs": round(kv_pairs),
            "step_seconds": seconds,
            "step_floor_seconds": floor,
            "times_floor": seconds / floor,
            "longest_step_seconds": max(times),
            "output_tokens_per_s": batch / seconds,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
        }

    def _gather(self, batch: int, prompt_length: int) -> None:
        if prompt_length != self.prompt_length:
            self.crowd.disperse()
            self.prompt_length = prompt_length
        tokens = (batch - len(self.crowd.outputs)) * prompt_length
        if self.prompt_tokens_per_s and tokens / self.prompt_tokens_per_s > self.log.seconds_left:
            raise LeftOut("there is no time left for the prompts")
        preemptions = self.llm.stats().preemptions
        seconds = self.crowd.grow(batch, prompt_length)
        if tokens >= self.llm.config.max_num_batched_tokens:  # fewer fill no step, and say little about more
            self.prompt_tokens_per_s = tokens / seconds
        if self.llm.stats().preemptions > preemptions:
            raise RuntimeError(f"the pool is too small for {batch} sequences of {prompt_length} tokens")
