"""The same decode steps by transformers: its paged continuous batching, with random weights of the same shapes."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.device import ceilings
from benchmarks.device.ceilings import Ceilings
from benchmarks.device.decode import MODELS, STEPS, WARM_UP, case_name
from benchmarks.device.log import Figures, LeftOut, Log
from benchmarks.device.shapes import decode_cost, kv_pair_bytes, write_shape
from benchmarks.device.target import Target
from kvllm.models.config import ModelConfig, load_model_config

# By importance: time may not last for all.
CASES = ((1024, 32), (1024, 128), (4096, 32), (1024, 1), (4096, 128), (1024, 256), (4096, 1), (4096, 256))
TINY_CASES = ((24, 3),)
BLOCK_SIZE = 256
"""Tokens of a block of its cache, by default."""
PROMPT_STEP = 8192
"""Tokens of prompts that it computes in a step, in which others decode already."""


def run(target: Target, log: Log) -> None:
    peaks = ceilings.measure(target)
    models = target.size(MODELS, MODELS[:1])
    for i, name in enumerate(models):
        measure_model(target, log, peaks, name, log.end - log.seconds_left * (1 - 1 / (len(models) - i)))
        target.release_memory()


def measure_model(target: Target, log: Log, peaks: Ceilings, name: str, end: float) -> None:
    """end: of its share of the time, as `time.monotonic` tells it."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_shape(target, name, Path(directory))
        config = load_model_config(path)
        with target.device:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16).eval()
    seconds_per_token: list[float] = []  # of the cases so far
    for context, batch in target.size(CASES, TINY_CASES):
        title, begin = case_name(name, batch, context), time.monotonic()
        if seconds_per_token and min(seconds_per_token) * context * batch > end - begin:
            log.left_out(title, "there is no time left for the prompts")
            continue
        log.measure(title, partial(step, target, model, config, peaks, batch, context))
        seconds_per_token.append((time.monotonic() - begin) / (context * batch))
        target.release_memory()


def step(target: Target, model: Any, config: ModelConfig, peaks: Ceilings, batch: int, context: int) -> Figures:
    """The median interval between tokens while all sequences decode."""
    rng = random.Random(0)
    prompts = [rng.choices(range(config.vocab_size), k=context) for _ in range(batch)]
    # The first must still run when the last begins.
    length = WARM_UP + STEPS + ceil(1.25 * batch * context / PROMPT_STEP) + batch.bit_length()
    # Left to itself, its cache takes what memory there is.
    blocks = ceil(1.25 * batch * (ceil((context + length) / BLOCK_SIZE) + 1))
    if (needed := blocks * BLOCK_SIZE * kv_pair_bytes(config)) > target.free_bytes:
        raise LeftOut(f"its cache would need {needed / 1e9:.0f} GB, {target.free_bytes / 1e9:.0f} are free")
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks, allow_block_sharing=False),
        record_timestamps=True,
    )
    stamps = [output.timestamps for output in outputs.values() if output.timestamps]
    if len(stamps) < batch:
        raise LeftOut(f"transformers {transformers.__version__} served {len(stamps)} of {batch} requests")
    intervals = common_intervals(stamps)[WARM_UP:]
    if not intervals:
        raise LeftOut(f"transformers {transformers.__version__} did not decode all of {batch} requests at once")
    seconds, kv_pairs = median(intervals), context + length / 2
    floor = peaks.floor(*decode_cost(config, batch, kv_pairs))
    return {
        "kv_pairs": round(kv_pairs),
        "step_seconds": seconds,
        "step_floor_seconds": floor,
        "times_floor": seconds / floor,
        "output_tokens_per_s": batch / seconds,
        "attention": model.config._attn_implementation,
    }


def common_intervals(stamps: Sequence[Sequence[float]]) -> list[float]:
    """Between the tokens of the sequence that began last, until the first one ends. stamps: of tokens, by sequence."""
    end = min(each[-1] for each in stamps)
    last = max(stamps, key=lambda each: each[0])
    return [later - earlier for earlier, later in pairwise(last) if later <= end]
