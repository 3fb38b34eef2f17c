"""Speculative decoding beside none, one request at a time: tokens per second, and which drafts are right.

    python -m benchmarks.speculation models/SmolLM2-135M-Instruct --method suffix
    python -m benchmarks.speculation models/SmolLM2-135M-Instruct --draft models/SmolLM2-135M-Instruct \\
        --draft-quantization int4
    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.speculation models/SmolLM2-135M-Instruct --method self \\
        --num-tokens 4 --length 7500 --output-len 128 --dtype float32 --quantization int8 --cpu-time --texts TEXT ...

Prompts are this project's own pages and files: code to be changed, pages to be summed up, questions about a page that
ask for quotations; and stories drawn at temperature 1, in which little repeats. With `--texts`, they are the first
tokens of each text, at several temperatures, and the bound of method "self" is that of reading bytes. Both engines get
each prompt, in turns that swap. Prompts are cached, so that the time is that of decoding; in float32 the tokens have to
be the same. The figures go to speculation.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from copy import copy
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.common import command_line, limits, machine, report, tasks
from benchmarks.common.summary import show_spread, spread_of
from kvllm import LLM, SamplingParams
from kvllm.config.speculation import VIEW_FIRST, VIEW_LAST
from kvllm.models.config import load_model_config
from kvllm.stats import DraftCounts

Run = tuple[list[int], SamplingParams]
"""A prompt, and how it goes on."""
FORMATS = {"float32": "f32", "bfloat16": "bf16"}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.speculation", __doc__)
    add = parser.add_argument
    add("model")
    add("--method", default="suffix", help="of speculative_config (default suffix)")
    add("--draft", help="the model of method draft_model, which this chooses")
    add("--draft-quantization", help="of its weights")
    add("--num-tokens", type=int, default=8, help="most tokens of a draft (default 8)")
    add("--dtype", choices=tuple(FORMATS), default="bfloat16")
    add("--quantization", choices=("int8", "int4"))
    add("--kv-cache-dtype", default="auto")
    add("--length", type=int, default=600, help="tokens of a text (default 600)")
    add("--output-len", type=int, default=256, help="tokens generated (default 256)")
    add("--texts", type=Path, nargs="+", metavar="TEXT", help="in place of this project's pages and files")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="of texts (default 0 0.7)")
    add("--turns", type=int, default=3, help="of each text and temperature (default 3)")
    add("--cpu-time", action="store_true", help="count seconds of CPU, so that what else runs matters less")
    command_line.add_output_argument(parser)
    return parser.parse_args(arguments)


def clock_of(args: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if args.cpu_time else time.perf_counter


def make_runs(args: argparse.Namespace, llm: LLM) -> dict[str, list[Run]]:
    """By task, or by text and temperature."""
    tokenizer = llm.get_tokenizer()

    def run(prompt: list[int], temperature: float, seed: int) -> Run:
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=args.output_len, ignore_eos=True)
        return prompt, params

    def read_chat(prompt: str) -> list[int]:
        chat = [{"role": "user", "content": prompt}]
        return llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids

    if args.texts:
        prompts = {text.stem: tokenizer.encode(text.read_text())[: args.length] for text in args.texts}
        return {
            f"{name}, {temperature:g}": [run(prompt, temperature, 0)] * args.turns
            for name, prompt in prompts.items()
            for temperature in args.temperatures
        }
    return {
        kind: [run(read_chat(prompt), float(kind == "stories"), seed) for seed, prompt in enumerate(prompts)]
        for kind, prompts in tasks.prompts(tokenizer, args.length).items()
    }


def decode(llm: LLM, run: Run, clock: Callable[[], float]) -> tuple[float, list[int]]:
    """Seconds to go on after a prompt, once it is cached, and the tokens."""
    prompt, params = run
    llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    begin = clock()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return clock() - begin, output.outputs[0].token_ids


def bound(args: argparse.Namespace, llm: LLM, drafts: int, drafted: int, right: list[float], tokens: int) -> float:
    """How many times as fast such drafts can make `tokens` tokens, if only reading counts.

    A pass of the model reads the weights, and the KV pairs of the text; one that drafts, those of its view.
    """
    weights, shape = args.quantization or FORMATS[args.dtype], llm.cache_shape
    weight_bytes = limits.matrix_numbers(load_model_config(args.model)) * limits.BYTES_PER_WEIGHT[weights]
    pair_bytes = shape.num_layers * shape.num_kv_heads * shape.pair_bytes
    whole = weight_bytes + pair_bytes * (args.length + args.output_len / 2)
    drafting = weight_bytes + pair_bytes * min(args.length, VIEW_FIRST + VIEW_LAST)
    return tokens * whole / (drafted * drafting + (tokens - sum(right) * drafts) * whole)


def measure(args: argparse.Namespace, plain: LLM, drafting: LLM, name: str, runs: list[Run]) -> dict[str, Any]:
    """Tokens per second without and with drafts by run, and what was drafted in all.

    right: the share of drafts that are right at each position.
    """
    speeds: dict[LLM, list[float]] = {plain: [], drafting: []}
    before: DraftCounts = copy(drafting.stats().drafts)
    for turn, run in enumerate(runs):
        texts = []
        for llm in (plain, drafting) if turn % 2 else (drafting, plain):
            seconds, tokens = decode(llm, run, clock_of(args))
            speeds[llm].append(args.output_len / seconds)
            texts.append(tokens)
        if args.dtype == "float32" and texts[0] != texts[1]:
            raise RuntimeError(f"{name}, run {turn}: drafts have changed tokens")
    now = drafting.stats().drafts
    drafts, drafted = now.drafts - before.drafts, now.tokens - before.tokens
    pairs = zip_longest(now.right, before.right, fillvalue=0)
    right = [(late - early) / max(1, drafts) for late, early in pairs]
    found = {"without": speeds[plain], "with": speeds[drafting], "drafts": drafts, "tokens": drafted, "right": right}
    if args.method == "self":
        found["bound"] = bound(args, plain, drafts, drafted, right, len(runs) * args.output_len)
    return found


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    longest = max(4096, args.length + args.output_len)
    options = {name: getattr(args, name) for name in ("dtype", "quantization", "kv_cache_dtype")}
    options |= {"max_model_len": longest, "max_num_seqs": 4 if args.texts else 16}
    drafts: dict[str, Any] = {"method": args.method, "num_speculative_tokens": args.num_tokens}
    if args.draft:
        drafts |= {"method": "draft_model", "model": args.draft, "quantization": args.draft_quantization}
    plain = LLM(args.model, **options)
    with patch("time.perf_counter", clock_of(args)):  # of what steps cost
        drafting = LLM(args.model, speculative_config=drafts, **options)
    provenance, rows = machine.announce("benchmarks.speculation", arguments), {}
    print("| text | tokens/s without | with | ratio, median (range) | bound | right drafts by position |")
    print("|---|---|---|---|---|---|")
    for name, runs in make_runs(args, plain).items():
        row = rows[name] = measure(args, plain, drafting, name, runs)
        ratios = [fast / slow for fast, slow in zip(row["with"], row["without"], strict=True)]
        spread, shares = show_spread(spread_of(ratios), "{:.2f}"), " ".join(f"{share:.2f}" for share in row["right"])
        limit = f"{row['bound']:.2f}" if "bound" in row else ""
        medians = f"{median(row['without']):.1f} | {median(row['with']):.1f}"
        print(f"| {name} | {medians} | {spread} | {limit} | {shares} |", flush=True)
    report.write_json(args.output / "speculation.json", {**provenance, "texts": rows})


if __name__ == "__main__":
    command_line.run_script(benchmark)
