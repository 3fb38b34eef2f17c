"""Workloads for throughput: how many tokens go in and come out, and what the prompts are."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from kvllm.errors import ConfigError


class Request(Struct, frozen=True):
    """A prompt and how many tokens are generated for it, whatever the model would end with."""

    prompt_token_ids: list[int]
    output_length: int

    @property
    def entries(self) -> int:
        """KV entries at its end: the last token is never stored."""
        return len(self.prompt_token_ids) + self.output_length - 1


Lengths = tuple[int, int]
"""Tokens of a prompt, tokens of its output."""


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
"""A: short mixed requests, all at once. B: one request. C: few requests that reason long."""


def synthetic(
    rng: random.Random, num_prompts: int, input_len: int, output_len: int, range_ratio: float
) -> list[Lengths]:
    """Lengths uniform within `range_ratio` (0 to below 1) of `input_len` and `output_len`."""

    def draw(length: int) -> int:
        return rng.randint(max(1, round(length * (1 - range_ratio))), round(length * (1 + range_ratio)))

    return [(draw(input_len), draw(output_len)) for _ in range(num_prompts)]


def read_trace(path: Path, num_prompts: int, longest: int) -> tuple[list[Lengths], int]:
    """The first requests of a trace, a CSV with the columns ContextTokens and GeneratedTokens (Azure LLM inference).

    Returns: at most `num_prompts` lengths, and how many requests before the last of them were left out because they
        have more than `longest` tokens or generate none.
    """
    lengths: list[Lengths] = []
    left_out = 0
    with _open(path) as file:
        reader = csv.DictReader(file)
        missing = {"ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
        if missing:
            raise ConfigError(f"{path} has no column {', '.join(sorted(missing))}: its columns are {reader.fieldnames}")
        for number, row in enumerate(reader, start=2):
            if len(lengths) == num_prompts:
                break
            try:
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (TypeError, ValueError):
                raise ConfigError(f"{path}, line {number}: ContextTokens and GeneratedTokens must be numbers") from None
            if prompt >= 1 and output >= 1 and prompt + output <= longest:
                lengths.append((prompt, output))
            else:
                left_out += 1
    if not lengths:
        raise ConfigError(f"{path} has no request of at most {longest} tokens: raise max_model_len")
    return lengths, left_out


def read_prompts(path: Path, field: str, num_prompts: int) -> list[str]:
    """The texts under `field` in the first lines of a JSONL file."""
    prompts: list[str] = []
    with _open(path) as file:
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
    """Prompts of random token ids: no two share a beginning, so the prefix cache has no part in the figures."""
    return [Request(rng.choices(range(vocab_size), k=prompt), output) for prompt, output in lengths]


def demand(entries: Sequence[int], block_size: int, num_running: int) -> int:
    """Blocks that `num_running` sequences fill at their ends without compression, going by the mean over `entries`, the
    KV entries with which the sequences end."""
    blocks = sum(-(-each // block_size) for each in entries)
    return round(num_running * blocks / len(entries))


def _open(path: Path):
    try:
        return path.open(newline="")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
