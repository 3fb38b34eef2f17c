"""Free generations under compression, judged by the model with all KV pairs.

    python -m benchmarks.generations models/SmolLM2-135M-Instruct --text prose.txt code.txt math.txt

Teacher forcing tells what a step loses on a given text. Here each variant writes on by itself, from the first tokens of
pieces of texts, all with the same draws, and ends with the same bytes. Columns: the log probability in nats that the
model with all pairs gives to a token that was written, in the last quarter and in all, minus that of the full cache's
own text of the same prompt, with 95% intervals over the texts; the share of four-token sequences that stood in the text
before, minus that of the full cache; and the median token at which texts part from the full cache's. A text that
repeats itself is likely, so the first columns say nothing without the third. The figures go to generations.json.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from msgspec import Struct, to_builtins

from benchmarks.common import command_line, report
from kvllm import LLM, SamplingParams
from kvllm.comparison.figures import mean_of
from kvllm.comparison.predictions import last_part
from kvllm.comparison.report import table
from kvllm.comparison.texts import Cut, Text, cut_texts, read_files, shipped_texts
from kvllm.comparison.variants import FULL, Plan, Setting, make_variants, plan_variant, resolved
from kvllm.tokenizer import load_tokenizer

WORDS = 4
"""Tokens of the sequences whose repetition is counted."""
HEADER = ("", "bytes,\n%", "log prob.,\nlast quarter", "all", "repeated,\n%", "parts at\ntoken")


class Written(Struct):
    """The texts of a variant. last_quarter, whole: mean log probability of a token, in nats, of each text. repeated:
    shares. parted: the token at which each parts from the full cache's text, its length if it does not."""

    last_quarter: list[float]
    whole: list[float]
    repeated: list[float]
    parted: list[int]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.generations", __doc__)
    add = parser.add_argument
    add("model", help="directory of a checkpoint")
    add("--text", type=Path, nargs="+", metavar="FILE", help="texts that give the prompts (default: as kvllm compare)")
    add("--number", type=int, default=64, metavar="N", help="texts to write (default: 64)")
    add("--length", type=int, default=2000, metavar="N", help="tokens of a text (default: 2000)")
    add("--prompt-tokens", type=int, default=64, metavar="N", help="of them, of its prompt (default: 64)")
    add("--temperature", type=float, default=0.8, metavar="X", help="default: 0.8")
    add("--memory", type=float, nargs="+", default=[0.25, 0.125], metavar="X", help="default: 0.25 0.125")
    add("--methods", nargs="+", default=["streaming", "h2o", "mean_attention"], metavar="NAME")
    add("--kv-cache-dtypes", nargs="+", default=["auto", "int6_int4_hadamard+16"], metavar="NAME")
    command_line.add_output_argument(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    tokenizer = load_tokenizer(args.model)
    sources = read_files(args.text) if args.text else shipped_texts()
    texts = cut_texts(sources, Cut(args.number, args.prompt_tokens + 1, args.prompt_tokens), tokenizer)
    setting = Setting(model=args.model, dtype="auto", max_model_len=args.length + 1, max_num_seqs=args.number, seed=1)
    stored = args.length - 1
    methods = [resolved(method) for method in args.methods]
    variants = make_variants(setting, methods, args.memory, args.kv_cache_dtypes, stored)
    plans = [plan_variant(each, setting, [(args.prompt_tokens, stored)] * args.number, ()) for each in variants]
    outputs: dict[str, list[list[int]]] = {}
    for plan in plans:
        if plan.refused:
            print(f"{plan.variant.name}: refused, {plan.refused}", file=sys.stderr)
            continue
        outputs[plan.variant.name] = write(plan, setting, texts, args)
        print(f"  {plan.variant.name}: written", file=sys.stderr, flush=True)
    full = LLM.from_engine_args(setting.engine_args())
    found = {name: judge(full, texts, written, outputs[FULL.name]) for name, written in outputs.items()}
    memory = {plan.variant.name: plan.variant.memory for plan in plans}
    print(show(found, memory))
    report.write_json(args.output / "generations.json", to_builtins(found))


def write(plan: Plan, setting: Setting, texts: Sequence[Text], args: argparse.Namespace) -> list[list[int]]:
    """The tokens that a variant adds to each prompt."""
    llm = LLM.from_engine_args(setting.engine_args(plan.variant.kv_cache_dtype, plan.fitted))
    budget = plan.fitted.budget((args.prompt_tokens, args.length - 1)) if plan.fitted else None
    options = {"max_tokens": args.length - args.prompt_tokens, "ignore_eos": True, "detokenize": False}
    options |= {"temperature": args.temperature, "budget_tokens": budget}
    params = [SamplingParams(**options, seed=i) for i in range(len(texts))]
    results = llm.generate([{"prompt_token_ids": text.prompt} for text in texts], params, use_tqdm=False)
    del llm
    gc.collect()
    return [list(result.outputs[0].token_ids) for result in results]


def judge(full: LLM, texts: Sequence[Text], written: Sequence[list[int]], of_full: Sequence[list[int]]) -> Written:
    """full: an engine that keeps all KV pairs. of_full: the texts that it wrote from the same prompts."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": [*text.prompt, *tokens]} for text, tokens in zip(texts, written, strict=True)]
    found = Written([], [], [], [])
    for result, text, tokens, other in zip(
        full.generate(prompts, params, use_tqdm=False), texts, written, of_full, strict=True
    ):
        logprobs = result.prompt_logprobs
        assert logprobs is not None
        ids = [*text.prompt, *tokens]
        of_tokens = [logprobs[i][ids[i]].logprob for i in range(len(text.prompt), len(ids))]  # type: ignore[index]
        found.last_quarter.append(float(np.mean(of_tokens[last_part(len(of_tokens)) :])))
        found.whole.append(float(np.mean(of_tokens)))
        found.repeated.append(repetition(tokens))
        found.parted.append(parting(tokens, other))
    return found


def parting(tokens: Sequence[int], other: Sequence[int]) -> int:
    """The first index at which two texts of a length differ."""
    return next((i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), len(tokens))


def repetition(tokens: Sequence[int]) -> float:
    """The share of sequences of WORDS tokens that stood in the text before."""
    sequences = list(zip(*(tokens[i:] for i in range(WORDS)), strict=False))
    return 1 - len(set(sequences)) / len(sequences)


def show(found: dict[str, Written], memory: dict[str, float]) -> str:
    """The first row has the full cache's own figures, the others differences."""
    full = found[FULL.name]

    def cells(each: Written) -> list[str]:
        found = []
        for name, unit, shape in (("last_quarter", 1, ".3f"), ("whole", 1, ".3f"), ("repeated", 100, ".1f")):
            figures = unit * np.subtract(getattr(each, name), 0 if each is full else getattr(full, name))
            found.append(mean_of(list(figures)).show(shape if each is full else f"+{shape}"))
        return [*found, f"{median(each.parted):.0f}"]

    return table(HEADER, [[name, f"{100 * memory[name]:.1f}", *cells(each)] for name, each in found.items()])


if __name__ == "__main__":
    command_line.run_script(main)
