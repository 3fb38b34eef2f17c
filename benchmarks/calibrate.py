"""Measures this CPU, writes its description for `kvllm simulate`, and compares predictions with real runs.

    python -m benchmarks.calibrate --output cpu.json

Peak rates come from large arrays. The engine's overhead, and the shares of the peaks that it reaches, come from steps
of the real engine: one figure after the other, each from steps in which it takes most of the time.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import psutil
import torch

from benchmarks.common import command_line, machine, report, shapes, workloads
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.methods import kara
from kvllm.compression.methods.token2chunk import choose
from kvllm.config import EngineConfig
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.hardware import Hardware
from kvllm.simulation.simulate import simulate
from kvllm.simulation.workload import Lengths

DTYPE = "bfloat16"
SHAPE = "50m"
THIN = {
    **shapes.QWEN3,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
"""A model that takes no time: the time of its steps is the engine's."""
THIN_LAYERS = (2, 26)
THIN_SEQUENCES = 32
BATCH = 8
STEPS = 40
CHUNK = 2048
CHUNKS = 4
WINDOW = 768
SMALL_WINDOW = 36


def best_seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


# Peaks


def matmul_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """FLOP/s of a square product."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: a @ b)


def score_times(model: ModelConfig, window: int) -> tuple[float, float]:
    """Seconds to score a window of KV pairs, and to select from it."""
    queries = torch.randn(1, model.num_query_heads, window, model.head_dim, dtype=torch.bfloat16)
    keys = torch.randn(1, model.num_kv_heads, window, model.head_dim, dtype=torch.bfloat16)
    scores = kara.scores(queries, keys, buffer=0)
    return (
        best_seconds(lambda: kara.scores(queries, keys, buffer=0)),
        best_seconds(lambda: choose(scores, retain=window // 3, buffer=0, chunk_budget=8, max_chunk=8)),
    )


# Steps of the real engine


def make_llm(directory: Path, config: dict[str, Any], name: str) -> LLM:
    path = directory / name
    path.mkdir()
    report.write_json(path / "config.json", config)
    return LLM(
        path,
        dtype=DTYPE,
        load_format="dummy",
        max_model_len=CHUNK * CHUNKS + 2,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
    )


def step_times(llm: LLM, num_seqs: int, prompt_length: int, num_steps: int) -> list[float]:
    """Seconds of the first steps of equal requests."""
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=num_steps + 1, ignore_eos=True)
    rng = random.Random(0)
    names = [str(index) for index in range(num_seqs)]
    for name in names:
        engine.add_request(name, rng.choices(range(llm.model_config.vocab_size), k=prompt_length), sampling)
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    for name in names:
        engine.abort(name)
    engine.step()  # the workers drop the aborted sequences
    return times


def decode_seconds(llm: LLM, num_seqs: int) -> float:
    """The median step of sequences with few KV pairs, without their prefill."""
    return median(step_times(llm, num_seqs, 8, STEPS)[2:])


def prefill_seconds(llm: LLM) -> list[float]:
    """Seconds of each chunk of a long prompt."""
    return np.min([step_times(llm, 1, CHUNK * CHUNKS, CHUNKS) for _ in range(3)], axis=0).tolist()


def overheads(directory: Path) -> tuple[float, float, float]:
    """Seconds of overhead for each step, each sequence in it, and each layer."""
    few, many = (make_llm(directory, THIN | {"num_hidden_layers": layers}, f"thin{layers}") for layers in THIN_LAYERS)
    alone, together = decode_seconds(few, 1), decode_seconds(few, THIN_SEQUENCES)
    sequence = (together - alone) / (THIN_SEQUENCES - 1)
    layer = (decode_seconds(many, 1) - alone) / (THIN_LAYERS[1] - THIN_LAYERS[0])
    return max(0.0, alone - sequence - THIN_LAYERS[0] * layer), max(0.0, sequence), max(0.0, layer)


# The description


def calibrate(directory: Path) -> Hardware:
    """The rates of large arrays, and what steps of the real engine reach of them, fitted one after the other."""
    host = machine.machine()
    step, sequence, layer = overheads(directory)
    llm = make_llm(directory, shapes.SHAPES[SHAPE], SHAPE)
    model, peaks = llm.model_config, {name: matmul_rate(getattr(torch, name)) for name in (DTYPE, "float32")}
    peak, bandwidth, layers = peaks[DTYPE], machine.read_bandwidth(), model.num_layers
    (score, select), seconds = score_times(model, SMALL_WINDOW), sum(score_times(model, WINDOW))
    hardware = Hardware(
        name=f"{host['cores']} cores of {host['cpu']}",
        source=f"Measured by benchmarks/calibrate.py with {host['torch_threads']} threads of torch "
        f"({', '.join(host['instructions'])}).",
        memory_bytes=psutil.virtual_memory().total,
        bytes_per_s=bandwidth,
        flops_per_s=peaks,
        step_seconds=step,
        sequence_seconds=sequence,
        layer_seconds=layer,
        score_seconds=score,  # of windows so small that their time is overhead
        select_seconds=select,
    )
    cost = CostModel(hardware, model, DTYPE)
    weights = cost.attention_weights + cost.mlp_weights

    def overhead(num_seqs: int) -> float:
        """Seconds of a step beside its arithmetic."""
        return step + num_seqs * sequence + layers * layer

    # The bandwidth: decoding a small batch reads the weights. With more sequences, reading overlaps less with
    # arithmetic than in a roofline; with one sequence it is faster. A small batch lies between the two.
    read_rate = cost.itemsize * (layers * weights + cost.head_weights) / (decode_seconds(llm, BATCH) - overhead(BATCH))
    # Products: all chunks of a long prompt have the same ones, and later chunks attend more.
    first, *_, last = prefill_seconds(llm)
    attended = 4 * cost.query_heads * model.head_dim * layers * CHUNK
    attention_rate = attended * CHUNK * (CHUNKS - 1) / (last - first)
    products = first - attended * (CHUNK + 1) / 2 / attention_rate - overhead(1)
    score_rate = 2 * model.num_query_heads * model.head_dim * WINDOW**2 / (seconds - score - select)
    shares = {
        "bandwidth_efficiency": read_rate / bandwidth,
        "attention_efficiency": attention_rate / peak,
        "matmul_efficiency": 2 * CHUNK * layers * weights / products / peak,
        "score_efficiency": score_rate / peaks["float32"],
    }
    return msgspec.structs.replace(hardware, **{name: min(1.0, share) for name, share in shares.items()})


# Prediction and reality


def compare(hardware: Hardware, directory: Path) -> str:
    """Runs of the real engine beside predictions."""
    kara_config = CompressionConfig(
        method="kara", policy="periodic", period=32, window_blocks=6, retain_blocks=2, buffer=8
    )
    short, long = (workloads.WORKLOADS[name](random.Random(0)) for name in ("A", "C512"))
    cases = [
        ("16 short requests", short, None, 1.0),
        ("8 long, half the pool", long, None, 0.5),
        ("the same, compressed", long, kara_config, 0.5),
    ]
    rows = []
    for name, lengths, compression, fraction in cases:
        seconds, predicted = both(hardware, directory / SHAPE, lengths, compression, fraction)
        rows.append([name, f"{seconds:.2f}", f"{predicted:.2f}", f"{predicted / seconds - 1:+.0%}"])
    return report.table(["", "measured, s", "predicted, s", "error"], rows)


def both(
    hardware: Hardware, path: Path, lengths: Sequence[Lengths], compression: CompressionConfig | None, fraction: float
) -> tuple[float, float]:
    """Seconds of the same requests with the same options and pool, run and simulated.

    fraction: the pool, as a share of the blocks that all requests fill together at their ends.
    """
    model = load_model_config(path)
    requests = workloads.random_requests(random.Random(0), lengths, model.vocab_size)
    num_blocks = round(fraction * workloads.demand([each.kv_pairs for each in requests], 16, len(requests)))
    options: dict[str, Any] = {
        "max_model_len": max(map(sum, lengths)),
        "block_size": 16,
        "enable_prefix_caching": False,
        "compression": compression,
    }
    config = EngineConfig(num_blocks=num_blocks, **options)
    predicted = simulate(config, CostModel(hardware, model, DTYPE), lengths, [0.0] * len(lengths))
    # Not warmed up: the clock of decode steps must begin at 0, as in the simulation.
    llm = LLM(path, num_gpu_blocks_override=num_blocks, dtype=DTYPE, load_format="dummy", **options)
    begin = time.perf_counter()
    llm.generate(*workloads.prompts_of(requests), use_tqdm=False)
    return time.perf_counter() - begin, predicted.seconds


def run_calibration(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.calibrate", __doc__)
    parser.add_argument("--output", type=Path, default=Path("cpu.json"), metavar="FILE", help="default: cpu.json")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        print("Measuring ...", flush=True)
        hardware = calibrate(Path(name))
        report.write_json(args.output, msgspec.to_builtins(hardware))
        print(f"Written: {args.output}\n\n{args.output.read_text()}\nComparing ...", flush=True)
        print(compare(hardware, Path(name)))


if __name__ == "__main__":
    command_line.run_script(run_calibration)
