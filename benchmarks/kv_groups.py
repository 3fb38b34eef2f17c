"""Layers with a sliding window that release the blocks behind it, against the same layers that keep them.

    python -m benchmarks.kv_groups --length 8192 --output-len 256 --requests 16

The model has the shape of Gemma 3 and random weights: five of six layers attend the last `--window` tokens alone. Both
engines have a KV pool of the same bytes, room for `--fitting` sequences whose layers keep everything. The script
compares the KV bytes of a sequence by formula, how many sequences run at once, and throughput. The figures go to
kv_groups.json, a plot of the first repeat to kv_groups.png.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import command_line, jobs, machine, report, workloads
from benchmarks.common.jobs import Job
from benchmarks.common.measurement import Measurement
from benchmarks.common.summary import MEMORY, SHOWN, ratios, spread, summarize
from kvllm.config import require
from kvllm.engine_args import EngineArgs
from kvllm.memory_plan import MemoryPlan, plan_memory

KEPT, RELEASED = "kept", "released"
SHAPE = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "dtype": "bfloat16",
}
FIGURES = ("output_tokens_per_s", "seconds", "decode_seconds", "prefill_seconds", "mean_latency", "mean_concurrency")
FIGURES += ("peak_concurrency", "preemptions", "other_load")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.kv_groups", __doc__)
    add = parser.add_argument
    add("--length", type=int, default=8192, help="tokens of a request, prompt and output (default 8192)")
    add("--output-len", type=int, default=256, help="of these, the output (default 256)")
    add("--requests", type=int, default=16, help="all arrive at once (default 16)")
    add("--fitting", type=int, default=2, help="sequences that the pool holds if nothing is released (default 2)")
    add("--layers", type=int, default=12, help="every sixth attends all tokens (default 12)")
    add("--window", type=int, default=512, help="tokens that the other layers attend (default 512)")
    add("--block-size", type=int, default=16)
    add("--max-num-batched-tokens", type=int, default=512)
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=3, help="runs of each engine (default 3)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    for option in ("output_len", "requests", "fitting", "window", "repeats"):
        require(getattr(args, option) >= 1, f"--{option.replace('_', '-')}", getattr(args, option), "at least 1")
    require(args.layers >= 6, "--layers", args.layers, "at least 6, the last of which attends all tokens")
    allowed = f"more than the output of {args.output_len} tokens and the window of {args.window}"
    require(args.length > max(args.output_len, args.window), "--length", args.length, allowed)
    return args


def write_model(args: argparse.Namespace, directory: Path) -> None:
    shape = {"num_hidden_layers": args.layers, "sliding_window": args.window, "max_position_embeddings": args.length}
    (directory / "config.json").write_text(json.dumps(SHAPE | shape))


def make_plan(args: argparse.Namespace, path: Path) -> MemoryPlan:
    """The memory of the engine that releases."""
    engine = EngineArgs(path, max_model_len=args.length, block_size=args.block_size, dtype=args.dtype)
    dtype = engine.model_config.dtype if args.dtype == "auto" else args.dtype
    return plan_memory(engine.model_config, engine.engine_config, dtype)


def make_jobs(args: argparse.Namespace, plan: MemoryPlan, path: Path, pool: int) -> dict[str, Job]:
    """Both engines, each with as many blocks as `pool` bytes are."""
    lengths = [(args.length - args.output_len, args.output_len)] * args.requests
    requests = workloads.random_requests(random.Random(args.seed), lengths, plan.model.vocab_size)
    blocks = {KEPT: pool // plan.all_layers_block_bytes, RELEASED: pool // plan.rank_block_bytes}
    engine = {
        "dtype": args.dtype,
        "load_format": "dummy",
        "seed": args.seed,
        "block_size": args.block_size,
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.length,
    }
    return {
        name: Job(
            name=name,
            model=str(path),
            engine=engine | {"num_gpu_blocks_override": count, "disable_hybrid_kv_cache_manager": name == KEPT},
            compression=None,
            requests=requests,
        )
        for name, count in blocks.items()
    }


def formula(plan: MemoryPlan, length: int, pool: int) -> dict[str, dict[str, float]]:
    """Of one sequence of `length` tokens: bytes of the KV pairs that layers need and of the blocks that hold them; and
    how many sequences the pool holds."""
    blocks = -(-length // plan.config.block_size)
    return {
        KEPT: {
            "kv_bytes": plan.bytes_per_token * length,
            "block_bytes": blocks * plan.all_layers_block_bytes,
            "sequences": plan.concurrency(pool, length, 0, windows=False, compressed=False),
        },
        RELEASED: {
            "kv_bytes": plan.kv_bytes(length),
            "block_bytes": plan.blocks_held(length, 0, compressed=False) * plan.rank_block_bytes,
            "sequences": plan.concurrency(pool, length, 0, compressed=False),
        },
    }


def show(by_formula: dict[str, dict[str, float]], runs: dict[str, list[Measurement]]) -> str:
    """Both engines side by side, and the ratio of the second to the first, of runs that follow each other."""
    kept, released = by_formula[KEPT], by_formula[RELEASED]
    rows = [
        [title, shape(kept[name]), shape(released[name]), f"{released[name] / kept[name]:.2f}"]
        for name, title, shape in (
            ("kv_bytes", "KV pairs of a sequence, formula", report.mib),
            ("block_bytes", "blocks of a sequence, formula", report.mib),
            ("sequences", "sequences at once, formula", str),
        )
    ]
    summaries = [summarize(measurements) for measurements in runs.values()]
    for name in FIGURES:
        title, shape = SHOWN[name]
        compared = all(getattr(run, name) for run in runs[KEPT])
        ratio = spread(ratios(runs, name)[RELEASED], "{:.2f}") if compared else ""
        rows.append([title, *(spread(summary[name], shape) for summary in summaries), ratio])
    for name in ("peak_kv_bytes", "peak_memory_bytes"):
        cells = [{k: v / report.MIB for k, v in summary[name].items()} for summary in summaries]
        rows.append([MEMORY[name], *(spread(cell, "{:.1f}") for cell in cells), ""])
    return report.table(["", *runs, "ratio"], rows)


def write(args: argparse.Namespace, content: dict[str, Any], of_engines: dict[str, Job], runs: dict[str, list]) -> None:
    engines = {
        name: {"engine": job.engine, "summary": summarize(runs[name]), "runs": msgspec.to_builtins(runs[name])}
        for name, job in of_engines.items()
    }
    report.write_json(args.output / "kv_groups.json", content | {"engines": engines})
    report.plot_timelines(
        args.output / "kv_groups.png",
        f"{args.layers} layers, five of six with a window of {args.window}; {args.length} tokens a request",
        {f"blocks behind windows {name}": measurements[0].timeline for name, measurements in runs.items()},
        [job.engine["num_gpu_blocks_override"] for job in of_engines.values()],
    )
    print(f"Written: {args.output / 'kv_groups.json'}, {args.output / 'kv_groups.png'}")


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as directory:
        write_model(args, Path(directory))
        plan = make_plan(args, Path(directory))
        pool = args.fitting * -(-args.length // args.block_size) * plan.all_layers_block_bytes
        of_engines = make_jobs(args, plan, Path(directory), pool)
        provenance = machine.provenance("benchmarks.kv_groups", arguments)
        print(f"{provenance['command']}\n{machine.describe(provenance['machine'])}")
        runs = jobs.run_all(of_engines, args.repeats)
    by_formula = formula(plan, args.length, pool)
    print(f"\nMedians of {args.repeats} runs (least-most), KV pool of {report.mib(pool)}.\n\n{show(by_formula, runs)}")
    content = {**provenance, "model": msgspec.to_builtins(plan.model), "pool_bytes": pool, "formula": by_formula}
    write(args, content, of_engines, runs)


def main() -> None:
    command_line.run_script(benchmark)


if __name__ == "__main__":
    main()
