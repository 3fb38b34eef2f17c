"""Which device an engine runs on, and how much of a GPU's memory it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvllm import LLM, CompressionConfig, ConfigError, Threshold
from kvllm.compression.queries import window_tokens
from kvllm.compression.specs import SPECS
from kvllm.config import EngineConfig, SpeculativeConfig
from kvllm.models.config import load_model_config
from kvllm.parallel import SingleRank
from kvllm.worker.build import RunnerSettings, make_runner
from kvllm.worker.features.observed_scores import HeldQueries
from kvllm.worker.memory import run_heaviest_steps
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.transfer import to_device
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import fitting, paper_compression, refusal
from tests.helpers.engines import greedy, random_prompts, tokens

with_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
GIB = 1 << 30


checkpoint = checkpoint_fixture("qwen3", method_files=True, head_dim=16)


half = checkpoint_fixture("qwen3", head_dim=16, dtype="float16")


# Choice


@with_gpu
def test_without_a_gpu_everything_is_on_the_cpu(checkpoint: Path) -> None:
    assert LLM(checkpoint, num_gpu_blocks_override=4).llm_engine.executor.runner.device.type == "cpu"
    with pytest.raises(ConfigError, match="device='cuda' is not allowed: torch finds no GPU here"):
        LLM(checkpoint, device="cuda")


@pytest.mark.gpu
def test_with_a_gpu_everything_is_on_it_cuda(checkpoint: Path) -> None:
    runner = LLM(checkpoint, num_gpu_blocks_override=4).llm_engine.executor.runner
    assert runner.device.type == "cuda" and runner.backend.name == "triton" and runner.forward_pass.graphs
    assert LLM(checkpoint, num_gpu_blocks_override=4, device="cpu").llm_engine.executor.runner.device.type == "cpu"
    eager = LLM(checkpoint, num_gpu_blocks_override=4, enforce_eager=True).llm_engine.executor.runner
    assert not eager.forward_pass.graphs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device='tpu' is not allowed: choose one of auto, cuda, cpu"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0 is not allowed: greater than 0 and at most 1"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization=90 is not allowed"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization='0.5': Expected `float`"),
    ],
    ids=str,
)
def test_wrong_options(checkpoint: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoint, **options)


@pytest.mark.parametrize("dtype", ["auto", "float16", "half", "float"])
def test_float16_runs_as_float32_on_the_cpu(half: Path, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, if it was asked for. vLLM's names of dtypes are known, too."""
    llm = LLM(half, device="cpu", num_gpu_blocks_override=4, block_size=16, dtype=dtype)
    assert llm.cache_shape.dtype == torch.float32
    warnings = [each.message for each in caplog.records if "runs as float32" in each.message]
    assert len(warnings) == (dtype in ("float16", "half"))


def test_bfloat16_stays_on_the_cpu(half: Path) -> None:
    assert LLM(half, device="cpu", num_gpu_blocks_override=4, dtype="bfloat16").cache_shape.dtype == torch.bfloat16


@pytest.mark.gpu
def test_float16_runs_as_it_is_on_cuda(half: Path) -> None:
    llm = LLM(half, num_gpu_blocks_override=40, block_size=16)
    assert llm.cache_shape.dtype == torch.float16
    assert all(len(found) == 20 for found in tokens(llm, random_prompts(256), greedy(20)))


@pytest.mark.gpu
@pytest.mark.parametrize("values", [[[1, 2], [3, 4]], np.array([[1, 3], [2, 4]]).T, np.empty((0, 3), dtype=np.int64)])
def test_what_is_uploaded_arrives(values: Any) -> None:
    found = to_device(values, torch.device("cuda"), torch.int32)
    assert found.is_cuda and found.is_contiguous() and found.tolist() == np.asarray(values).tolist()


# Memory


