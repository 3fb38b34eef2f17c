"""Answers while the workload changes, with a guard of predictions (`guard_kl`) and without.

    python -m benchmarks.quality.guard

One engine answers a stream of programs. Those of the first half take all operands from the last few names, so that
nothing is looked up that lies further back than the buffer of a window: what compression drops is never missed. The
others are the reasoner's own, whose facts are looked up from anywhere, each at a single KV pair. The retention that is
enough for the first half costs answers of the second.

The table has the right answers of both halves and of those programs of the second that run first, the KV pairs that
were kept, the mean divergence of what was judged, and the blocks that the guard has added. The figures go to
guard.json, with the blocks added and the answer of each program in the order of their ends.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import mean
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.common import accuracy, command_line, machine, report
from benchmarks.common.intervals import percent
from benchmarks.common.progress import Step, show_progress, wrapped_step
from benchmarks.reasoner.problems import NUM_ASKED, Problem, grade
from benchmarks.reasoner.programs import draw_lines, make_worded, worded, write_program
from benchmarks.reasoner.tokenizer import encode
from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams
from kvllm.config import require
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.stats import EngineStats

NEAR = 2
"""Last names that operands of the first half come from. A line has 39 tokens, so they lie within a buffer of 128."""
BLOCK_SIZE = 16
WINDOW, BUFFER = 384, 128
NEVER = 1e6
"""Nats: a guard that only judges."""


class Answer(Struct, frozen=True, kw_only=True):
    """The end of a program. added_blocks: by the guard, when it ended. kept: share of its KV pairs."""

    index: int
    right: bool
    kept: float
    divergences: list[float]
    added_blocks: int


class Outcome(Struct, frozen=True, kw_only=True):
    """answers: in the order of their ends. raised_after: tokens of the second half when retention first rose in it, of
    all its programs together. judge_share: of the model's time in decode steps, what judging took in addition."""

    answers: list[Answer]
    compressions_judged: int
    judge_share: float
    raised_after: int | None

    def half(self, begin: int, end: int) -> list[Answer]:
        return [answer for answer in self.answers if begin <= answer.index < end]


def make_near(rng: random.Random, count: int) -> Problem:
    """A program whose facts are forgotten after a few lines, and that asks for the last ones."""
    values, lines = draw_lines(rng, count, NEAR)
    return write_program(rng, values, lines, rng.sample([*values][-NUM_ASKED:], NUM_ASKED), "words", worded)


def make_stream(args: argparse.Namespace) -> list[Problem]:
    rng = random.Random(f"guard/{args.seed}")
    halves = [make for make in (make_near, make_worded) for _ in range(args.problems)]
    return [make(rng, rng.randint(*args.sizes)) for make in halves]


