"""Tell what compressing the KV cache costs on a model and texts of your own.

    kvllm compare path/to/Qwen3-0.6B
    kvllm compare path/to/Qwen3-0.6B --text manual.txt main.py --methods h2o snapkv --memory 0.25
    kvllm compare path/to/Qwen3-0.6B --dataset questions.jsonl --output measured

Engines with different methods and dtypes are given the same texts token by token, as if they had generated them, and
their predictions are compared with those of the full cache: KL(full || variant) in nats, perplexity, and the most
likely token. Needles, sentences that give a name a number, are hidden in the texts and asked for, after a prompt that
is kept and in a prompt that is compressed.

All variants of one --memory end a text with the same bytes, prompt included: in fewer bits more KV pairs fit, and where
all of them do, nothing is dropped. Methods that choose from a whole cache are cut to a budget of tokens, the others get
windows and what is kept of them so that a text ends with as many. The last quarter of a text tells most, because all
hold the same by then.

The same command goes on where an earlier one was cut off. It ends with the variants that lose least in each --memory,
and the options that ask for them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvllm.config import require
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.entrypoints.engine_flags import CHOICES
from kvllm.entrypoints.model_argument import add_model_argument, add_revision_argument
from kvllm.log import warnings_only

if TYPE_CHECKING:
    from kvllm.comparison.measurement import Bench
    from kvllm.comparison.needles import Needle
    from kvllm.comparison.record import Record
    from kvllm.comparison.texts import Text
    from kvllm.comparison.variants import Plan, Setting

METHODS = ("random", "streaming", "h2o", "kara", "auto")
DTYPES = ("auto", "int6_int4_hadamard", "int6_int4_hadamard+16")
MOST_SEQUENCES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_argument(parser, "directory of a checkpoint, or the id ORG/NAME of a model on a hub")
    add_revision_argument(parser)
    texts = parser.add_mutually_exclusive_group()
    shipped = "texts, each a kind of its own (default: a manual and source code that come with Python)"
    texts.add_argument("--text", type=Path, nargs="+", metavar="FILE", help=shipped)
    dataset = "JSONL with 'problem', 'question' or 'prompt'; the full cache's answers are the texts"
    texts.add_argument("--dataset", type=Path, metavar="FILE", help=dataset)
    add("--pieces", type=int, default=8, metavar="N", help="pieces of all texts together (default: 8)")
    add("--length", type=int, default=2048, metavar="N", help="tokens of a piece (default: 2048)")
    prompt = "first tokens of a piece, which are its prompt and never compressed (default: 64)"
    add("--prompt-tokens", type=int, default=64, metavar="N", help=prompt)
    methods = f"NAME, or NAME:windows for windows in place of a budget (default: {' '.join(METHODS)})"
    add("--methods", nargs="+", default=METHODS, metavar="NAME", help=methods)
    memory = "bytes held at the end of a text, as shares of the full cache (default: 0.5 0.25 0.125)"
    add("--memory", type=float, nargs="+", default=(0.5, 0.25, 0.125), metavar="X", help=memory)
    dtypes = "of the KV cache, or one with a residual, as in int4+32 (default: " + " ".join(DTYPES) + ")"
    add("--kv-cache-dtypes", nargs="+", default=DTYPES, metavar="NAME", help=dtypes)
    add("--needles", type=int, default=8, metavar="N", help="sentences that are to be found (default: 8; 0: none)")
    add("--dtype", default="auto", choices=CHOICES["dtype"], help="default: auto, the checkpoint's own")
    add("--seed", type=int, default=1, help="of needles, and of choices by lot (default: 1)")
    output = "folder of compare.json and compare.png (default: compare-MODEL)"
    add("--output", type=Path, metavar="DIR", help=output)
    add("--fresh", action="store_true", help="start anew, instead of going on where an earlier command was cut off")


def run(args: argparse.Namespace) -> None:
    from kvllm.comparison.needles import hide  # which imports torch; a typing error should not wait for that
    from kvllm.comparison.report import recommend, show
    from kvllm.comparison.variants import make_variants, plan_variant, resolved
    from kvllm.tokenizer import load_tokenizer

    check_arguments(args)
    model = EngineArgs(args.model or DEFAULT_MODEL, revision=args.revision, dtype=args.dtype, max_model_len=args.length)
    name, _ = str(model.model), model.model_config  # which checks the length
    model.fetch_weights()
    tokenizer = load_tokenizer(model.path)
    directory = args.output or Path(f"compare-{model.name}")
    setting = make_setting(args, str(model.path))
    methods = [resolved(method) for method in args.methods]
    record = open_record(args, setting, directory)
    needles = hide(record.texts, args.needles, tokenizer, args.seed)
    lengths = [(len(text.prompt), text.stored) for text in record.texts]
    haystacks = [len(needle.haystack) for needle in needles]
    stored = sum(length for _, length in lengths) / len(lengths)
    variants = make_variants(setting, methods, args.memory, args.kv_cache_dtypes, stored)
    plans = [plan_variant(variant, setting, lengths, haystacks) for variant in variants]
    print(describe(record, needles, plans), flush=True)
    record.write(directory)  # before the work, which would be lost where nothing can be written
    with warnings_only("kvllm.start_report"):
        measure_all(record, directory, plans, setting, needles)
    found = {plan.variant.name: record.variants[plan.variant.name] for plan in plans}
    finish(record, found, directory)
    print(show(found, record.figures), "", *recommend(found, args.memory, name), "", sep="\n")
    print(f"Written: {draw(record, found, directory, name)}")


def check_arguments(args: argparse.Namespace) -> None:
    from kvllm.comparison.kv_caches import check_kv_cache

    for field in ("pieces", "prompt_tokens"):
        require(getattr(args, field) >= 1, f"--{field.replace('_', '-')}", getattr(args, field), "at least 1")
    require(args.needles >= 0, "--needles", args.needles, "at least 0")
    least = args.prompt_tokens + 64
    require(args.length >= least, "--length", args.length, f"at least {least}, 64 more than --prompt-tokens")
    for share in args.memory:
        require(0 < share <= 1, "--memory", share, "above 0 and at most 1")
    for dtype in args.kv_cache_dtypes:
        check_kv_cache("--kv-cache-dtypes", dtype)


def make_setting(args: argparse.Namespace, model: str) -> Setting:
    from kvllm.comparison.variants import Setting

    return Setting(
        model=model,
        dtype=args.dtype,
        max_model_len=args.length,
        max_num_seqs=min(MOST_SEQUENCES, args.pieces + args.needles),
        seed=args.seed,
    )


# Texts


def open_record(args: argparse.Namespace, setting: Setting, directory: Path) -> Record:
    """What an earlier command has found, or a record with the texts alone. Raises ConfigError for bad texts."""
    from kvllm.comparison.record import Record, hash_of, model_files, provenance, read_record
    from kvllm.comparison.texts import Cut, read_files, read_questions, shipped_texts

    cut = Cut(args.pieces, args.length, args.prompt_tokens)
    source: Any = read_questions(args.dataset, args.pieces) if args.dataset else None
    if source is None:
        source = shipped_texts() if args.text is None else read_files(args.text)
    settings = hash_of(model_files(Path(setting.model)), setting, source, cut, args.needles)
    known = None if args.fresh else read_record(directory, settings)
    if known is not None:
        print(f"{directory}: {len(known.variants)} variants of the same settings are there already")
        return known
    texts = make_texts(args, source, cut, setting)
    return Record(settings=settings, provenance=provenance(vars(args)), texts=texts, variants={})


def make_texts(args: argparse.Namespace, source: Any, cut: Any, setting: Setting) -> list[Text]:
    from kvllm.comparison.texts import answer, cut_texts
    from kvllm.llm import LLM
    from kvllm.tokenizer import load_tokenizer

    if args.dataset is None:
        return cut_texts(source, cut, load_tokenizer(setting.model))
    return answer(LLM.from_engine_args(setting.engine_args()), args.dataset.stem, source, cut.length)


def describe(record: Record, needles: Sequence[Needle], plans: Sequence[Plan]) -> str:
    prompt, output = (sum(len(getattr(text, part)) for text in record.texts) for part in ("prompt", "output"))
    number, kinds = len(record.texts), ", ".join(dict.fromkeys(text.kind for text in record.texts))
    refused = sum(plan.refused is not None for plan in plans)
    return (
        f"{number} texts ({kinds}): on average {prompt / number:,.0f} tokens of prompt, and {output / number:,.0f} "
        f"that are given one by one; {len(needles)} needles; {len(plans)} variants"
        + (f", {refused} refused" if refused else "")
    )


# Measuring


def measure_all(
    record: Record, directory: Path, plans: Sequence[Plan], setting: Setting, needles: Sequence[Needle]
) -> None:
    """Measure what is not known yet, and write each variant as it comes. The first is the full cache."""
    from kvllm.comparison.measurement import Bench
    from kvllm.comparison.predictions import Reference

    for plan in plans:  # what is planned with other options now is measured again
        known = record.variants.get(plan.variant.name)
        if known is not None and known.compression != (plan.fitted and plan.fitted.compression):
            del record.variants[plan.variant.name]
    missing = [plan for plan in plans if plan.variant.name not in record.variants]
    if not missing:
        return
    vocab_size = setting.engine_args().model_config.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(Path(folder) / "logprobs.npy", record.texts, vocab_size)
        bench = Bench(setting, record.texts, needles, reference)
        todo = list(dict.fromkeys([plans[0].variant.name, *(plan.variant.name for plan in missing)]))
        _measure(record, directory, bench, [plan for plan in plans if plan.variant.name in todo])


def _measure(record: Record, directory: Path, bench: Bench, plans: Sequence[Plan]) -> None:
    from tqdm import tqdm

    total = sum(map(bench.tokens, plans))
    hidden = not sys.stderr.isatty()
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    with tqdm(total=total, disable=hidden, bar_format=form) as bar:
        for number, plan in enumerate(plans, start=1):
            name = plan.variant.name
            bar.set_description(f"{number} of {len(plans)}, {name}")
            result = bench.measure(plan, bar.update, full=number == 1)
            record.variants.setdefault(name, result)
            record.write(directory)
            if hidden and not result.refused:
                print(f"  {number} of {len(plans)}: {name}, {result.tokens_per_second:,.0f} tokens/s", flush=True)


def finish(record: Record, found: dict[str, Any], directory: Path) -> None:
    """Add the figures of the variants that were asked for."""
    from kvllm.comparison.figures import figures_of

    record.variants = {**found, **record.variants}  # in the order of the table
    record.figures = {name: figures_of(result, found) for name, result in found.items() if result.pieces}
    record.write(directory)


def draw(record: Record, found: dict[str, Any], directory: Path, model: str) -> str:
    """Draw the figure, if there is matplotlib. Returns what was written."""
    from kvllm.comparison.record import FILE
    from kvllm.comparison.report import plot

    if find_spec("matplotlib") is None:
        return f"{directory / FILE}; no figure, which needs matplotlib: pip install matplotlib, and the same command"
    path = directory / "compare.png"
    plot(path, f"{Path(model).name}: what compression costs", found, record.figures)
    return f"{directory / FILE}, {path}"
