"""The price of HTTP: streams of `kvllm serve` beside `LLM.generate` on the same batch, in turns.

    python -m benchmarks.http_overhead

Two processes have the same model with the same options: a server, and one that calls `LLM.generate`. Each round runs
the batch once in each, and the order changes from round to round. The client is on the same processors, and does little
more than to keep what it receives. The tokens of both must be the same. The figures go to http_overhead.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.common import command_line, machine, report, shapes
from benchmarks.common.child import run_child
from benchmarks.common.summary import show_spread, spread_of
from kvllm import LLM, SamplingParams
from kvllm.errors import KvLLMError
from kvllm.models.config import load_model_config
from tests.helpers.server import ServerProcess

BLOCK_SIZE, PROMPT_TOKENS, WARM_UP_TOKENS = 16, 32, 8


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.http_overhead", __doc__)
    add = parser.add_argument
    models = [shapes.REASONER, "models/SmolLM2-135M-Instruct"]
    add(
        "--models", nargs="+", default=models, metavar="MODEL", help=f"checkpoints, or {shapes.REASONER} (default both)"
    )
    add("--batch", type=int, default=64, help="streams at once (default 64)")
    add("--output-tokens", type=int, default=256, help="of each stream (default 256)")
    add("--rounds", type=int, default=6)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "batch", "output_tokens", "rounds")
    return args


class Batch(Struct):
    """What to generate. options: of the LLM."""

    model: str
    options: dict[str, Any]
    prompts: list[list[int]]
    output_tokens: int


class Round(Struct):
    """The batch on one side."""

    seconds: float
    token_ids: list[list[int]]


# LLM.generate, in a process of its own


def generate(batch: Batch) -> Round:
    llm = LLM(batch.model, **batch.options)
    prompts = [{"prompt_token_ids": prompt} for prompt in batch.prompts]
    for output_tokens in (WARM_UP_TOKENS, batch.output_tokens):
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return Round(time.perf_counter() - begin, [output.outputs[0].token_ids for output in outputs])


# A client that does next to nothing while streams run: it shares the server's processors

DONE = b"data: [DONE]"


async def run_streams(url: str, prompts: list[list[int]], output_tokens: int) -> list[bytes]:
    """Send completions all at once, and keep all that comes of each until its connection ends."""
    address = urlsplit(url)
    options = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}

    async def complete(prompt: list[int]) -> bytes:
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
        body = msgspec.json.encode({"prompt": prompt, **options, "stream": True, "return_token_ids": True})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        content = await reader.read()
        writer.close()
        return content

    return await asyncio.gather(*map(complete, prompts))


def token_ids(content: bytes) -> list[int]:
    """Raises KvLLMError if the stream was cut off."""
    *events, last = [line for line in content.splitlines() if line.startswith(b"data: ")] or [b""]
    if last != DONE:
        raise KvLLMError("a stream has ended without [DONE]")
    chunks = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in events]
    return [token for chunk in chunks for c in chunk.get("choices", ()) for token in c["token_ids"] or ()]


def stream(url: str, batch: Batch) -> Round:
    begin = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        streams = runner.run(run_streams(url, batch.prompts, batch.output_tokens))
    return Round(time.perf_counter() - begin, [token_ids(content) for content in streams])


# Both sides


class Pair(Struct):
    """Output tokens per second of a round."""

    generate: float
    serve: float

    @property
    def ratio(self) -> float:
        return self.serve / self.generate


def measure(name: str, batch: Batch, rounds: int) -> list[Pair]:
    """Raises KvLLMError if the tokens of both sides differ."""
    cores = str(len(os.sched_getaffinity(0)))
    threads = {"OMP_NUM_THREADS": cores, "KVLLM_NUM_THREADS": cores}
    flags = [word for key, value in batch.options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    server, pairs = ServerProcess(batch.model, *flags, environment=threads), []
    try:
        stream(server.url, batch)  # a warm-up
        for number in range(rounds):
            if number % 2 == 0:
                alone, served = run_child(generate, batch, name, threads), stream(server.url, batch)
            else:
                served, alone = stream(server.url, batch), run_child(generate, batch, name, threads)
            if alone.token_ids != served.token_ids:
                raise KvLLMError("the streams have other tokens than LLM.generate")
            tokens = len(batch.prompts) * batch.output_tokens
            pairs.append(Pair(tokens / alone.seconds, tokens / served.seconds))
            print(f"{name}, round {number + 1}: {pairs[-1].ratio:.3f}", flush=True)
    finally:
        server.stop()
    return pairs


def make_batch(name: str, args: argparse.Namespace) -> Batch:
    path, length = shapes.find_model(name, Path()), PROMPT_TOKENS + args.output_tokens
    options: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": args.batch,
        "max_model_len": length,
        "num_gpu_blocks_override": args.batch * -(-length // BLOCK_SIZE) + 1,
    }
    rng, vocab_size = random.Random(0), load_model_config(path).vocab_size
    prompts = [[rng.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(args.batch)]
    return Batch(str(path), options, prompts, args.output_tokens)


def run(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    provenance = machine.announce("benchmarks.http_overhead", arguments)
    rows, content = [], {}
    for name in args.models:
        pairs = content[name] = measure(name, make_batch(name, args), args.rounds)
        medians = [f"{median(getattr(pair, side) for pair in pairs):,.0f}" for side in ("generate", "serve")]
        rows.append([name, *medians, show_spread(spread_of([pair.ratio for pair in pairs]), "{:.3f}")])
    print(f"\n{args.batch} streams of {PROMPT_TOKENS} + {args.output_tokens} tokens, medians, in tokens/s\n")
    print(report.table(["model", "LLM.generate", "kvllm serve", "ratio"], rows))
    report.write_json(args.output / "http_overhead.json", {**provenance, "pairs": msgspec.to_builtins(content)})


if __name__ == "__main__":
    command_line.run_script(run)
