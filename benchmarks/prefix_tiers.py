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
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.common import command_line, machine, report, shapes
from benchmarks.common.child import run_child
from benchmarks.common.conversations import Conversations, Turns
from kvllm.config import require
from kvllm.models.config import load_model_config

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
    for option in ("conversations", "fitting", "input_len", "output_len", "at_once"):
        require(getattr(args, option) >= 1, f"--{option.replace('_', '-')}", getattr(args, option), "at least 1")
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
        turns = run_child("benchmarks.common.run_conversations", name, job, Turns)
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
        provenance = machine.provenance("benchmarks.prefix_tiers", arguments)
        print(f"{provenance['command']}\n{machine.describe(provenance['machine'])}")
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


def main() -> None:
    command_line.run_script(benchmark)


if __name__ == "__main__":
    main()
