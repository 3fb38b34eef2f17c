"""The same decode steps by transformers: its paged continuous batching, with random weights of the same shapes."""

from __future__ import annotations

import random
import tempfile
from functools import partial
from itertools import pairwise
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
from benchmarks.device.shapes import decode_cost, write_shape
from benchmarks.device.target import Target
from kvllm.model_config import ModelConfig, load_model_config

# By importance: time may not last for all.
CASES, TINY_CASES = ((1024, 32), (1024, 128), (1024, 1), (4096, 32)), ((24, 3),)


def run(target: Target, log: Log) -> None:
    peaks = ceilings.measure(target)
    for name in target.size(MODELS, MODELS[:1]):
        measure_model(target, log, peaks, name)
        target.release_memory()


def measure_model(target: Target, log: Log, peaks: Ceilings, name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write_shape(target, name, Path(directory))
        config = load_model_config(path)
        with target.device:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16).eval()
    # Its cache takes what memory there is: on the CPU that is too much for a dry run.
    batching = ContinuousBatchingConfig(num_blocks=target.size(None, 16), allow_block_sharing=False)
    seconds_per_token = 0.0
    for context, batch in target.size(CASES, TINY_CASES):
        title, left = case_name(name, batch, context), log.seconds_left
        if seconds_per_token * context * batch > left:
            log.left_out(title, "there is no time left for the prompts")
            continue
        log.measure(title, partial(step, model, config, batching, peaks, batch, context))
        seconds_per_token = (left - log.seconds_left) / (context * batch)


def step(
    model: Any, config: ModelConfig, batching: ContinuousBatchingConfig, peaks: Ceilings, batch: int, context: int
) -> Figures:
    """The median interval between tokens of the sequence that began last: by then all of them decode."""
    rng = random.Random(0)
    prompts = [rng.choices(range(config.vocab_size), k=context) for _ in range(batch)]
    options = GenerationConfig(max_new_tokens=WARM_UP + STEPS + 1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        prompts, generation_config=options, continuous_batching_config=batching, record_timestamps=True
    )
    stamps = [output.timestamps for output in outputs.values() if output.timestamps]
    if len(stamps) < batch:
        raise LeftOut(f"transformers {transformers.__version__} served {len(stamps)} of {batch} requests")
    last = max(stamps, key=lambda each: each[0])
    seconds = median([later - earlier for earlier, later in pairwise(last)][WARM_UP:])
    entries = context + len(last) / 2
    floor = peaks.floor(*decode_cost(config, batch, entries))
    return {
        "entries": round(entries),
        "step_seconds": seconds,
        "step_floor_seconds": floor,
        "times_floor": seconds / floor,
        "output_tokens_per_s": batch / seconds,
    }
