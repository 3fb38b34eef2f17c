"""Throughput of engine variants, side by side.

    python -m benchmarks.throughput --model 50m --workload C --pool-fraction 0.5 \\
        --variants vanilla kara:period=32,window_blocks=3,buffer=8 --block-size 16

Every run is a process of its own, the variants take turns, and medians over the repeats are compared. Outputs have
fixed lengths (greedy, end of sequence ignored), so all variants generate the same number of tokens. The figures go to
throughput.json and a plot of the first repeat to throughput.png.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import report, workloads
from benchmarks.variants import Job, Measurement, Variant, parse_variant
from benchmarks.workloads import Request
from kvllm.config import EngineConfig, require
from kvllm.core.compression_policy import Compression, peak_blocks
from kvllm.errors import ConfigError, KvLLMError
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.tokenizer import has_tokenizer, load_tokenizer

ROOT = Path(__file__).parents[1]
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "50m": {
        **QWEN3,
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "0.6b": {
        **QWEN3,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}
"""Shapes with random weights: 40.4 M parameters, Qwen3-0.6B's 596 M, DeepSeek-R1-Distill-Llama-8B's 8.0 G."""

SHOWN = {
    "output_tokens_per_s": ("output tokens/s", "{:.1f}"),
    "step_tokens_per_s": ("the same, mean over steps", "{:.1f}"),
    "requests_per_s": ("requests/s", "{:.2f}"),
    "seconds": ("time, s", "{:.2f}"),
    "decode_seconds": ("decode, s", "{:.2f}"),
    "prefill_seconds": ("prefill, s", "{:.2f}"),
    "recompute_seconds": ("recompute queries, s", "{:.2f}"),
    "score_seconds": ("score and select, s", "{:.2f}"),
    "compact_seconds": ("compact, s", "{:.2f}"),
    "longest_stall_seconds": ("longest wait for a token, s", "{:.3f}"),
    "mean_latency": ("latency, mean, s", "{:.2f}"),
    "p99_latency": ("latency, 99th percentile, s", "{:.2f}"),
    "other_load": ("cores busy with other work", "{:.1f}"),
    "steps": ("steps", "{:.0f}"),
    "mean_concurrency": ("mean concurrency", "{:.1f}"),
    "peak_concurrency": ("peak concurrency", "{:.0f}"),
    "preemptions": ("preemptions", "{:.0f}"),
    "tokens_recomputed": ("tokens recomputed", "{:.0f}"),
    "compression_events": ("compression events", "{:.0f}"),
    "windows_compressed": ("windows compressed", "{:.0f}"),
    "blocks_released": ("blocks released", "{:.0f}"),
}
MEMORY = {
    "peak_kv_bytes": "peak KV in use, MiB",
    "method_state_bytes": "kept by the method beside it, MiB",
    "peak_event_bytes": "peak of a compression event, MiB",
    "peak_memory_bytes": "peak process memory, MiB",
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(parser)

    add = parser.add_argument_group("workload (default: --workload A)").add_argument
    add("--workload", choices=tuple(workloads.WORKLOADS), help="16 short requests, one, 8 long (C512: half as long)")
    add("--num-prompts", type=int, help="requests of random ids, or how many to take from a file (default 100)")
    add("--input-len", type=int, help="tokens of a random prompt")
    add("--output-len", type=int, help="tokens generated for a random prompt or one from --prompts")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, 0 (default) to below 1")
    add("--prompts", type=Path, metavar="FILE", help="JSONL with a prompt in each line")
    add("--field", default="prompt", help="where in a line of --prompts the text is (default: prompt)")
    add("--trace", type=Path, metavar="FILE", help="CSV with lengths: ContextTokens, GeneratedTokens")
    add("--seed", type=int, default=0)

    add = add_engine_arguments(parser)
    add("--max-model-len", type=int, help="default: the longest request; of a trace, longer requests are left out")
    add("--max-num-seqs", type=int, default=256)

    add = parser.add_argument_group("runs").add_argument
    add("--variants", nargs="+", default=["vanilla", "kara"], help="vanilla, kara, kara:period=32,window_blocks=3, ...")
    add("--repeats", type=int, default=3)
    add("--output", type=Path, default=Path("benchmark-output"), metavar="DIR")
    return parser.parse_args(arguments)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    shapes = ", ".join(SHAPES)
    add("--model", default="50m", help=f"directory of a checkpoint, or a shape with random weights: {shapes}")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights from config.json alone")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")


def add_engine_arguments(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """Returns what adds further arguments to the same group."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--block-size", type=int, default=256)
    engine.add_argument("--max-num-batched-tokens", type=int, default=2048)
    add = parser.add_argument_group("KV pool (default: all that is wanted)").add_mutually_exclusive_group().add_argument
    add("--num-gpu-blocks-override", "--num-blocks", type=int, metavar="N", help="blocks")
    add("--kv-cache-memory-bytes", "--kv-bytes", type=int, metavar="N", help="bytes")
    add("--pool-fraction", type=float, metavar="F", help="share of what sequences running at once fill at their ends")
    return engine.add_argument


