"""The simulator of models some of whose layers attend only a window: lengths by hand, plans against the real engine."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.config import EngineConfig, LayerGroup
from kvllm.core.protocol import CompressionJob, Decodes, Fork, PartJob, PrefillChunk, SequenceStart, StepPlan
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import cache_shape
from kvllm.entrypoints.simulate import add_arguments, make_config, run
from kvllm.kvcache.groups import UNIFORM
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.simulation.cost import Attended, CostModel, QueryBatch
from kvllm.simulation.executor import SimulatedExecutor
from kvllm.simulation.simulate import simulate
from kvllm.simulation.workload import arrival_times
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.simulation.test_simulation import HARDWARE, check_counts, some_lengths

WINDOW = 12
FULL, SLIDING = 2, 3
"""Layers of each kind: a block holds two, so the layers with a window have two parts."""
OPTIONS: dict[str, Any] = {"block_size": 4, "max_model_len": 180, "max_num_seqs": 8, "max_num_batched_tokens": 40}
LARGE = msgspec.structs.replace(HARDWARE, memory_bytes=8_000_000)
OBSERVED = paper_compression(method="mean_attention", period=8, window_blocks=3, retain_blocks=1, buffer=4)


BY_LAYER = msgspec.structs.replace(OBSERVED, layer_groups=(LayerGroup((1,), 1), LayerGroup((4,), 2)))
"""For the layers without a window."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows")
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    make_checkpoint(path, "qwen3", head_dim=16, num_hidden_layers=5, **options)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> ModelConfig:
    return load_model_config(checkpoint)


@pytest.fixture(scope="module")
def cost(model: ModelConfig) -> CostModel:
    return CostModel(LARGE, model, "float32")


def config_of(checkpoint: Path, **options) -> EngineConfig:
    return EngineArgs(checkpoint, num_gpu_blocks_override=110, **(OPTIONS | options)).engine_config


@pytest.mark.parametrize("position", [0, 1, 10, 11, 12, 50])
@pytest.mark.parametrize("tokens", [1, 2, 11, 12, 13, 40])
def test_tokens_attend_their_windows(position: int, tokens: int) -> None:
    batch = QueryBatch()
    batch.add_sliding(WINDOW, tokens, position)
    seen = [range(max(0, at + 1 - WINDOW), at + 1) for at in range(position, position + tokens)]
    assert batch.sliding == {WINDOW: Attended(sum(map(len, seen)), len(set().union(*seen)))}


def test_layers_take_the_time_of_what_they_attend(cost: CostModel) -> None:
    """Beyond the window, a longer text takes longer in full layers alone."""

    def seconds(length: int) -> float:
        batch = QueryBatch(1, 1, length, length)
        batch.add_sliding(WINDOW, 1, length - 1)
        return cost.forward(batch, QueryBatch(), 0)[0]

    of_pair = cost.kv_pair_bytes / LARGE.bytes_per_s
    assert seconds(100) - seconds(50) == pytest.approx(FULL * 50 * of_pair)
    assert seconds(WINDOW) - seconds(1) == pytest.approx((FULL + SLIDING) * (WINDOW - 1) * of_pair)


def test_a_window_ends_at_the_position_whatever_was_dropped(checkpoint: Path, cost: CostModel) -> None:
    """32 of 40 KV pairs are dropped from full layers; the next token and that of a fork attend a whole window in the
    others. What moves, moves in full layers."""
    sampling = SamplingParams(temperature=0)
    executor = SimulatedExecutor(cost, config_of(checkpoint, compression=OBSERVED))
    executor.execute(
        StepPlan(
            new_seqs=[SequenceStart(0, [0] * 41, 41, 40, sampling, 0)],
            compressions=[CompressionJob(0, [PartJob(0, 4, 10, 2, 10, 10, [0, 1])])],
            chunks=[PrefillChunk(0, 1, [], True, [Fork(1, 0)])],
        )
    )
    assert executor.seconds.compact == pytest.approx(cost.compact(8, layers=FULL))
    assert executor.seconds.score == pytest.approx(cost.score(0, 40, layers=FULL, at_once=True))
    assert executor.seconds.decode == pytest.approx(forward(cost, held=9, samples=2))
    before = executor.seconds.decode
    executor.execute(StepPlan(decodes=Decodes([1], [0]), dropped_seq_ids=[0]))
    assert executor.seconds.decode - before == pytest.approx(forward(cost, held=10, samples=1))
    executor.execute(StepPlan(dropped_seq_ids=[1]))
    assert executor.cached == executor.dropped == {}


