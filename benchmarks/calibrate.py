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
from kvllm.models.config import load_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.hardware import Hardware
from kvllm.simulation.simulate import Outcome, simulate
from kvllm.stats import EngineStats

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
COUNTS = ("steps", "preemptions", "windows_compressed")


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


def score_times(heads: int, kv_heads: int, head_dim: int) -> tuple[float, float, float]:
    """Seconds to score and select from a window of WINDOW KV pairs; and to score one, and to select from one, that are
    so small that their time is overhead."""

    def seconds(window: int) -> tuple[float, float]:
        queries = torch.randn(1, heads, window, head_dim, dtype=torch.bfloat16)
        keys = torch.randn(1, kv_heads, window, head_dim, dtype=torch.bfloat16)
        scores = kara.scores(queries, keys, buffer=0)
        return (
            best_seconds(lambda: kara.scores(queries, keys, buffer=0)),
            best_seconds(lambda: choose(scores, retain=window // 3, buffer=0, chunk_budget=8, max_chunk=8)),
        )

    return sum(seconds(WINDOW)), *seconds(SMALL_WINDOW)


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
    host = machine.machine()
    step, sequence, layer = overheads(directory)
    llm = make_llm(directory, shapes.SHAPES[SHAPE], SHAPE)
    hardware = Hardware(
        name=f"{host['cores']} cores of {host['cpu']}",
        source=f"Measured by benchmarks/calibrate.py with {host['torch_threads']} threads of torch "
        f"({', '.join(host['instructions'])}).",
        memory_bytes=psutil.virtual_memory().total,
        bytes_per_s=machine.read_bandwidth(),
        flops_per_s={"bfloat16": matmul_rate(torch.bfloat16), "float32": matmul_rate(torch.float32)},
        step_seconds=step,
        sequence_seconds=sequence,
        layer_seconds=layer,
    )
    hardware = fit_bandwidth(hardware, llm)
    hardware = fit_products(hardware, llm)
    return rounded(fit_scores(hardware, llm))


def fit_bandwidth(hardware: Hardware, llm: LLM) -> Hardware:
    """Fitted to the decoding of a small batch, which reads the weights. With more sequences, reading overlaps less with
    arithmetic than in a roofline; with one sequence it is faster. A small batch lies between the two."""
    cost = CostModel(hardware, llm.model_config, DTYPE)
    layer_weights = cost.attention_weights + cost.mlp_weights
    read = cost.itemsize * (llm.model_config.num_layers * layer_weights + cost.head_weights)
    left = decode_seconds(llm, BATCH) - overhead(hardware, llm, BATCH)
    return set_share(hardware, "bandwidth_efficiency", read / left, hardware.bytes_per_s)


def fit_products(hardware: Hardware, llm: LLM) -> Hardware:
    """Fitted to the chunks of a long prompt: all have the same matrix products, and later ones attend more."""
    cost = CostModel(hardware, llm.model_config, DTYPE)
    peak, layers = hardware.flops_per_s[DTYPE], llm.model_config.num_layers
    first, *_, last = prefill_seconds(llm)
    attended = 4 * cost.query_heads * llm.model_config.head_dim * layers * CHUNK
    rate = attended * CHUNK * (CHUNKS - 1) / (last - first)
    attention = attended * (CHUNK + 1) / 2 / rate
    weights = cost.attention_weights + cost.mlp_weights
    products = 2 * CHUNK * layers * weights / (first - attention - overhead(hardware, llm, 1))
    hardware = set_share(hardware, "attention_efficiency", rate, peak)
    return set_share(hardware, "matmul_efficiency", products, peak)


def fit_scores(hardware: Hardware, llm: LLM) -> Hardware:
    model = llm.model_config
    seconds, score, select = score_times(model.num_query_heads, model.num_kv_heads, model.head_dim)
    rate = 2 * model.num_query_heads * model.head_dim * WINDOW**2 / (seconds - score - select)
    hardware = msgspec.structs.replace(hardware, score_seconds=score, select_seconds=select)
    return set_share(hardware, "score_efficiency", rate, hardware.flops_per_s["float32"])


def overhead(hardware: Hardware, llm: LLM, num_seqs: int) -> float:
    """Seconds of a step beside its arithmetic."""
    layers = llm.model_config.num_layers * hardware.layer_seconds
    return hardware.step_seconds + num_seqs * hardware.sequence_seconds + layers


def set_share(hardware: Hardware, field: str, rate: float, peak: float) -> Hardware:
    return msgspec.structs.replace(hardware, **{field: min(1.0, rate / peak)})


def rounded(hardware: Hardware) -> Hardware:
    """Three digits, since the measurement is not more exact."""

    def three(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: three(each) for key, each in value.items()}
        return float(f"{value:.3g}") if isinstance(value, float) else value

    return msgspec.convert({key: three(value) for key, value in msgspec.to_builtins(hardware).items()}, Hardware)


# Prediction and reality


def compare(hardware: Hardware, directory: Path) -> str:
    """Runs of the real engine beside predictions. The counts must be equal, the times as near as a roofline can be."""
    kara_config = CompressionConfig(
        method="kara", policy="periodic", period=32, window_blocks=6, retain_blocks=2, buffer=8
    )
    short, long = (draw(random.Random(0)) for draw in (workloads.workload_a, workloads.workload_c512))
    cases = [
        ("16 short requests", short, None, 1.0),
        ("8 long, half the pool", long, None, 0.5),
        ("the same, compressed", long, kara_config, 0.5),
    ]
    rows = []
    for name, lengths, compression, fraction in cases:
        seconds, real, predicted = both(hardware, directory / SHAPE, lengths, compression, fraction)
        rows.append([name, f"{seconds:.2f}", f"{predicted.seconds:.2f}", f"{predicted.seconds / seconds - 1:+.0%}"])
        phases = predicted.phases
        pairs = [
            (f"{real.recompute_seconds:.2f}", f"{phases.recompute:.2f}"),
            (f"{real.score_seconds:.2f}", f"{phases.score:.2f}"),
            *((str(real[each]), str(getattr(predicted, each))) for each in COUNTS),
        ]
        rows[-1] += [" / ".join(pair) for pair in pairs]
    counts = [name.replace("_", "\n") for name in COUNTS]
    return report.table(
        ["measured /\npredicted", "time, s", "predicted", "error", "recompute, s", "score, s", *counts], rows
    )


def both(
    hardware: Hardware,
    path: Path,
    lengths: Sequence[workloads.Lengths],
    compression: CompressionConfig | None,
    fraction: float,
) -> tuple[float, EngineStats, Outcome]:
    """Run and simulate the same requests with the same options and pool.

    fraction: the pool, as a share of the blocks that all requests fill together at their ends.
    Returns: the seconds of the run, its counters, and the prediction.
    """
    model = load_model_config(path)
    wanted = workloads.demand([prompt + output - 1 for prompt, output in lengths], 16, len(lengths))
    num_blocks = round(fraction * wanted)
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
    requests = workloads.random_requests(random.Random(0), lengths, model.vocab_size)
    params = [SamplingParams(temperature=0, max_tokens=each.output_length, ignore_eos=True) for each in requests]
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": each.prompt_token_ids} for each in requests], params, use_tqdm=False)
    return time.perf_counter() - begin, llm.stats(), predicted


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
