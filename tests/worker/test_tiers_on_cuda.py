"""Engines on a stand-in for a CUDA device whose blocks go to the host and to a disk and come back: the tokens are those
of the CPU, all accesses are ordered, and no step takes more memory than the steps that memory fitting runs.

The interpreter must be chosen before Triton is first imported, so the engines run in a process of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
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
from tests.helpers.cuda_stand_in import Device, stand_in
from tests.helpers.processes import run_python

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

PROMPTS = [list(range(7, 18)), list(range(5, 45)), list(range(90, 60, -1))]
STAGING_BYTES = 20_000
"""Two blocks of 16 tokens."""


def requests() -> list[SamplingParams]:
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    return [
        SamplingParams(**common | {"temperature": 0.8, "top_p": 0.9, "seed": 1}, logprobs=5, repetition_penalty=1.2),
        SamplingParams(**common, allowed_token_ids=[3, 4, 5, 9], prompt_logprobs=3, logprobs=20),
        SamplingParams(**common, presence_penalty=0.5, bad_words_token_ids=[[7, 8]]),
    ]


def make_llm(path: Path, device: str, disk: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 3, "num_gpu_blocks_override": 7, "max_num_batched_tokens": 60}
    tiers: dict[str, Any] = {"kv_offloading_size": 0.001, "swap": "always", "kv_offloading_path": str(disk / device)}
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "block_size": 16, "watermark": 0.0}
    return LLM(path, device=device, **common | sizes | tiers | options)


def tokens(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [each.outputs[0].token_ids for each in llm.generate(prompts, requests(), use_tqdm=False)]


def is_that_of_the_cpu(path: Path, disk: Path, **options: Any) -> list[Any]:
    """Whether tokens are those of the CPU, twice, the second time with what the tiers hold; how often sequences came
    back; and blocks that the disk had."""
    expected = tokens(make_llm(path, "cpu", disk, **options))
    with stand_in():
        llm = make_llm(path, "cuda", disk, **options)
        found = [tokens(llm), tokens(llm)]
        stats = llm.stats()
        llm.llm_engine.close()
    return [found == [expected, expected], stats.swapped_in, stats.prefix_host_hits]


def races(path: Path, disk: Path) -> list[str]:
    """What is found if a piece of a store does not wait until the one before it has left the staging buffer."""
    with pytest.raises(AssertionError), stand_in() as device, patch.object(StreamTicket, "precede", lambda _: None):
        tokens(make_llm(path, "cuda", disk))
    return device.streams.races


def most_bytes(device: Device, run: Callable[[], Any]) -> int:
    """Of tensors at once while something runs, beyond those before."""
    before = device.streams.peak_bytes = device.streams.live_bytes
    run()
    return device.streams.peak_bytes - before


def budget(path: Path, disk: Path, **options: Any) -> list[int]:
    """Bytes that steps take, and those that memory fitting counts for them."""
    with stand_in() as device:
        llm = make_llm(path, "cuda", disk, enforce_eager=True, **options)
        runner, config = llm.llm_engine.executor.runner, llm.config
        counted = most_bytes(device, lambda: run_heaviest_steps(runner, config))
        counted += most_bytes(device, lambda: run_largest_transfers(runner))
        taken = most_bytes(device, lambda: tokens(llm))
        assert llm.stats().swapped_in
        return [taken, counted]


KARA = paper_compression(method="kara", retain_tokens=9, period=4, window_blocks=2, buffer=4, chunk_budget=3)
ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "quantized on the host": {"kv_offload_dtype": "int8"},
    "compressed": {"compression": KARA},
}


def run_all() -> None:
    with TemporaryDirectory() as directory, patch.object(staging, "STAGING_BYTES", STAGING_BYTES):
        path = Path(directory)
        make_checkpoint(path, "qwen3", head_dim=16, num_hidden_layers=1, num_attention_heads=2)
        found = [is_that_of_the_cpu(path, path / "0"), races(path, path / "1")]
        found.append({name: budget(path, path / name, **options) for name, options in ENGINES.items()})
        print(json.dumps(found))


@pytest.fixture(scope="module")
def found() -> Any:
    return run_python("run_all()", "tests.worker.test_tiers_on_cuda", TRITON_INTERPRET="1")


def test_tokens_are_those_of_the_cpu(found: Any) -> None:
    are_equal, swapped_in, host_hits = found[0]
    assert are_equal and swapped_in and host_hits


def test_a_wait_that_is_left_out_is_found(found: Any) -> None:
    assert found[1]


@pytest.mark.parametrize("name", ENGINES)
def test_no_step_takes_more_than_memory_fitting_counts(name: str, found: Any) -> None:
    taken, counted = found[2][name]
    assert taken <= counted
