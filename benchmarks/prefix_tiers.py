"""Conversations of several turns, more than the KV pool holds: what prefixes on the host and on a disk save.

    python -m benchmarks.prefix_tiers

All conversations take turns: every prompt is the whole conversation so far, and when its next one comes, the pool has
long evicted it. Three engines have the same pool: without a tier, with host memory, and with host memory and a disk.
A fourth one ends before the last turn, and a new one finds its disk and goes on. Each is a process of its own.
The figures go to prefix_tiers.json.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct, structs

from benchmarks.common import command_line, machine, report, shapes
from benchmarks.common.child import run_child
from kvllm import LLM, SamplingParams
from kvllm.config import require
from kvllm.models.config import load_model_config

# One engine


class Conversations(Struct):
    """What an engine does.

    texts: by conversation, the tokens of each turn of its user. output_len: tokens of an answer. answers: those of the
    turns that are not run again, by conversation; the turns after them are measured.
    """

    model: str
    engine: dict[str, Any]
    texts: list[list[list[int]]]
    output_len: int
    at_once: int
    answers: list[list[list[int]]]


class Turns(Struct):
    """By turn, over all conversations: prompt tokens, those that were computed, seconds to the first token of each.

    answers: by conversation and turn.
    """

    prompt_tokens: list[int]
    computed_tokens: list[int]
    first_token_seconds: list[list[float]]
    answers: list[list[list[int]]]


def converse(job: Conversations) -> Turns:
    """Have the conversations turn by turn."""
    llm = LLM(job.model, **job.engine)
    llm.generate([[1] * 64], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # warms up
    params = SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True)
    found, stats = Turns([], [], [], [answers[:] for answers in job.answers]), llm.stats()
    for _ in range(len(job.answers[0]), len(job.texts[0])):
        prompt_tokens, hits = stats.prompt_tokens, stats.prefix_cache_hits
        first_tokens = []
        for first in range(0, len(job.texts), job.at_once):
            group = range(first, min(first + job.at_once, len(job.texts)))
            prompts = [history(job.texts[i], found.answers[i]) for i in group]
            for i, output in zip(group, llm.generate(prompts, params, use_tqdm=False), strict=True):
                if output.error is not None:
                    raise output.error
                found.answers[i].append(list(output.outputs[0].token_ids))
                assert output.metrics.first_token_time is not None  # it has tokens
                first_tokens.append(output.metrics.first_token_time - output.metrics.arrival_time)
        found.prompt_tokens.append(stats.prompt_tokens - prompt_tokens)
        found.computed_tokens.append(found.prompt_tokens[-1] - stats.prefix_cache_hits + hits)
        found.first_token_seconds.append(first_tokens)
    llm.llm_engine.close()
    return found


def history(texts: list[list[int]], answers: list[list[int]]) -> list[int]:
    """What has been said, and the next text."""
    turns = zip(texts, [*answers, []], strict=False)
    return [token for text, answer in turns for token in (*text, *answer)]


# All of them

BLOCK_SIZE, HOST_GIB = 16, 2.0
NONE, HOST, DISK, RESTART = "no tier", "host", "host and disk", "after a restart"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.prefix_tiers", __doc__)
    add = parser.add_argument
    add("--model", default="50m", help=shapes.MODEL_HELP)
    add("--conversations", type=int, default=64)
    add("--fitting", type=int, default=8, help="conversations that the pool holds at their ends (default 8)")
    add("--turns", type=int, default=4)
    add("--input-len", type=int, default=128, help="tokens of a user's turn (default 128)")
    add("--output-len", type=int, default=32, help="tokens of an answer (default 32)")
    add("--at-once", type=int, default=4, help="prompts that come at the same time (default 4)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    require(args.turns >= 2, "--turns", args.turns, "at least 2, for the engine starts anew before the last")
    command_line.require_positive(args, "conversations", "fitting", "input_len", "output_len", "at_once")
    require(args.fitting >= args.at_once, "--fitting", args.fitting, f"at least --at-once={args.at_once}")
    return args


def measure(args: argparse.Namespace, path: Path, disk: Path) -> dict[str, Turns]:
    rng, vocabulary = random.Random(0), range(load_model_config(path).vocab_size)
    texts = [[rng.choices(vocabulary, k=args.input_len) for _ in range(args.turns)] for _ in range(args.conversations)]
    longest = args.turns * (args.input_len + args.output_len)
    engine = {
        "load_format": "dummy" if args.model in shapes.SHAPES else "auto",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 512,
        "max_num_seqs": args.at_once,
        "max_model_len": longest,
        "num_gpu_blocks_override": args.fitting * -(-longest // BLOCK_SIZE),
    }

    def run(name: str, texts: list[list[list[int]]], answers: list[list[list[int]]], **more: Any) -> Turns:
        job = Conversations(str(path), engine | more, texts, args.output_len, args.at_once, answers)
        turns = run_child(converse, job, name)
        print(f"{name}: {sum(turns.computed_tokens)} prompt tokens computed", flush=True)
        return turns

    none: list[list[list[int]]] = [[] for _ in texts]
    host: dict[str, Any] = {"kv_offloading_size": HOST_GIB}
    found = {
        NONE: run(NONE, texts, none),
        HOST: run(HOST, texts, none, **host),
        DISK: run(DISK, texts, none, **host, kv_offloading_path=str(disk / "whole")),
    }
    host["kv_offloading_path"] = str(disk / "restarted")
    answers = run("before a restart", [text[:-1] for text in texts], none, **host).answers
    return found | {RESTART: run(RESTART, texts, answers, **host)}


def show(found: dict[str, Turns]) -> str:
    header = ["", "prompt\ntokens", "computed", "computed,\nlast turn", "TTFT,\nmedian, ms", "last turn"]
    rows = []
    for name, turns in found.items():
        counts = (sum(turns.prompt_tokens), sum(turns.computed_tokens), turns.computed_tokens[-1])
        times = (median(chain(*turns.first_token_seconds)), median(turns.first_token_seconds[-1]))
        rows.append([name, *map(str, counts), *(f"{1000 * seconds:.0f}" for seconds in times)])
    return report.table(header, rows)


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as directory:
        path = shapes.find_model(args.model, Path(directory))
        provenance = machine.announce("benchmarks.prefix_tiers", arguments)
        found = measure(args, path, Path(directory) / "disk")
    same = all(turns.answers == found[NONE].answers for turns in found.values())
    print(f"\n{show(found)}\n\n{'All answers are equal.' if same else 'ANSWERS DIFFER.'}")
    of_engines = {name: structs.asdict(structs.replace(turns, answers=[])) for name, turns in found.items()}
    report.write_json(args.output / "prefix_tiers.json", {**provenance, "answers_equal": same, "engines": of_engines})


if __name__ == "__main__":
    command_line.run_script(benchmark)
