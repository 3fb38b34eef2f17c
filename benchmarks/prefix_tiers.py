"""Conversations of several turns, more than the KV pool holds: what prefixes on the host and on a disk save.

    python -m benchmarks.prefix_tiers --conversations 64 --fitting 8 --turns 4

All conversations take turns: every prompt is the whole conversation so far, and when its next one comes, the pool has
long evicted it. Three engines have the same pool: without a tier, with host memory, and with host memory and a disk.
A fourth one ends before the last turn, and a new one finds its disk and goes on. Each is a process of its own.
The figures go to prefix_tiers.json and prefix_tiers.png.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.common import command_line, machine, report, shapes
from benchmarks.common.child import run_child
from benchmarks.common.internals import engine_of
from kvllm import LLM, SamplingParams
from kvllm.config import require
from kvllm.models.config import load_model_config

# One engine


class Conversations(Struct):
    """What an engine does.

    texts: by conversation, the tokens of each turn of its user. output_len: tokens of an answer.
    first_turn: from which on it is measured; those before are not run, and their answers are those of `answers`.
    """

    model: str
    engine: dict[str, Any]
    texts: list[list[list[int]]]
    output_len: int
    at_once: int
    first_turn: int = 0
    answers: list[list[list[int]]] = []


class Turns(Struct):
    """By turn, over all conversations: prompt tokens, those that were computed, seconds to the first token.

    answers: by conversation and turn.
    """

    prompt_tokens: list[int]
    computed_tokens: list[int]
    host_hits: list[int]
    first_token_seconds: list[list[float]]
    seconds: list[float]
    answers: list[list[list[int]]]


def converse(job: Conversations) -> Turns:
    """Have the conversations turn by turn."""
    llm = LLM(job.model, **job.engine)
    llm.generate([[1] * 64], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # warms up
    histories = [_history(job, i) for i in range(len(job.texts))]
    found = Turns([], [], [], [], [], [answers[:] for answers in job.answers] or [[] for _ in job.texts])
    for turn in range(job.first_turn, len(job.texts[0])):
        stats = llm.stats()
        before = stats.prompt_tokens, stats.prefix_cache_hits, stats.prefix_host_hits
        begin, first_tokens = time.perf_counter(), []
        for first in range(0, len(job.texts), job.at_once):
            group = range(first, min(first + job.at_once, len(job.texts)))
            for i in group:
                histories[i] += job.texts[i][turn]
            first_tokens += _answer(llm, [histories[i] for i in group], job.output_len, found.answers, group)
            for i in group:
                histories[i] += found.answers[i][turn]
        found.seconds.append(time.perf_counter() - begin)
        prompt, hits, host = stats.prompt_tokens, stats.prefix_cache_hits, stats.prefix_host_hits
        found.prompt_tokens.append(prompt - before[0])
        found.computed_tokens.append(prompt - before[0] - hits + before[1])
        found.host_hits.append(host - before[2])
        found.first_token_seconds.append(first_tokens)
    llm.llm_engine.close()
    return found


def _history(job: Conversations, i: int) -> list[int]:
    """What a conversation's user and the model have said before the first turn that is measured."""
    if not job.first_turn:
        return []
    turns = zip(job.texts[i][: job.first_turn], job.answers[i], strict=True)
    return [token for text, answer in turns for token in (*text, *answer)]