def make_probe(path: Path, compression: CompressionConfig | None, **options: Any) -> tuple[ModelRunner, EngineConfig]:
    """A runner whose cache has a single block, as for the steps that are run to find out how much memory they take."""
    sizes = {"block_size": 16, "max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 200}
    engine = EngineConfig(num_blocks=1, compression=compression, **(sizes | options))
    settings = RunnerSettings(str(path), load_model_config(path), engine, "float32", "auto", "auto")
    return make_runner(settings, SingleRank(), torch.device("cpu")), engine


def compressions() -> dict[str, CompressionConfig]:
    common: dict[str, Any] = {"buffer": 8, "chunk_budget": 4, "query_window": 8}
    found = {}
    for method, spec in SPECS.items():
        sizes = {"threshold_tokens": 100, "budget_tokens": 50, "protect_prompt": spec.reselects}
        for policy, name in (("periodic", method), ("threshold", f"{method}, threshold")):
            if not refusal(method, policy):
                found[name] = CompressionConfig(**fitting(method, policy, window_blocks=3, **sizes, **common))
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if i % 2 == 0 else pytest.mark.long) for i, name in enumerate(compressions())],
)
def test_the_heaviest_steps_are_as_heavy_as_any(checkpoint: Path, name: str) -> None:
    """All tokens of the budget, all sequences sampled, and the windows that fit into a step."""
    compression = compressions()[name]
    probe, engine = make_probe(checkpoint, compression)
    rows, sampled, windows, widths = [], [], [], []
    forward, logits = probe.model.forward, probe.model.logits
    selector = probe.compressor.selector
    select, score = selector.select, selector.score
    plan = probe.backend.plan
    probe.backend.plan = lambda batch: (
        widths.append((len(batch.last_kv_index), *batch.block_tables.shape)) or plan(batch)
    )
    probe.model.forward = lambda token_ids, *args: rows.append(len(token_ids)) or forward(token_ids, *args)
    probe.model.logits = lambda hidden, **options: sampled.append(len(hidden)) or logits(hidden, **options)
    selector.select = lambda queries, keys, **options: windows.append(keys) or select(queries, keys, **options)
    selector.score = lambda queries, keys, **options: windows.append(keys) or score(queries, keys, **options)
    run_heaviest_steps(probe, engine)
    assert 200 in rows and 6 in sampled
    assert (200 - 200 % 6, 6, 256 // 16) in widths  # all in one step
    size, is_whole = windows[0].shape[2], isinstance(compression.policy, Threshold)
    assert size == (100 if is_whole else 48)
    largest = 255 if is_whole else 48  # a prompt as long as it may be is chosen from at once
    assert windows[-1].shape[2] == largest
    assert max(rows) == max(200, largest * compression.spec.repeats)
    of_size = [keys.shape[0] for keys in windows if keys.shape[2] == size]
    assert sum(of_size) / 3 == min(6, 200 // window_tokens(compression, size)) + (largest == size)
    assert (1, 1, 256 // 16) in widths  # the event of the longest sequence
    assert not probe.states and len(probe.free_slots) == len(probe.tables.logical)


def test_the_heaviest_steps_verify_drafts_of_all_sequences(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With logits of all their tokens, and queries that are held for scores."""
    held, hold = list[int](), HeldQueries.hold
    monkeypatch.setattr(HeldQueries, "hold", lambda self, *args: held.append(self.num_rows) or hold(self, *args))
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    probe, engine = make_probe(checkpoint, compressions()["mean_attention"], speculation=speculation)
    logits, rows = probe.model.logits, list[int]()
    probe.model.logits = lambda hidden, **options: rows.append(len(hidden)) or logits(hidden, **options)
    run_heaviest_steps(probe, engine)
    assert 6 * 4 in rows and held == [6 * 4] * 3 and not probe.states


def test_no_event_is_run_for_sequences_that_end_before_it(checkpoint: Path) -> None:
    run_heaviest_steps(*make_probe(checkpoint, paper_compression(method="kara", buffer=8, window_blocks=16)))
    run_heaviest_steps(*make_probe(checkpoint, None, max_num_seqs=200))


@pytest.mark.gpu
def test_the_pool_gets_what_model_and_steps_leave_on_cuda(checkpoint: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.mem_get_info()[0]
    allowed = 3 * GIB // 2
    utilization = (total - before + allowed) / total
    options = {"max_num_seqs": 4096, "max_num_batched_tokens": 4096, "block_size": 256}
    llm = LLM(checkpoint, gpu_memory_utilization=utilization, compression=paper_compression(method="kara"), **options)
    assert tokens(llm, random_prompts(256), greedy(100))
    assert before - torch.cuda.mem_get_info()[0] < allowed
    assert llm.stats().num_blocks == llm.config.num_blocks == llm.llm_engine.executor.runner.cache.num_blocks < 2 * 4096


@pytest.mark.gpu
def test_what_does_not_fit_on_cuda(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.001 leaves no memory for the KV pool"):
        LLM(checkpoint, gpu_memory_utilization=0.001)
    with pytest.raises(
        ConfigError, match=r"num_gpu_blocks_override=100000000 is not allowed: it takes .* GiB of memory are free"
    ):
        LLM(checkpoint, num_gpu_blocks_override=100_000_000)