class Watch:
    """Notes, step by step, what the guard has added when programs end, and when it first adds in the second half."""

    def __init__(self, llm: LLM, problems: Sequence[Problem]) -> None:
        self.engine = llm.llm_engine
        self.problems = problems
        self.answers: list[Answer] = []
        self.raised_after: int | None = None
        self.tokens = [0] * len(problems)
        self._added = 0  # before the second half began

    def watch(self, step: Step) -> Step:
        def watched() -> list[RequestOutput]:
            outputs = step()
            added = self.engine.stats.added_blocks
            for output in outputs:
                index = int(output.request_id)
                self.tokens[index] = len(output.outputs[0].token_ids)
                if output.finished:
                    self.answers.append(self._answer(index, output, added))
            second = sum(self.tokens[len(self.problems) // 2 :])
            if not second:
                self._added = added
            elif added > self._added and self.raised_after is None:
                self.raised_after = second
            return outputs

        return watched

    def _answer(self, index: int, output: RequestOutput, added: int) -> Answer:
        if output.error is not None:
            raise output.error
        metrics, pairs = output.metrics, len(output.prompt_token_ids) + self.tokens[index] - 1
        return Answer(
            index=index,
            right=grade(self.problems[index], output.outputs[0].text)[0],
            kept=1 - metrics.missing_entries / pairs,
            divergences=metrics.divergences,
            added_blocks=added,
        )


def run(args: argparse.Namespace, name: str, guard_kl: float | None) -> Outcome:
    """Answer the stream in order, `max_num_seqs` programs at a time. guard_kl: None for no compression."""
    problems = make_stream(args)
    compression = CompressionConfig(
        method=args.method,
        policy="periodic",
        period=args.period,
        window_blocks=WINDOW // BLOCK_SIZE,
        retain_blocks=args.retain_blocks,
        buffer=BUFFER,
        chunk_budget=8,
        guard_kl=guard_kl,
        guard_every=args.guard_every,
    )
    llm = LLM(
        DEFAULT_MODEL,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_seqs=args.max_num_seqs,
        num_gpu_blocks_override=args.max_num_seqs * (4096 // BLOCK_SIZE),
        compression=None if guard_kl is None else compression,
    )
    watch = Watch(llm, problems)
    for index, problem in enumerate(problems):
        params = SamplingParams(temperature=0, max_tokens=len(encode(problem.working)) + 16)
        llm.llm_engine.add_request(str(index), problem.prompt, params)
    with wrapped_step(llm, watch.watch), show_progress(llm, name, len(problems)):
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    stats = llm.stats()
    return Outcome(
        answers=watch.answers,
        compressions_judged=stats.compressions_judged,
        judge_share=share_of_judging(stats),
        raised_after=watch.raised_after,
    )


def share_of_judging(stats: EngineStats) -> float:
    return stats.judge_seconds / (stats.decode_seconds + stats.prefill_seconds)


def show(args: argparse.Namespace, outcomes: dict[str, Outcome]) -> str:
    count, first = args.problems, min(args.max_num_seqs, args.problems)
    parts = {
        "facts that\nlie near": (0, count),
        f"facts from anywhere:\nthe first {first}": (count, count + first),
        "all": (count, 2 * count),
    }
    rows = []
    for name, outcome in outcomes.items():
        of_parts = [outcome.half(*bounds) for bounds in parts.values()]
        near, _, far = of_parts
        kept = [f"{100 * mean(answer.kept for answer in half):.1f}" for half in (near, far)]
        judged = [[d for answer in half for d in answer.divergences] for half in (near, far)]
        means = [f"{mean(each):.4f}" if each else "" for each in judged]
        right = [percent([answer.right for answer in part]) for part in of_parts]
        blocks = [f"{mean(answer.added_blocks for answer in half):.1f}" for half in (near, far)]
        rows.append([name, *right, *kept, *means, *blocks])
    twice = [f"{what},\n{half}" for what in ("kept, %", "KL, nats", "blocks\nadded") for half in ("near", "far")]
    return report.table(["right answers, %", *parts, *twice], rows)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.guard", __doc__)
    add = parser.add_argument
    add("--problems", type=int, default=64, metavar="N", help="programs in each half (default 64)")
    low, high = accuracy.SIZES
    add(
        "--sizes",
        type=int,
        nargs=2,
        metavar=("MIN", "MAX"),
        default=(low, high),
        help=f"lines of a program (default {low} to {high})",
    )
    add("--method", default="kara", help="default: kara")
    add("--retain-blocks", type=int, default=11, help=f"blocks kept of a window of {WINDOW // BLOCK_SIZE} (default 11)")
    add("--period", type=int, default=16, help="decode steps between compressions (default 16)")
    add("--guard-kl", type=float, default=0.005, help="nats a token (default 0.005)")
    add("--guard-every", type=int, default=8, metavar="N", help="of compressions behind the first (default 8)")
    add("--max-num-seqs", type=int, default=16, metavar="N", help="most programs at once (default 16)")
    add("--seed", type=int, default=1, help="seed of the programs (default 1)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    require(args.problems >= 1, "--problems", args.problems, "at least 1")
    return args


def run_guard(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    provenance = machine.provenance("benchmarks.quality.guard", arguments)
    print(machine.describe(provenance["machine"]), flush=True)
    variants = {"full cache": None, "without guard": NEVER, f"guard_kl={args.guard_kl}": args.guard_kl}
    outcomes: dict[str, Outcome] = {}
    written: dict[str, Any] = {**provenance, "problems": args.problems, "outcomes": outcomes}
    for name, guard_kl in variants.items():
        outcomes[name] = run(args, name, guard_kl)
        report.write_json(args.output / "guard.json", msgspec.to_builtins(written))
    guarded = [*outcomes.values()][-1]
    print(f"\n{show(args, outcomes)}\n")
    share = f"{100 * guarded.judge_share:.1f}% of the model's time"
    print(f"{guarded.compressions_judged} compressions were judged, in {share}.")
    if guarded.raised_after is not None:
        each = guarded.raised_after / min(args.max_num_seqs, args.problems)
        print(f"Retention rose when {each:.0f} tokens of each program with facts from anywhere were there.")
    print(f"Written: {args.output / 'guard.json'}")


def main() -> None:
    command_line.run_script(run_guard)


if __name__ == "__main__":
    main()
