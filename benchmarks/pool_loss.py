"""What the variants of `benchmarks.throughput` lose in a small pool, on given texts that decode at once.

    python -m benchmarks.pool_loss --model models/SmolLM2-135M-Instruct --text prose.txt code.txt --block-size 16 \\
        --pool-fraction 0.25 --variants random auto auto:kv_cache_dtype=int6_int4_hadamard,kv_residual_tokens=8

Prints KL(full || variant) in nats of the last quarter of the texts, and its difference from that of the first variant,
with 95% intervals over the texts.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.common import command_line, jobs
from benchmarks.common.jobs import Job
from benchmarks.common.variants import Variant, parse_variant
from benchmarks.common.workloads import Request
from kvllm import LLM, SamplingParams
from kvllm.comparison.figures import mean_of
from kvllm.comparison.predictions import FullPredictions, Predictions, Reference, last_part
from kvllm.comparison.report import table
from kvllm.comparison.teacher_forcing import TeacherForcing
from kvllm.comparison.texts import Cut, Text, cut_texts, read_files
from kvllm.engine_args import EngineArgs
from kvllm.models.config import load_model_config
from kvllm.tokenizer import load_tokenizer

HEADER = ("", "KL, last quarter", "less the first", "preemptions", "KV pairs kept, %")


def main(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.pool_loss", __doc__)
    jobs.add_engine_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="texts, each a kind of its own")
    add("--pieces", type=int, default=32, metavar="N", help="of all texts together, at once (default: 32)")
    add("--length", type=int, default=1000, metavar="N", help="tokens of a piece (default: 1000)")
    add("--prompt-tokens", type=int, default=50, metavar="N", help="of them, of its prompt (default: 50)")
    add("--variants", nargs="+", default=["random", "auto"], metavar="NAME", help="as for benchmarks.throughput")
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "pieces", "length", "prompt_tokens")
    cut = Cut(args.pieces, args.length, args.prompt_tokens)
    texts = cut_texts(read_files(args.text), cut, load_tokenizer(args.model))
    requests = [Request(text.prompt, len(text.output)) for text in texts]
    groups = EngineArgs(args.model, block_size=args.block_size).engine_config.kv_groups
    blocks = args.pieces * (args.length // args.block_size + 2) * sum(len(group.parts) for group in groups)
    room = Variant("room for all", None, {"num_gpu_blocks_override": blocks})
    variants = [room, *map(parse_variant, args.variants)]
    path = Path(args.model)
    of_variants = [jobs.make_job(args, each, path, requests, args.pieces, args.pieces) for each in variants]
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(Path(folder) / "reference.npy", texts, load_model_config(path).vocab_size)
        found = [feed(job, texts, reference, full=job is of_variants[0]) for job in of_variants]
    rows = [
        [name, mean_of(losses).show(".3f"), mean_of(list(np.subtract(losses, found[1].losses))).show("+.3f"), *counts]
        for name, losses, counts in found[1:]
    ]
    print(table(HEADER, rows))


class Found(NamedTuple):
    """losses: of each text. counts: preemptions, and the percentage of KV pairs held at the end."""

    name: str
    losses: list[float]
    counts: list[str]


def feed(job: Job, texts: Sequence[Text], reference: Reference, *, full: bool) -> Found:
    """The losses of a variant. full: its predictions become the reference."""
    llm = LLM(job.model, compression=job.compression, **job.engine)
    predictions = (FullPredictions if full else Predictions)(texts, reference, lambda _: None)
    params = [SamplingParams(temperature=0, max_tokens=len(text.output), ignore_eos=True) for text in texts]
    prompts, forced = [text.prompt for text in texts], [text.output for text in texts]
    outputs = TeacherForcing(llm).feed(prompts, forced, params, predictions)
    losses = [float(np.nanmean(of_text[last_part(len(of_text)) :])) for of_text in predictions.divergences]
    missing, stored = sum(each.metrics.missing_entries for each in outputs), sum(text.stored for text in texts)
    found = Found(job.name, losses, [str(llm.stats().preemptions), f"{100 - 100 * missing / stored:.0f}"])
    print(found.name, mean_of(losses).show(".3f"), *found.counts, flush=True)
    del llm
    gc.collect()
    return found


if __name__ == "__main__":
    command_line.run_script(main)