def _answer(
    llm: LLM, prompts: list[list[int]], output_len: int, answers: list[list[list[int]]], group: range
) -> list[float]:
    """Answer prompts that come at once, and note the answers. Returns the seconds to each first token."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    engine = engine_of(llm)
    outputs = [engine.add_request(str(i), prompt, params) for i, prompt in zip(group, prompts, strict=True)]
    while engine.has_unfinished_requests():
        engine.step()
    seconds = []
    for i, output in zip(group, outputs, strict=True):
        if output.error is not None:
            raise output.error
        answers[i].append(list(output.outputs[0].token_ids))
        assert output.metrics.first_token_time is not None
        seconds.append(output.metrics.first_token_time - output.metrics.arrival_time)
    return seconds


# All of them

NONE, HOST, DISK, RESTART = "no tier", "host", "host and disk", "after a restart"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.prefix_tiers", __doc__)
    add = parser.add_argument
    add("--model", choices=tuple(shapes.SHAPES), default="50m", help="a shape with random weights (default 50m)")
    add("--conversations", type=int, default=64)
    add("--fitting", type=int, default=8, help="conversations that the pool holds at their ends (default 8)")
    add("--turns", type=int, default=4)
    add("--input-len", type=int, default=128, help="tokens of a user's turn (default 128)")
    add("--output-len", type=int, default=32, help="tokens of an answer (default 32)")
    add("--at-once", type=int, default=4, help="prompts that come at the same time (default 4)")
    add("--offloading-size", type=float, default=2.0, help="GiB of host memory (default 2)")
    add("--block-size", type=int, default=16)
    add("--max-num-batched-tokens", type=int, default=512)
    add("--seed", type=int, default=0)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    require(args.turns >= 2, "--turns", args.turns, "at least 2, for the engine starts anew before the last")
    command_line.require_positive(args, "conversations", "fitting", "input_len", "output_len", "at_once")
    require(args.fitting >= args.at_once, "--fitting", args.fitting, f"at least --at-once={args.at_once}")
    return args


def measure(args: argparse.Namespace, path: Path, disk: Path) -> dict[str, Turns]:
    rng, vocab_size = random.Random(args.seed), load_model_config(path).vocab_size
    turns = [[args.input_len] * args.turns] * args.conversations
    texts = [[rng.choices(range(vocab_size), k=length) for length in lengths] for lengths in turns]
    longest = args.turns * (args.input_len + args.output_len)
    engine = {
        "load_format": "dummy",
        "seed": args.seed,
        "block_size": args.block_size,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_num_seqs": args.at_once,
        "max_model_len": longest,
        "num_gpu_blocks_override": args.fitting * -(-longest // args.block_size),
    }
    host = {"kv_offloading_size": args.offloading_size}
    options = {NONE: {}, HOST: host, DISK: host | {"kv_offloading_path": str(disk / "whole")}}

    def run(name: str, job: Conversations) -> Turns:
        turns = run_child(converse, job, name)
        print(f"{name}: {sum(turns.computed_tokens)} prompt tokens computed", flush=True)
        return turns

    found = {
        name: run(name, Conversations(str(path), engine | more, texts, args.output_len, args.at_once))
        for name, more in options.items()
    }
    engine |= host | {"kv_offloading_path": str(disk / "restarted")}
    before = Conversations(str(path), engine, [text[:-1] for text in texts], args.output_len, args.at_once)
    answers = run("before a restart", before).answers
    last = Conversations(str(path), engine, texts, args.output_len, args.at_once, args.turns - 1, answers)
    return found | {RESTART: run(RESTART, last)}


def row(name: str, turns: Turns) -> list[str]:
    times = [seconds for of_turn in turns.first_token_seconds for seconds in of_turn]
    last = turns.first_token_seconds[-1]
    return [
        name,
        str(sum(turns.prompt_tokens)),
        str(sum(turns.computed_tokens)),
        str(turns.computed_tokens[-1]),
        f"{1000 * median(times):.0f}",
        f"{1000 * median(last):.0f}",
        f"{1000 * sorted(last)[int(0.99 * (len(last) - 1))]:.0f}",
        f"{turns.seconds[-1]:.1f}",
    ]


HEADER = [
    "",
    "prompt\ntokens",
    "computed",
    "computed,\nlast turn",
    "TTFT,\nmedian, ms",
    "last turn",
    "p99",
    "last turn, s",
]


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as directory:
        path = shapes.named_shape(args.model, Path(directory))
        provenance = machine.announce("benchmarks.prefix_tiers", arguments)
        found = measure(args, path, Path(directory) / "disk")
    same = all(turns.answers == found[NONE].answers for turns in found.values())
    print(f"\n{report.table(HEADER, [row(name, turns) for name, turns in found.items()])}\n")
    print("All answers are equal." if same else "ANSWERS DIFFER.")
    builtins = {name: msgspec.to_builtins(turns) for name, turns in found.items()}
    for turns in builtins.values():
        del turns["answers"]
    report.write_json(args.output / "prefix_tiers.json", {**provenance, "answers_equal": same, "engines": builtins})
    x = list(range(1, args.turns + 1))
    lines = {
        "prompt tokens computed": {n: (x[-len(t.seconds) :], t.computed_tokens) for n, t in found.items()},
        "median TTFT, ms": {
            n: (x[-len(t.seconds) :], [1000 * median(each) for each in t.first_token_seconds]) for n, t in found.items()
        },
    }
    title = f"{args.model}: {args.conversations} conversations, a pool for {args.fitting}"
    report.plot_lines(args.output / "prefix_tiers.png", title, "turn", lines)
    print(f"Written: {args.output / 'prefix_tiers.json'}, {args.output / 'prefix_tiers.png'}")


if __name__ == "__main__":
    command_line.run_script(benchmark)
