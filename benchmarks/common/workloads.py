"""Workloads: the lengths of prompts and outputs, and the prompts themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from kvllm import SamplingParams
from kvllm.simulation.workload import Lengths


class Request(Struct, frozen=True):
    """A prompt, and the number of tokens that are generated for it, wherever the model would end."""

    prompt_token_ids: list[int]
    output_length: int

    @property
    def kv_pairs(self) -> int:
        """KV pairs in the cache at the end: the last token is never stored."""
        return len(self.prompt_token_ids) + self.output_length - 1


WORKLOADS: dict[str, Callable[[random.Random], list[Lengths]]] = {
    "A": lambda rng: [(rng.randint(64, 256), rng.randint(64, 192)) for _ in range(16)],
    "B": lambda _: [(128, 128)],
    "C": lambda _: [(64, 1024)] * 8,
    "C512": lambda _: [(64, 512)] * 8,
    "P": lambda _: [(6000, 128)],
    "PL": lambda _: [(3000, 256)] * 4,
}
"""A: short mixed requests, all at once. B: one request. C: few requests with long outputs. P, PL: long prompts."""


def random_requests(rng: random.Random, lengths: Sequence[Lengths], vocab_size: int) -> list[Request]:
    """Prompts of random token ids. No two share a prefix, so the prefix cache has no part in the figures."""
    return [Request(rng.choices(range(vocab_size), k=prompt), output) for prompt, output in lengths]


def prompts_of(requests: Sequence[Request]) -> tuple[list[Any], list[SamplingParams]]:
    """The arguments of `LLM.generate`, for greedy outputs of the requests' lengths."""
    params = [SamplingParams(temperature=0, max_tokens=each.output_length, ignore_eos=True) for each in requests]
    return [{"prompt_token_ids": each.prompt_token_ids} for each in requests], params


def demand(kv_pairs: Sequence[int], block_size: int, num_running: int) -> int:
    """Blocks that `num_running` sequences fill at their ends without compression.

    kv_pairs: of each sequence at its end. The mean over all sequences decides.
    """
    blocks = sum(-(-each // block_size) for each in kv_pairs)
    return round(num_running * blocks / len(kv_pairs))


def totals(name: str, requests: Sequence[Request]) -> dict[str, Any]:
    """The entry of a report about its requests."""
    lengths = [request.output_length for request in requests]
    return {
        "name": name,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": sum(lengths),
        "longest_output": max(lengths),
    }