# What is run: everything is checked here, before the first process starts.


def named_shape(name: str, directory: Path) -> Path:
    """Write the config.json of a built-in shape and return its directory."""
    path = directory / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPES[name]))
    return path


def make_requests(args: argparse.Namespace, path: Path, model: ModelConfig) -> tuple[str, list[Request]]:
    """The workload in words, and its requests."""
    _check_workload(args)
    rng = random.Random(args.seed)
    count = 100 if args.num_prompts is None else args.num_prompts
    if args.prompts:
        if not has_tokenizer(path):
            raise ConfigError(f"--prompts needs a tokenizer, and {args.model} has none: use --input-len for random ids")
        tokenizer = load_tokenizer(path)
        texts = workloads.read_prompts(args.prompts, args.field, count)
        requests = [Request(tokenizer.encode(text), args.output_len) for text in texts]
        return f"{args.prompts}: {args.field}, {args.output_len} output tokens each", requests
    if args.trace:
        longest = args.max_model_len or model.max_position_embeddings
        lengths, left_out = workloads.read_trace(args.trace, count, longest)
        name = f"{args.trace}, {left_out} requests of more than {longest} tokens left out"
    elif args.input_len is not None:
        lengths = workloads.synthetic(rng, count, args.input_len, args.output_len, args.random_range_ratio)
        name = f"random lengths around {args.input_len} + {args.output_len}, ratio {args.random_range_ratio}"
    else:
        name = args.workload or "A"
        lengths = workloads.WORKLOADS[name](rng)
    return name, workloads.random_requests(rng, lengths, model.vocab_size)


def _check_workload(args: argparse.Namespace) -> None:
    given = [flag for flag in ("workload", "input_len", "prompts", "trace") if getattr(args, flag) is not None]
    if len(given) > 1:
        flags = ", ".join("--" + flag.replace("_", "-") for flag in given)
        raise ConfigError(f"{flags} each describe a workload: give one")
    for flag in ("num_prompts", "input_len", "output_len", "repeats", "max_model_len"):
        value = getattr(args, flag)
        require(value is None or value >= 1, f"--{flag.replace('_', '-')}", value, "at least 1")
    require(0 <= args.random_range_ratio < 1, "--random-range-ratio", args.random_range_ratio, "0 to below 1")
    needs_output = args.input_len is not None or args.prompts is not None
    if needs_output and args.output_len is None:
        raise ConfigError("--input-len and --prompts need --output-len: how many tokens to generate for each prompt")
    if args.output_len is not None and not needs_output:
        raise ConfigError("--output-len goes with --input-len or --prompts: other workloads bring their own lengths")
    if args.num_prompts is not None and not (needs_output or args.trace):
        raise ConfigError("--num-prompts goes with --input-len, --prompts or --trace: other workloads have their own")


def check_lengths(args: argparse.Namespace, model: ModelConfig, requests: list[Request]) -> None:
    longest, allowed = max(request.entries + 1 for request in requests), model.max_position_embeddings
    if args.max_model_len is not None:
        require(args.max_model_len <= allowed, "--max-model-len", args.max_model_len, f"the model allows {allowed}")
        allowed = args.max_model_len
    if longest > allowed:
        raise ConfigError(f"the longest request has {longest} tokens, allowed are {allowed}: shorten the requests")


