"""The reasoner's problems in a KV pool that is too small for them, and the engines that solve them."""

from __future__ import annotations

import random
from statistics import mean
from typing import Any

import torch
from msgspec import Struct

from benchmarks.common import workloads
from benchmarks.common.measurement import Measurement, measure
from benchmarks.common.variants import Variant
from benchmarks.reasoner.problems import grade
from benchmarks.reasoner.tasks import make_problem
from benchmarks.reasoner.tokenizer import encode
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.kvcache.cache import CacheShape
from kvllm.models.config import load_model_config

LINES = (26, 40)  # programs of equal length would run in waves, and the last wave would decide the time
DTYPE, BLOCK_SIZE = "bfloat16", 16
POOL_FRACTION = 0.25
MAX_TOKENS = 1800  # the longest working has about 1,600
PROBLEMS, MAX_NUM_SEQS = 120, 48

# A window must last until most facts were looked up once: a shorter one keeps the wrong KV pairs.
KARA = CompressionConfig(
    method="kara", policy="pressure", period=32, window_blocks=16, retain_blocks=8, buffer=32, chunk_budget=8
)


class Run(Struct):
    """One variant's pass over all problems. grades: (right answer, exact working) of each text."""

    measurement: Measurement
    texts: list[str]
    grades: list[tuple[bool, bool]]

    @property
    def right(self) -> int:
        return sum(right for right, _ in self.grades)

    @property
    def exact(self) -> int:
        return sum(exact for _, exact in self.grades)


class ProblemSet:
    """The problems, and the engines that solve them."""

    def __init__(self, num_problems: int, max_num_seqs: int, seed: int) -> None:
        rng = random.Random(seed)
        self.problems = [make_problem(rng, rng.randint(*LINES)) for _ in range(num_problems)]
        self.max_num_seqs = max_num_seqs
        self.prompt_tokens = [len(encode(problem.prompt)) for problem in self.problems]
        self.working_tokens = [len(encode(problem.working)) for problem in self.problems]

    def wanted(self, block_size: int) -> int:
        """Blocks that `max_num_seqs` sequences of mean length fill at their ends."""
        kv_pairs = [sum(tokens) for tokens in zip(self.prompt_tokens, self.working_tokens, strict=True)]
        return workloads.demand(kv_pairs, block_size, self.max_num_seqs)

    def engine(self, variant: Variant) -> dict[str, Any]:
        """Keywords of `LLM` for a variant. The pools of all variants have the same bytes, unless one names its blocks.

        Raises ConfigError if its compression does not fit its block size.
        """
        block_size = variant.engine.get("block_size", BLOCK_SIZE)
        if variant.compression:
            variant.compression.retained(block_size)
        pool = {"kv_cache_memory_bytes": self.pool(block_size) * block_bytes(block_size)}
        return {
            "dtype": DTYPE,
            "block_size": block_size,
            "max_num_seqs": self.max_num_seqs,
            **({} if "num_gpu_blocks_override" in variant.engine else pool),
            **variant.engine,
        }

    def pool(self, block_size: int) -> int:
        """Blocks in the pool, if each holds KV pairs of all layers in the dtype of the activations."""
        return int(POOL_FRACTION * self.wanted(block_size))

    def warm_up(self) -> None:
        """Solve a few problems that do not count, so that threads, caches and kernels are ready."""
        llm = LLM(compression=KARA, **self.engine(Variant("warm-up")))
        prompts = [problem.prompt for problem in ProblemSet(4, 4, seed=0).problems]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=160), use_tqdm=False)

    def run(self, variant: Variant) -> Run:
        """Solve the problems in a fresh engine, and show the progress."""
        llm = LLM(compression=variant.compression, **self.engine(variant))
        sampling_params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs, measurement = measure(
            llm, [problem.prompt for problem in self.problems], sampling_params, variant.name
        )
        texts = [output.outputs[0].text for output in outputs]
        grades = [grade(problem, text) for problem, text in zip(self.problems, texts, strict=True)]
        return Run(measurement, texts, grades)

    def describe(self) -> str:
        wanted, pool = self.wanted(BLOCK_SIZE), self.pool(BLOCK_SIZE)
        return (
            f"{len(self.problems)} programs of {LINES[0]} to {LINES[1]} lines, on average "
            f"{mean(self.prompt_tokens):.0f} tokens of prompt and {mean(self.working_tokens):.0f} of working; "
            f"up to {self.max_num_seqs} run at once.\n"
            f"{self.max_num_seqs} sequences end with {wanted} KV blocks of {BLOCK_SIZE} tokens. The pool has {pool}, "
            f"{POOL_FRACTION:.0%} of that."
        )


def block_bytes(block_size: int) -> int:
    """Bytes of a block in the dtype of the activations."""
    model = load_model_config(DEFAULT_MODEL)
    shape = CacheShape(model.num_layers, model.num_kv_heads, model.head_dim, block_size, getattr(torch, DTYPE))
    return shape.bytes_per_block
