"""Lengths of requests: from a trace of a service, or drawn at random."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec
from msgspec import Struct

from kvllm.config import require
from kvllm.errors import ConfigError

Lengths = tuple[int, int]
"""Tokens of a prompt, tokens of its output."""


class TraceRequest(NamedTuple):
    """A request of a trace. time: seconds at which it arrived; None where the trace does not say.

    prefix: numbers of what is in each MOONCAKE_BLOCK tokens of the prompt; two prompts that begin with the same
    numbers begin with the same tokens. Empty where the trace does not say.
    """

    prompt: int
    output: int
    time: float | None
    prefix: Sequence[int] = ()

    @property
    def lengths(self) -> Lengths:
        return self.prompt, self.output


AZURE = ("ContextTokens", "GeneratedTokens")
MOONCAKE = ("input_length", "output_length")
MOONCAKE_BLOCK = 512


class SyntheticWorkload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests whose lengths are uniform within `range_ratio` (0 to below 1) of `input_len` and `output_len`."""

    num_requests: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("num_requests", "input_len", "output_len"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        require(0 <= self.range_ratio < 1, "range_ratio", self.range_ratio, "0 to below 1")


class Workload(Struct, frozen=True):
    """left_out: requests of the file that are longer than allowed, or generate nothing."""

    lengths: list[Lengths]
    left_out: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(prompt + output for prompt, output in self.lengths)


def load_workload(path: Path, longest: int, num_requests: int | None = None) -> Workload:
    """Read a trace (`.csv`, `.jsonl`) or a SyntheticWorkload (`.json`).

    longest: requests of more tokens are left out. num_requests: how many to take, from the beginning again if the file
        has fewer; None for each of the file once.

    Raises ConfigError if the file cannot be read or has no request that fits.
    """
    require(num_requests is None or num_requests >= 1, "requests", num_requests, "at least 1")
    if path.suffix == ".json":
        lengths, left_out = _read_synthetic(path, longest)
    else:
        lengths, left_out = read_trace(path, num_requests, longest)
    if num_requests is not None:
        lengths = list(islice(cycle(lengths), num_requests))
    return Workload(lengths, left_out)


def arrival_times(num_requests: int, rate: float | None, seed: int = 0) -> list[float]:
    """Seconds at which requests arrive: all at 0, or as a Poisson process of `rate` requests/s."""
    if rate is None:
        return [0.0] * num_requests
    require(rate > 0, "rate", rate, "requests/s, above 0")
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(num_requests)))


def synthetic(
    rng: random.Random, num_prompts: int, input_len: int, output_len: int, range_ratio: float
) -> list[Lengths]:
    """Lengths uniform within `range_ratio` (0 to below 1) of `input_len` and `output_len`."""

    def around(length: int) -> int:
        return rng.randint(max(1, round(length * (1 - range_ratio))), round(length * (1 + range_ratio)))

    return [(around(input_len), around(output_len)) for _ in range(num_prompts)]


def draw(spec: SyntheticWorkload) -> list[Lengths]:
    return synthetic(random.Random(spec.seed), spec.num_requests, spec.input_len, spec.output_len, spec.range_ratio)


def read_trace(path: Path, num_prompts: int | None, longest: int) -> tuple[list[Lengths], int]:
    """The first requests of a trace: a CSV with the columns ContextTokens and GeneratedTokens (Azure LLM inference), or
    JSONL with the fields input_length and output_length (Mooncake; prefixes that requests share are not looked at).

    Returns: at most `num_prompts` lengths (None: all), and how many requests before the last of them were left out
        because they have more than `longest` tokens or generate none.
    """
    requests, left_out = read_requests(path, num_prompts, longest)
    return [each.lengths for each in requests], left_out


def read_timed_trace(path: Path, num_prompts: int | None, longest: int) -> tuple[list[Lengths], list[float]]:
    """The lengths of `read_trace`, and when each request arrived: ascending seconds after the first.

    Raises ConfigError if a request has no time: TIMESTAMP (date and time) in a CSV, timestamp (milliseconds) in JSONL.
    """
    requests, _ = read_requests(path, num_prompts, longest)
    times = [each.time for each in requests if each.time is not None]
    if len(times) < len(requests):
        raise ConfigError(f"{path} has requests without the time of their arrival: leave out --self-timed")
    order = sorted(range(len(times)), key=times.__getitem__)
    return [requests[i].lengths for i in order], [times[i] - times[order[0]] for i in order]


def read_requests(path: Path, num_prompts: int | None, longest: int) -> tuple[list[TraceRequest], int]:
    """The first requests of a trace, in its order; arguments and second result as for `read_trace`."""
    requests: list[TraceRequest] = []
    left_out = 0
    with open_text(path) as file:
        for request in _jsonl_requests(path, file) if path.suffix == ".jsonl" else _csv_requests(path, file):
            if len(requests) == num_prompts:
                break
            if request.prompt >= 1 and request.output >= 1 and request.prompt + request.output <= longest:
                requests.append(request)
            else:
                left_out += 1
    if not requests:
        raise ConfigError(f"{path} has no request of at most {longest} tokens: raise max_model_len")
    return requests, left_out


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A file in UTF-8, with or without a byte order mark. Raises ConfigError where it cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error})") from None


def _csv_requests(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    reader = csv.DictReader(file)
    missing = set(AZURE) - set(reader.fieldnames or ())
    if missing:
        raise ConfigError(f"{path} has no column {', '.join(sorted(missing))}: its columns are {reader.fieldnames}")
    for number, row in enumerate(reader, start=2):
        try:
            yield TraceRequest(int(row[AZURE[0]]), int(row[AZURE[1]]), _seconds(row.get("TIMESTAMP") or ""))
        except (TypeError, ValueError):
            raise ConfigError(f"{path}, line {number}: {' and '.join(AZURE)} must be numbers") from None


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time.strip()[:26]).replace(tzinfo=UTC).timestamp()  # microseconds at most
    except ValueError:
        return None


def _jsonl_requests(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            time = record.get("timestamp")
            seconds = None if time is None else float(time) / 1000
            yield TraceRequest(int(record[MOONCAKE[0]]), int(record[MOONCAKE[1]]), seconds, record.get("hash_ids", ()))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{path}, line {number} must be a JSON object with the numbers {' and '.join(MOONCAKE)}"
            ) from None


def _read_synthetic(path: Path, longest: int) -> tuple[list[Lengths], int]:
    with open_text(path) as file:
        text = file.read()
    try:
        spec = msgspec.json.decode(text, type=SyntheticWorkload)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no workload: {error}; fields are {', '.join(_FIELDS)}") from None
    drawn = draw(spec)
    lengths = [each for each in drawn if sum(each) <= longest]
    if not lengths:
        raise ConfigError(f"{path} has no request of at most {longest} tokens: raise max_model_len")
    return lengths, len(drawn) - len(lengths)


_FIELDS = SyntheticWorkload.__struct_fields__
