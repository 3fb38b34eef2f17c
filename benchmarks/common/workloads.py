"""Workloads for throughput: the lengths of prompts and outputs, and the prompts themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from kvllm.errors import ConfigError
from kvllm.simulation.workload import Lengths, open_text
from kvllm.simulation.workload import read_trace as read_trace
from kvllm.simulation.workload import synthetic as synthetic


class Request(Struct, frozen=True):
    """A prompt, and the number of tokens that are generated for it, wherever the model would end."""

    prompt_token_ids: list[int]
    output_length: int

    @property
    def kv_pairs(self) -> int:
        """KV pairs in the cache at the end: the last token is never stored."""
        return len(self.prompt_token_ids) + self.output_length - 1


def workload_a(rng: random.Random) -> list[Lengths]:
    return [(rng.randint(64, 256), rng.randint(64, 192)) for _ in range(16)]


def workload_b(rng: random.Random) -> list[Lengths]:
    return [(128, 128)]


def workload_c(rng: random.Random) -> list[Lengths]:
    return [(64, 1024)] * 8


def workload_c512(rng: random.Random) -> list[Lengths]:
    return [(64, 512)] * 8


WORKLOADS: dict[str, Callable[[random.Random], list[Lengths]]] = {
    "A": workload_a,
    "B": workload_b,
    "C": workload_c,
    "C512": workload_c512,
}
"""A: short mixed requests, all at once. B: one request. C: few requests with long outputs."""


def read_prompts(path: Path, field: str, num_prompts: int) -> list[str]:
    """The texts under `field` in the first lines of a JSONL file."""
    prompts: list[str] = []
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if len(prompts) == num_prompts:
                break
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                fields = sorted(record) if isinstance(record, dict) else type(record).__name__
                raise ConfigError(f"{path}, line {number} has no text in field {field!r}: it has {fields}")
            prompts.append(record[field])
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts


def random_requests(rng: random.Random, lengths: Sequence[Lengths], vocab_size: int) -> list[Request]:
    """Prompts of random token ids. No two share a prefix, so the prefix cache has no part in the figures."""
    return [Request(rng.choices(range(vocab_size), k=prompt), output) for prompt, output in lengths]


def demand(kv_pairs: Sequence[int], block_size: int, num_running: int) -> int:
    """Blocks that `num_running` sequences fill at their ends without compression.

    kv_pairs: of each sequence at its end. The mean over all sequences decides.
    """
    blocks = sum(-(-each // block_size) for each in kv_pairs)
    return round(num_running * blocks / len(kv_pairs))