def make_job(
    args: argparse.Namespace, variant: Variant, path: Path, model: ModelConfig, requests: list[Request]
) -> Job:
    """A variant's job.

    Raises ConfigError if the engine would refuse its options, or a request, which then could not finish in the pool.
    """
    engine = {
        "dtype": args.dtype,
        "load_format": "dummy" if args.model in SHAPES else args.load_format,
        "seed": args.seed,
        "block_size": args.block_size,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len or max(request.entries + 1 for request in requests),
        **variant.engine,
    }
    require(engine["block_size"] >= 1, "block_size", engine["block_size"], "between 1 and 256")
    require(engine["max_num_seqs"] >= 1, "max_num_seqs", engine["max_num_seqs"], "at least 1")
    engine["num_gpu_blocks_override"] = pool_blocks(args, engine, model, requests)
    config = EngineConfig(
        num_blocks=engine["num_gpu_blocks_override"],
        max_model_len=engine["max_model_len"],
        block_size=engine["block_size"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        compression=variant.compression,
    )
    compression = Compression.of(config)
    needed = max(
        peak_blocks(config, compression and compression.regions, len(r.prompt_token_ids), r.entries) for r in requests
    )
    if needed > config.num_blocks:
        raise ConfigError(
            f"variant {variant.name}: a request needs {needed} KV blocks of {config.block_size} tokens and the pool "
            f"has {config.num_blocks}: give it more, or shorten the requests"
        )
    return Job(model=str(path), engine=engine, compression=variant.compression, requests=requests)


def pool_blocks(args: argparse.Namespace, engine: dict[str, Any], model: ModelConfig, requests: list[Request]) -> int:
    """Blocks in a variant's pool."""
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    block_size = engine["block_size"]
    if args.kv_cache_memory_bytes is not None:
        entry = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize(model, engine["dtype"])
        return args.kv_cache_memory_bytes // (entry * block_size)
    fraction = 1.0 if args.pool_fraction is None else args.pool_fraction
    require(0 < fraction <= 1, "--pool-fraction", fraction, "above 0, at most 1")
    at_once = min(len(requests), engine["max_num_seqs"])
    return max(1, int(fraction * workloads.demand([r.entries for r in requests], block_size, at_once)))


# The physical limit


def itemsize(model: ModelConfig, dtype: str) -> int:
    """Bytes of a weight, and of a number in the KV cache."""
    return 2 if "bfloat16" in (dtype, model.dtype if dtype == "auto" else None) else 4


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of all matrices that a step reads whole: those of the layers, and the one that gives the logits."""
    heads = model.num_query_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_query_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return (model.num_layers * layer + model.vocab_size * model.hidden_size) * itemsize(model, dtype)


def physical_limit(model: ModelConfig, dtype: str, device: str) -> dict[str, float | None]:
    """Tokens/s at which one sequence could decode if a step cost no more than reading the weights once from memory.

    None in place of the rate for weights that fit into the CPU's last-level cache: memory is not what limits them.
    """
    size, bandwidth = weight_bytes(model, dtype), report.read_bandwidth(device)
    cached = device == "cpu" and size <= (report.last_level_cache() or 0)
    return {
        "weight_bytes": size,
        "read_bytes_per_s": bandwidth,
        "one_sequence_tokens_per_s": None if cached else bandwidth / size,
    }


# Runs


def run_all(jobs: dict[str, Job], repeats: int) -> dict[str, list[Measurement]]:
    """Run each variant `repeats` times, taking turns, so that a slow minute of the machine meets all of them."""
    runs: dict[str, list[Measurement]] = {name: [] for name in jobs}
    for repeat in range(1, repeats + 1):
        for name, job in jobs.items():
            result = run_process(name, job)
            runs[name].append(result)
            print(
                f"run {repeat} of {repeats}, {name}: {result.output_tokens_per_s:.1f} output tokens/s, "
                f"{result.seconds:.1f} s",
                flush=True,
            )
    return runs


def run_process(name: str, job: Job) -> Measurement:
    """Run a job in a new process of this interpreter."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.variants"],
        input=msgspec.json.encode(job),
        capture_output=True,
        cwd=ROOT,
    )
    if process.returncode != 0:
        raise KvLLMError(f"variant {name} failed:\n{process.stderr.decode(errors='replace').strip()}")
    return msgspec.json.decode(process.stdout, type=Measurement)