def forward(cost: CostModel, held: int, samples: int) -> float:
    batch = QueryBatch(1, 1, held, held, {WINDOW: Attended(WINDOW, WINDOW)})
    return cost.forward(batch, QueryBatch(), samples)[0]


@pytest.mark.parametrize(
    ("compression", "released"),
    [(None, True), pytest.param(None, False, marks=pytest.mark.long), (OBSERVED, True), (BY_LAYER, True)],
    ids=["groups", "kept", "compressed", "shares by layer"],
)
def test_counts_are_those_of_the_real_engine(
    checkpoint: Path, cost: CostModel, compression: CompressionConfig | None, released: bool
) -> None:
    lengths = some_lengths(24)
    options = OPTIONS | {"compression": compression, "enable_prefix_caching": False}
    llm = LLM(checkpoint, num_gpu_blocks_override=110, disable_hybrid_kv_cache_manager=not released, **options)
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in lengths]
    llm.generate([{"prompt_token_ids": [5] * prompt} for prompt, _ in lengths], params, use_tqdm=False)
    outcome = simulate(llm.config, cost, lengths, arrival_times(len(lengths), None))
    check_counts(outcome, llm)
    assert outcome.preemptions > 0
    assert (outcome.windows_compressed > 0) == (compression is not None)


def arguments(checkpoint: Path, tmp_path: Path, *more: str) -> list[str]:
    hardware, workload = tmp_path / "large.json", tmp_path / "w.json"
    hardware.write_text(msgspec.json.encode(LARGE).decode())
    workload.write_text(json.dumps({"num_requests": 40, "input_len": 60, "output_len": 120, "range_ratio": 0}))
    files = ["--model-config", str(checkpoint), "--hardware", str(hardware), "--workload", str(workload)]
    return [*files, "--block-size", "4", "--max-num-batched-tokens", "256", *more]


def test_command_has_the_groups_and_blocks_of_the_engine(
    checkpoint: Path, cost: CostModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(arguments(checkpoint, tmp_path, "--compression", "none"))
    engine = EngineArgs(checkpoint, block_size=4, max_model_len=180)
    config = make_config(args, cost, 180)
    assert config.kv_groups == engine.engine_config.kv_groups != UNIFORM
    room = LARGE.memory_bytes * 0.9 - cost.weight_bytes
    assert config.num_blocks == int(room) // cache_shape(engine).bytes_per_block
    assert make_config(args, cost, WINDOW).kv_groups == UNIFORM  # no text is longer than the window
    scored = paper_compression(method="mean_attention", buffer=4)
    engine = EngineArgs(checkpoint, block_size=4, max_model_len=180, compression=scored)
    fewer = make_config(args, cost, 180, scored).num_blocks
    assert fewer == int(room) // cache_shape(engine).bytes_per_block < config.num_blocks
    run(args)
    assert f"{config.num_blocks:,} blocks of 4 = {4 * config.num_blocks:,} tokens in 2 of 5 layers" in (
        capsys.readouterr().out
    )


def test_release_holds_more_sequences_in_the_same_memory(checkpoint: Path, cost: CostModel) -> None:
    lengths = [(60, 100)] * 40
    concurrency = []
    for groups in (UNIFORM, config_of(checkpoint).kv_groups):
        blocks = cost.pool_blocks(4, 0.22, kv_groups=groups)
        options = OPTIONS | dict[str, Any](max_num_seqs=40)
        config = EngineConfig(num_blocks=blocks, kv_groups=groups, **options)
        concurrency.append(simulate(config, cost, lengths, [0.0] * 40).mean_concurrency)
    assert concurrency[1] > 1.5 * concurrency[0]
