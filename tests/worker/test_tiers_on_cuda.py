"""Engines on a stand-in for a CUDA device whose blocks go to the host and to a disk and come back: the tokens are those
of the CPU, all accesses are ordered, and no step takes more memory than the steps that memory fitting runs.

The interpreter must be chosen before Triton is first imported, so the engines run in a process of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

from kvllm import LLM, SamplingParams
from kvllm.kvcache.tiers import staging
from kvllm.kvcache.tiers.queue import StreamTicket
from kvllm.worker.memory import run_heaviest_steps, run_largest_transfers
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.cuda_stand_in import Device, stand_in, without_first_launches
from tests.helpers.processes import run_python

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

PROMPTS = [{"prompt_token_ids": list(range(first, first + n))} for first, n in ((5, 15), (60, 31), (9, 30), (99, 60))]
STAGING_BYTES = 20_000
"""Two blocks of 16 tokens."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
REQUESTS = [
    SamplingParams(**GREEDY | {"temperature": 0.8, "top_p": 0.9, "seed": 1}, logprobs=5, repetition_penalty=1.2),
    SamplingParams(**GREEDY, allowed_token_ids=[3, 4, 5, 9], logprobs=20),
    SamplingParams(**GREEDY, presence_penalty=0.5, bad_words_token_ids=[[7, 8]]),
    SamplingParams(**GREEDY, prompt_logprobs=20),
]
KARA = paper_compression(
    method="kara", retain_tokens=15, period=3, window_blocks=1, buffer=2, chunk_budget=3, compress_prompt=True
)
"""So little that sequences are still preempted."""
ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "compressed, and quantized on the host": {
        "compression": KARA,
        "kv_offload_dtype": "int8",
        "num_gpu_blocks_override": 4,
    },
}


def make_llm(path: Path, device: str, disk: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 3, "num_gpu_blocks_override": 5, "max_num_batched_tokens": 60}
    tiers: dict[str, Any] = {"kv_offloading_size": 0.001, "swap": "always", "kv_offloading_path": str(disk / device)}
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "block_size": 16, "watermark": 0.0}
    with without_first_launches():
        return LLM(path, device=device, enforce_eager=True, **common | sizes | tiers | options)


def tokens(llm: LLM, requests: list[SamplingParams] = REQUESTS) -> list[list[int]]:
    """Steps are taken by the thread that asks for what they took: the device orders only what one thread does."""
    engine = llm.llm_engine
    outputs = [
        engine.add_request(str(number), prompt, params)
        for number, (prompt, params) in enumerate(zip(PROMPTS, requests, strict=True))
    ]
    while engine.has_unfinished_requests():
        engine.step()
    return [each.outputs[0].token_ids for each in outputs]


def most_bytes(device: Device, run: Callable[[], Any]) -> int:
    """Of tensors at once while something runs, beyond those before."""
    before = device.streams.peak_bytes = device.streams.live_bytes
    run()
    return device.streams.peak_bytes - before


def check(path: Path, disk: Path, options: dict[str, Any]) -> dict[str, Any]:
    """How an engine on the device compares with one on the CPU, and the bytes that its steps take with those that
    memory fitting counts for them."""
    expected, found = tokens(make_llm(path, "cpu", disk, **options)), []
    with stand_in() as device:
        llm = make_llm(path, "cuda", disk, **options)
        runner, config = llm.llm_engine.executor.runner, llm.config
        counted = most_bytes(device, lambda: run_heaviest_steps(runner, config))
        counted += most_bytes(device, lambda: run_largest_transfers(runner))
        taken = most_bytes(device, lambda: found.extend(tokens(llm)))
        llm.llm_engine.close()
    stats = llm.stats()
    counts = {name: stats[name] for name in ("swapped_in", "blocks_stored", "compression_events")}
    return {"are_equal": found == expected, "taken": taken, "counted": counted, **counts}


def races(path: Path, disk: Path) -> list[str]:
    """What is found if nobody waits until a load has ended."""
    at_once = {"done": lambda _: True, "wait": lambda _: None, "seconds": lambda _: 0.0}
    with pytest.raises(AssertionError), stand_in() as device, patch.multiple(StreamTicket, **at_once):
        tokens(make_llm(path, "cuda", disk), [SamplingParams(**GREEDY)] * len(PROMPTS))
    return device.streams.races


LONG = "compressed, and quantized on the host"
NAMES = [pytest.param(name, marks=pytest.mark.long) if name == LONG else name for name in ENGINES]


def run_all(*, long: bool) -> None:
    with TemporaryDirectory() as directory, patch.object(staging, "STAGING_BYTES", STAGING_BYTES):
        path = Path(directory)
        make_checkpoint(path, "qwen3", head_dim=16, num_hidden_layers=1, num_attention_heads=2)
        checked = {name: check(path, path / name, ENGINES[name]) for name in ENGINES if long or name != LONG}
        print(json.dumps([checked, races(path, path / "races") if long else []]))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Any:
    return run_python(
        f"run_all(long={request.config.getoption('long')})", "tests.worker.test_tiers_on_cuda", TRITON_INTERPRET="1"
    )


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_cpu_and_all_accesses_are_ordered(name: str, found: Any) -> None:
    checked = found[0][name]
    assert checked["are_equal"] and checked["swapped_in"] and checked["blocks_stored"]
    assert bool(checked["compression_events"]) == (name == LONG)


@pytest.mark.parametrize("name", NAMES)
def test_no_step_takes_more_than_memory_fitting_counts(name: str, found: Any) -> None:
    checked = found[0][name]
    assert 0.8 * checked["counted"] <= checked["taken"] <= checked["counted"]  # what is counted is needed


@pytest.mark.long
def test_a_wait_that_is_left_out_is_found(found: Any) -> None:
    assert any("a kernel reads" in race for race in found[1])
