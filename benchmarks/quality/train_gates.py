"""Gates of a trained compression method (`dms`, `trimkv`), trained to a share of the KV pairs: a file beside the
checkpoint.

    python -m benchmarks.quality.train_gates --method dms --model DIR --text FILE
    python -m benchmarks.quality.train_gates --method trimkv --model benchmarks/reasoner/earlier --task program

The weights of the model stay as they are. Each step reads one text twice: with the whole cache, and with attention
changed by the gates. The loss is how much the predictions differ, and what gates keep too much. The gates belong to one
checkpoint; they serve other shares of the KV pairs, too, because the engine keeps those that are judged best.

Texts are as for `benchmarks.reasoner.calibrate`. The prompts of `--task` stay whole, as in an engine by default. The
file is kv_gates_METHOD.safetensors. It takes 4 bytes for each of `32 (2 d + 2) + 1` numbers of a KV head: 9 MiB for
32 layers of 8 KV heads with 128 channels. Memory is that of the attention of a text in all layers at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import islice
from statistics import mean

import torch

from benchmarks.common import command_line, texts
from benchmarks.common.gate_training import BIASES, Settings, Step, Trainer
from kvllm.calibration.files import check_writable
from kvllm.compression.gates import write_gates
from kvllm.config import require

SHORTEST = 4
"""Texts have more tokens."""
SHOWN = 25
"""Steps of a line of the progress."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.train_gates", __doc__)
    add = parser.add_argument
    add("--method", choices=BIASES, required=True)
    texts.add_arguments(parser)
    add("--retention", type=float, default=0.2, metavar="R", help="share of the KV pairs to train for (default 0.2)")
    add("--delay", type=int, default=Settings.delay, metavar="N", help="last KV pairs, which stay (default 128)")
    add("--steps", type=int, default=Settings.steps, metavar="N", help=f"texts to read (default {Settings.steps})")
    add("--threads", type=int, metavar="N", help="default: those of torch")
    args = parser.parse_args(arguments)
    texts.check_arguments(args, SHORTEST)
    check_writable(args.model)
    require(0 < args.retention < 1, "--retention", args.retention, "between 0 and 1")
    for name in ("delay", "steps"):
        require(getattr(args, name) >= 1, f"--{name}", getattr(args, name), "at least 1")
    require(args.threads is None or args.threads >= 1, "--threads", args.threads, "at least 1")
    return args


def run_training(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    found = list(islice(texts.read_texts(args, SHORTEST), args.steps))
    settings = Settings(args.method, args.retention, args.delay, args.steps)
    trainer = Trainer(args.model, settings, max(len(text.token_ids) for text in found))
    begin, recent = time.perf_counter(), list[Step]()
    for number, step in enumerate(trainer.train(found), start=1):
        recent.append(step)
        if number % SHOWN == 0 or number == args.steps:
            print(f"step {number}: {describe(recent)}", flush=True)
            recent = []
    num_tokens = sum(len(found[step % len(found)].token_ids) for step in range(args.steps))
    metadata = {"text": texts.describe(args), "tokens": str(num_tokens), "retention": str(args.retention)}
    written = write_gates(args.model, args.method, trainer.trained(), metadata)
    minutes = (time.perf_counter() - begin) / 60
    print(f"Written: {written}, from {args.steps} steps over {num_tokens:,} tokens in {minutes:.1f} minutes")


def describe(steps: Sequence[Step]) -> str:
    of_steps = Step(*map(mean, zip(*steps, strict=True)))
    return (
        f"loss {of_steps.loss:.4f}, divergence {of_steps.divergence:.4f}, "
        f"{of_steps.kept:.1%} kept, target {of_steps.target:.1%}"
    )


def main() -> None:
    command_line.run_script(run_training)


if __name__ == "__main__":
    main()
