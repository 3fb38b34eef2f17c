"""Attention, decode steps and compression events on a GPU, beside the time of reading their bytes from memory once.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --parts steps --batches 32 128 --contexts 4096

Weights are random. Attention is one layer of decodes, by each backend that the device has, over caches that exceed the
device's own; device events time many calls in one CUDA graph. A step is one of the whole engine, the host's work
included. An event is a compression at the paper's settings (appendix B.1: blocks of 256, 257 of 768 KV pairs every 128
steps); its cost is the time of the steps that have one, less as many without. The figures go to gpu.json. Without a GPU
everything runs on the CPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import command_line, limits, machine, report, shapes
from benchmarks.common.sequences import add_sequences
from kvllm import LLM, CompressionConfig, RequestOutput
from kvllm.attention.base import AttentionBatch
from kvllm.attention.registry import BACKENDS, make_backend
from kvllm.config import require
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.models.config import ModelConfig, load_model_config

PARTS = ("attention", "steps", "events")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS, REPEATS = 32, 15
WARM_UP, STEPS = 4, 24
ROOM = 512
"""Tokens that a sequence may generate while others are added and measured."""
BYTES = {None: 2, "int8": 1, "int4": 0.53}
"""Of a weight, with its scale."""
Row = dict[str, Any]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.gpu", __doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--model", choices=tuple(shapes.SHAPES), default="8b", help="a shape (default 8b)")
    add("--batches", type=int, nargs="+", default=[1, 32, 128, 256])
    add("--contexts", type=int, nargs="+", default=[1024, 4096])
    add("--block-size", type=int, default=256)
    periods = "of compression that are measured (default 4: a window of each sequence)"
    add("--periods", type=int, default=4, help=periods)
    add("--quantization", choices=("int8", "int4"), help="of the weights in steps and events")
    command_line.add_output_argument(parser)
    return parser.parse_args(arguments)


# Times


def read_rate() -> float:
    """Bytes/s at which an array far larger than any cache is read."""
    if DEVICE.type == "cpu":
        return machine.read_bandwidth()
    array = torch.randn(1 << 30, dtype=torch.bfloat16, device=DEVICE)
    return array.nbytes / seconds_of([array.sum])


def seconds_of(calls: Sequence[Callable[[], object]]) -> float:
    """The median time of one of `calls`, which do the same on different inputs: in a CUDA graph, or by the clock."""
    if DEVICE.type == "cpu":
        return median([_seconds(call) for call in [*calls] * 4][len(calls) :])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and sets up what libraries need
        for call in calls:
            call()
    stream.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), -(-CALLS // len(calls))
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[1:]) / (rounds * len(calls))


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# Attention


def attention(args: argparse.Namespace, model: ModelConfig, rate: float) -> list[Row]:
    rows = []
    for name in BACKENDS:
        if name == "reference" or (name == "cpu") != (DEVICE.type == "cpu"):
            continue
        for batch, context in product(args.batches, args.contexts):
            try:
                rows.append(time_attention(args, model, rate, name, batch, context))
            except ConfigError as error:
                print(f"{name} is left out: {error}", flush=True)
                break
            except torch.OutOfMemoryError:
                print(f"{name}, {batch} x {context}: too little memory", flush=True)
    return rows


def time_attention(
    args: argparse.Namespace, model: ModelConfig, rate: float, name: str, batch: int, context: int
) -> Row:
    """A call for each layer of a cache; the blocks of a sequence lie anywhere."""
    width = -(-context // args.block_size)
    shape = CacheShape(1, model.num_kv_heads, model.head_dim, args.block_size, torch.bfloat16)
    own = torch.cuda.get_device_properties(DEVICE).L2_cache_size if DEVICE.type == "cuda" else 0
    num_bytes = batch * context * shape.bytes_per_block // args.block_size
    layers = max(2, min(64, -(-2 * own // num_bytes)))
    shape = CacheShape(layers, model.num_kv_heads, model.head_dim, args.block_size, torch.bfloat16)
    cache = PagedKVCache(shape, batch * width, DEVICE)
    cache.data.normal_()
    backend = make_backend(name, cache, model.num_query_heads, model.head_dim**-0.5)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    index = torch.full((batch,), context - 1, dtype=torch.int32, device=DEVICE)
    tables = torch.randperm(cache.num_blocks, device=DEVICE).int().view(batch, width)
    plan = backend.plan(AttentionBatch(starts, index, tables))
    queries = torch.randn(batch, model.num_query_heads, model.head_dim, dtype=torch.bfloat16, device=DEVICE)
    seconds = seconds_of([lambda layer=layer: backend.run(layer, queries, plan) for layer in range(layers)])
    return {"case": f"{name}, {batch} x {context}", "seconds": seconds, "floor": num_bytes / rate}


# The engine


def make_llm(args: argparse.Namespace, path: Path, **options: Any) -> LLM:
    options |= {"block_size": args.block_size, "quantization": args.quantization}
    return LLM(path, load_format="dummy", enable_prefix_caching=False, **options)


def remove(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        llm.llm_engine.abort(output.request_id)
    llm.llm_engine.step()  # the worker drops them


def steps(args: argparse.Namespace, model: ModelConfig, rate: float, path: Path) -> list[Row]:
    """The floor is reading the weights, and the KV pairs of all sequences."""
    llm = make_llm(args, path, max_model_len=max(args.contexts) + ROOM, max_num_seqs=max(args.batches))
    pair_bytes = llm.cache_shape.bytes_per_block // args.block_size
    rows = []
    for context, batch in product(args.contexts, args.batches):
        case = f"{batch} x {context}"
        if batch * -(-(context + ROOM) // args.block_size) > llm.stats().num_blocks:
            print(f"{case} is left out: the KV pool has {llm.stats().num_blocks} blocks", flush=True)
            continue
        outputs = add_sequences(llm, batch, context)
        times = [_seconds(llm.llm_engine.step) for _ in range(WARM_UP + STEPS)][WARM_UP:]
        read = BYTES[args.quantization] * limits.matrix_numbers(model) + batch * (context + STEPS // 2) * pair_bytes
        rows.append({"case": case, "seconds": median(times), "floor": read / rate, "longest": max(times)})
        remove(llm, outputs)
    return rows


def events(args: argparse.Namespace, path: Path) -> list[Row]:
    """Of half as many sequences as the largest batch has."""
    size, batch = args.block_size, max(1, max(args.batches) // 2)
    eighth = max(1, size // 8)
    compression = CompressionConfig(
        method="kara", policy="periodic", window_blocks=3, period=size // 2, retain_tokens=size + 1, buffer=eighth,
        chunk_budget=eighth,
    )  # fmt: skip
    options = {"max_model_len": 20 * size, "num_gpu_blocks_override": 8 * batch, "max_num_seqs": batch}
    llm = make_llm(args, path, compression=compression, **options)
    outputs, stats = add_sequences(llm, batch, size // 2), llm.stats()
    while not stats.compression_events:
        llm.llm_engine.step()
    for _ in range(size // 4):  # the first event is over by then, whole ones follow
        llm.llm_engine.step()
    phases = ("recompute_seconds", "score_seconds", "compact_seconds")
    before, times, has_event = {name: stats[name] for name in phases}, [], []
    for _ in range(args.periods * (size // 2)):
        count = stats.compression_events
        times.append(_seconds(llm.llm_engine.step))
        has_event.append(stats.compression_events > count)
    remove(llm, outputs)
    number = sum(now and not earlier for earlier, now in pairwise([False, *has_event]))
    require(number > 0, "--periods", args.periods, "more, for there was no event")
    plain = median(seconds for seconds, event in zip(times, has_event, strict=True) if not event)
    cost = sum(seconds - plain for seconds, event in zip(times, has_event, strict=True) if event)
    return [
        {
            "case": f"{batch} sequences",
            "step": plain,
            "event": cost / number,
            "of decoding": cost / (plain * len(times)),
            "longest step": max(times),
            **{name.removesuffix("_seconds"): (stats[name] - before[name]) / number for name in phases},
        }
    ]


# The report


def show(part: str, rows: Sequence[Row]) -> str:
    """Times in milliseconds; what is reached of the floor, and what events take of decoding, in percent."""
    if not rows:
        return f"{part}: nothing was measured"
    names = [name for name in rows[0] if name != "case"]
    header = [part, *(name if name == "of decoding" else f"{name}, ms" for name in names)]
    cells = [
        [row["case"], *(f"{row[n]:.1%}" if n == "of decoding" else f"{1e3 * row[n]:,.3f}" for n in names)]
        for row in rows
    ]
    if "floor" in names:
        header.append("floor / time")
        cells = [[*cell, f"{row['floor'] / row['seconds']:.0%}"] for cell, row in zip(cells, rows, strict=True)]
    return report.table(header, cells)


@torch.inference_mode()
def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    content: dict[str, Any] = machine.announce("benchmarks.gpu", arguments)
    rate = read_rate()
    print(f"Memory is read at {rate / 1e9:,.0f} GB/s.", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = shapes.find_model(args.model, Path(directory))
        model = load_model_config(path)
        for part in args.parts:
            if part == "attention":
                content[part] = attention(args, model, rate)
            else:
                content[part] = steps(args, model, rate, path) if part == "steps" else events(args, path)
            print(f"\n{show(part, content[part])}", flush=True)
            report.write_json(args.output / "gpu.json", content | {"read_bytes_per_s": rate})
    print(f"\nWritten: {args.output / 'gpu.json'}")


if __name__ == "__main__":
    command_line.run_script(benchmark)
