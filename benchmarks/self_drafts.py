"""A model that drafts for itself beside none, after long texts: seconds of CPU, and which drafts are right.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.self_drafts models/SmolLM2-135M-Instruct TEXT ... \\
        --quantization int8

The first tokens of each text are the prompt of both engines, in turns. Prompts are cached, so that the time is that of
decoding. What steps cost is measured in seconds of CPU, too, so that what else runs matters less. In float32 tokens
have to be the same. The bound is that of reading bytes. The figures go to self_drafts.json.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from statistics import median
from unittest.mock import patch

from benchmarks.common import command_line, limits, machine, report
from benchmarks.common.drafts import Tried, tried
from benchmarks.common.summary import show_spread, spread_of
from kvllm import LLM, SamplingParams
from kvllm.config.speculation import VIEW_FIRST, VIEW_LAST
from kvllm.models.config import load_model_config


def decode(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, list[int]]:
    """Seconds of CPU, of all threads, and tokens."""
    begin = time.process_time()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.process_time() - begin, output.outputs[0].token_ids


def bound(found: Tried, tokens: int, weight_bytes: float, kv_bytes: float, view_bytes: float) -> float:
    """How many times as fast such drafts can make `tokens` tokens, if only reading counts.

    A pass of the model reads the weights, and the KV pairs of the text; one that drafts, those of its view.
    """
    whole, drafting = weight_bytes + kv_bytes, weight_bytes + view_bytes
    passes = tokens - sum(found.right) * found.drafts
    return tokens * whole / (found.tokens * drafting + passes * whole)


def benchmark(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.self_drafts", __doc__)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--num-tokens", type=int, default=4, help="most tokens of a draft (default 4)")
    parser.add_argument("--length", type=int, default=7500, help="tokens of a prompt (default 7500)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens generated (default 128)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    options = {name: getattr(args, name) for name in ("dtype", "quantization", "kv_cache_dtype")}
    options |= {"max_model_len": args.length + args.output_len, "max_num_seqs": 4}
    drafts = {"method": "self", "num_speculative_tokens": args.num_tokens}
    plain = LLM(args.model, **options)
    with patch("time.perf_counter", time.process_time):  # that of what steps cost
        drafting = LLM(args.model, speculative_config=drafts, **options)
    provenance, rows = machine.announce("benchmarks.self_drafts", arguments), []
    tokenizer, shape = plain.get_tokenizer(), plain.cache_shape
    weights = args.quantization or {"float32": "f32", "bfloat16": "bf16"}[args.dtype]
    weight_bytes = limits.matrix_numbers(load_model_config(args.model)) * limits.BYTES_PER_WEIGHT[weights]
    pair_bytes = shape.num_layers * shape.num_kv_heads * shape.pair_bytes
    kv_bytes = pair_bytes * (args.length + args.output_len / 2)
    view_bytes = pair_bytes * min(args.length, VIEW_FIRST + VIEW_LAST)
    print("| text, temperature | tokens/s without | with | ratio, median (range) | bound | right drafts by position |")
    print("|---|---|---|---|---|---|")
    for text in args.texts:
        prompt = tokenizer.encode(text.read_text())[: args.length]
        for llm in (plain, drafting):
            decode(llm, prompt, SamplingParams(max_tokens=1))
        for temperature in args.temperatures:
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=args.output_len, ignore_eos=True)
            before, without, others = copy(drafting.stats().drafts), [], []
            for _ in range(args.turns):
                (slow, expected), (fast, found) = (decode(llm, prompt, params) for llm in (plain, drafting))
                if args.dtype == "float32" and found != expected:
                    raise RuntimeError(f"{text} at temperature {temperature}: drafts have changed tokens")
                without.append(args.output_len / slow)
                others.append(args.output_len / fast)
            ratios = [mine / theirs for mine, theirs in zip(others, without, strict=True)]
            of_all = tried(before, drafting.stats().drafts)
            limit = bound(of_all, args.turns * args.output_len, weight_bytes, kv_bytes, view_bytes)
            speeds, shares = f"{median(without):.1f} | {median(others):.1f}", " ".join(f"{x:.2f}" for x in of_all.right)
            spread = show_spread(spread_of(ratios), "{:.2f}")
            print(f"| {text.stem}, {temperature:g} | {speeds} | {spread} | {limit:.2f} | {shares} |", flush=True)
            row = {"text": text.stem, "temperature": temperature, "without": without, "with": others, "bound": limit}
            rows.append({**row, **of_all._asdict()})
    report.write_json(args.output / "self_drafts.json", {**provenance, "rows": rows})


if __name__ == "__main__":
    command_line.run_script(benchmark)