def summarize(runs: list[Measurement]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure over the repeats."""
    summary = {}
    for name in (*SHOWN, *MEMORY):
        values = [getattr(run, name) for run in runs]
        summary[name] = {"median": median(values), "min": min(values), "max": max(values)}
    return summary


def ratios(runs: dict[str, list[Measurement]], figure: str = "output_tokens_per_s") -> dict[str, dict[str, float]]:
    """A figure against that of the first variant, within each repeat; the median, least and most of these ratios."""
    first, *others = runs
    result = {}
    for name in others:
        pairs = [getattr(b, figure) / getattr(a, figure) for a, b in zip(runs[first], runs[name], strict=True)]
        result[name] = {"median": median(pairs), "min": min(pairs), "max": max(pairs)}
    return result


def show(summaries: dict[str, dict[str, dict[str, float]]], against: dict[str, dict[str, float]]) -> str:
    """Medians over the repeats (least - most), one column for each variant."""
    header = ["", *(name.replace(":", ":\n").replace(",", ",\n") for name in summaries)]
    rows = [
        [title, *(spread(summary[name], shape) for summary in summaries.values())]
        for name, (title, shape) in SHOWN.items()
    ]
    for name, title in MEMORY.items():
        cells = [{k: v / report.MIB for k, v in summary[name].items()} for summary in summaries.values()]
        rows.append([title, *(spread(cell, "{:.1f}") for cell in cells)])
    if against:
        rows.append(["tokens/s, ratio", "1", *(spread(ratio, "{:.2f}") for ratio in against.values())])
    return report.table(header, rows)


def spread(values: dict[str, float], shape: str) -> str:
    middle, least, most = (shape.format(values[key]) for key in ("median", "min", "max"))
    return middle if least == most else f"{middle} ({least}-{most})"


def show_limit(limit: dict[str, float | None], summaries: dict[str, dict[str, dict[str, float]]], alone: bool) -> str:
    size, bandwidth, rate = limit.values()
    text = f"Weights read in a step: {size / 1e6:.0f} MB; memory is read at {bandwidth / 1e9:.1f} GB/s.\n"
    if rate is None:
        return text + "The weights fit into the last-level cache: reading them sets no limit."
    text += f"So one sequence alone decodes at most {rate:.0f} tokens/s"
    if not alone:
        return text + "."
    reached = (f"{name} {s['output_tokens_per_s']['median'] / rate:.0%}" for name, s in summaries.items())
    return f"{text}; reached, prompt included: {', '.join(reached)}."


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    variants = [parse_variant(text) for text in args.variants]
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ConfigError(f"--variants {' '.join(names)}: each may be given once")
    with tempfile.TemporaryDirectory() as directory:
        path = named_shape(args.model, Path(directory)) if args.model in SHAPES else Path(args.model).resolve()
        model = load_model_config(path)
        workload, requests = make_requests(args, path, model)
        check_lengths(args, model, requests)
        jobs = {variant.name: make_job(args, variant, path, model, requests) for variant in variants}
        provenance = report.provenance("benchmarks.throughput", arguments)
        totals = {
            "name": workload,
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "output_tokens": sum(request.output_length for request in requests),
        }
        print(provenance["command"])
        print(report.describe(provenance["machine"]))
        print("Workload {name}: {requests} requests, {prompt_tokens} + {output_tokens} tokens.".format(**totals))
        runs = run_all(jobs, args.repeats)
    limit = physical_limit(model, args.dtype, runs[names[0]][0].device)
    summaries = {name: summarize(measurements) for name, measurements in runs.items()}
    against = ratios(runs)
    pools = {name: job.engine["num_gpu_blocks_override"] for name, job in jobs.items()}
    print(f"\nMedians of {args.repeats} runs (least-most); the ratio is of runs that followed each other.\n")
    print(show(summaries, against) + "\n")
    print(show_limit(limit, summaries, alone=len(requests) == 1))
    content = {
        **provenance,
        "model": {"name": args.model, **msgspec.to_builtins(model)},
        "workload": totals,
        "physical_limit": limit,
        "variants": {
            name: {
                "engine": jobs[name].engine | {"model": args.model},
                "compression": msgspec.to_builtins(jobs[name].compression),
                "summary": summaries[name],
                "runs": msgspec.to_builtins(measurements),
            }
            for name, measurements in runs.items()
        },
        "ratios": against,
    }
    report.write_json(args.output / "throughput.json", content)
    report.plot_timelines(
        args.output / "throughput.png",
        f"{args.model}, workload {Path(workload).name}: the first run of each variant",
        {name: measurements[0].timeline for name, measurements in runs.items()},
        list(pools.values()),
    )
    print(f"Written: {args.output / 'throughput.json'}, {args.output / 'throughput.png'}")


def main() -> None:
    try:
        benchmark(sys.argv[1:])
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
