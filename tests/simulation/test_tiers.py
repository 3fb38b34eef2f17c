"""Swap and recall in the simulator: times worked out by hand, plans and bytes against those of the real engine."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvllm import LLM, CompressionConfig, ConfigError, SamplingParams
from kvllm.config import EngineConfig
from kvllm.core.protocol import StepPlan
from kvllm.entrypoints import cli
from kvllm.models.config import load_model_config
from kvllm.pool_sizes import host_block_bytes, host_chunk_bytes
from kvllm.simulation.cost import CostModel, RecallBatch
from kvllm.simulation.executor import SimulatedExecutor
from kvllm.simulation.hardware import Hardware
from kvllm.simulation.simulate import Outcome, simulate
from kvllm.simulation.tiers import HostLink
from kvllm.worker.build import rank_cache_shape
from kvllm.worker.features.offloading import Offloader
from kvllm.worker.features.recall import Recall
from kvllm.worker.model_runner import ModelRunner
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression

FAST = Hardware(
    name="fast link",
    devices=2,
    memory_bytes=1e6,
    bytes_per_s=1e3,
    flops_per_s={"float32": 1e4},
    step_seconds=1.0,
    recall_seconds=0.5,
    link_bytes_per_s=100.0,
    host_bytes_per_s=1e12,
)
"""A load has ended when its step has."""
KARA = paper_compression(method="kara", period=8, window_blocks=3, retain_blocks=1, buffer=4, chunk_budget=2)
RECALLING: dict[str, dict[str, Any]] = {
    "periodic": {"policy": "periodic", "period": 8},
    "pressure": {"policy": "pressure", "period": 8},
    "threshold": {"policy": "threshold", "threshold_tokens": 48, "budget_tokens": 33},
}
OPTIONS: dict[str, Any] = {"block_size": 4, "max_model_len": 180, "max_num_seqs": 8, "max_num_batched_tokens": 40}
POOL = 90
COMPRESSIONS = (
    None,
    KARA,
    paper_compression(method="mean_attention", policy="pressure", period=8, buffer=4),
    CompressionConfig(method="snapkv", policy="threshold", threshold_tokens=48, budget_tokens=33, query_window=4),
)
PLANNED = ((0, "always", True), (1, "never", False), (2, "always", True), (3, "always", False), (3, "never", True))
"""Compression, swap and planning ahead of the plans that are compared by default."""
RECALLED = (("periodic", 3, "never"), ("pressure", 1, "always"), ("threshold", 3, "never"))
"""Policy, period and swap of recalls that are compared by default."""


checkpoint = checkpoint_fixture("qwen3", head_dim=16, tie_word_embeddings=True)


@pytest.fixture
def cost(checkpoint: Path) -> CostModel:
    return CostModel(FAST, load_model_config(checkpoint), "float32")


def linked(cost: CostModel, bytes_per_s: float | None) -> CostModel:
    """The same with another link."""
    return CostModel(msgspec.structs.replace(FAST, host_bytes_per_s=bytes_per_s), cost.model, "float32")


def some_lengths(count: int = 24) -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [(rng.randint(1, 60), rng.randint(1, 120)) for _ in range(count)]


def run_engine(checkpoint: Path, requests: int = 24, **options: Any) -> LLM:
    """An engine after a run."""
    lengths = some_lengths(requests)
    engine = {"kv_offloading_size": 0.05, "enable_prefix_caching": False, "num_gpu_blocks_override": POOL}
    llm = LLM(checkpoint, **OPTIONS | engine | options)
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in lengths]
    llm.generate([{"prompt_token_ids": [5] * prompt} for prompt, _ in lengths], params, use_tqdm=False)
    return llm


def run_simulated(cost: CostModel, llm: LLM, requests: int = 24, **options: Any) -> Outcome:
    lengths = some_lengths(requests)
    return simulate(llm.config, cost, lengths, [0.0] * len(lengths), **options)


@pytest.fixture
def _loads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of the engine have ended when their step has, as on a fast link."""
    report = Offloader.report
    monkeypatch.setattr(Offloader, "report", lambda self, *, wait: report(self, wait=True))


def outline(plan: StepPlan) -> tuple[Any, ...]:
    """All of a plan but its tokens, of which a simulation has none."""
    decodes = plan.decodes
    starts = [(start.seq_id, start.logical_length, start.tables) for start in plan.new_seqs]
    parts = (plan.chunks, plan.compressions, plan.copies, plan.stores, plan.loads, plan.scored)
    ends = (plan.dropped_seq_ids, plan.suspended, plan.forgotten, plan.cancelled)
    columns = (decodes.seq_ids, decodes.grown, decodes.new_blocks)
    return *map(list, columns), starts, *(list(part) for part in parts), *map(list, ends)


def plans_of(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> list[tuple[Any, ...]]:
    """Outlines of the plans that an executor gets from now on."""
    plans: list[tuple[Any, ...]] = []
    original = getattr(kind, method)

    def recording(self: Any, plan: StepPlan) -> Any:
        plans.append(outline(plan))
        return original(self, plan)

    monkeypatch.setattr(kind, method, recording)
    return plans


# Times and bytes, by hand


def test_bytes_pass_a_link_or_are_read_and_written(cost: CostModel) -> None:
    assert linked(cost, 50.0).host_seconds(100) == pytest.approx(2.0)
    assert linked(cost, None).host_seconds(100) == pytest.approx(2 * 100 / 1e3)


@pytest.mark.parametrize(
    ("link", "batch", "seconds"),
    [
        (50.0, RecallBatch(0, 0, dropped=10), 10 * 128 / 50),  # keys of 2 heads, 16 channels and 4 bytes
        (50.0, RecallBatch(0, 0, 10, exchanged=2.5), (10 * 128 + 2.5 * 256) / 50),
        (1e6, RecallBatch(0, 10, 10), 10 * 128 / 1e3),  # the keys of residents take longer
        (1e6, RecallBatch(0, 10, 10, 2.5), (10 * 128 + 2 * 2.5 * 256) / 1e3),
        (None, RecallBatch(0, 10, 10, 2.5), (20 * 128 + 4 * 2.5 * 256) / 1e3),  # all in one memory
    ],
)
def test_a_recall_takes_the_longest_of_what_it_reads(
    cost: CostModel, link: float | None, batch: RecallBatch, seconds: float
) -> None:
    assert linked(cost, link).recall(batch, 3, "auto") == pytest.approx(3 * (seconds + 0.5))


def test_a_recall_scores_each_query_head(cost: CostModel) -> None:
    heads = cost.model.num_query_heads
    batch = RecallBatch()
    batch.add(2, cached=10, dropped=5, exchanged=0)
    assert (batch.products, batch.resident, batch.dropped) == (15 + 1 + 15 + 2, 12, 5)
    computed, scores = 2 * heads * 16 * 33 / 1e4, (12 * 128 + 12 * heads * 33) / 1e3
    assert cost.recall(batch, 1, "auto") == pytest.approx(max(computed, scores) + 0.5)


@pytest.mark.parametrize("dtype", ["auto", "int8", "int6_int4", "int4", "int6_int4_hadamard"])
@pytest.mark.parametrize("method", ["keydiff", "kara"])
def test_blocks_and_chunks_have_the_bytes_of_the_engine(cost: CostModel, dtype: str, method: str) -> None:
    compression = paper_compression(method=method, buffer=4, recall_bound=0.1, recall_dtype=dtype)
    config = EngineConfig(num_blocks=9, block_size=4, max_model_len=99, compression=compression, kv_offload_dtype=dtype)
    shape = rank_cache_shape(cost.model, "float32", config, 1)
    assert cost.host_block_bytes(config) == host_block_bytes(config, shape)
    assert cost.host_chunk_bytes(config) == host_chunk_bytes(config, shape)


def test_a_link_makes_one_transfer_after_the_other() -> None:
    link = HostLink(block_seconds=2.0)
    link.store(3, 10.0, copy_seconds=0.5)
    link.load(7, 1, 11.0)
    link.load(8, 1, 30.0)
    assert link.wait(12.0) == 20.0
    first = link.ended(18.0, all_loads=False)
    assert (first.loaded, first.num_blocks, first.seconds) == ([7], 4, 6.5 + 2.0)
    link.cancel([8])
    assert link.wait(18.0) == 0.0 and not link.ended(99.0, all_loads=True).loaded


# Plans and bytes of the real engine


@pytest.mark.usefixtures("_loads_end")
@pytest.mark.parametrize(
    ("compression", "swap", "ahead"),
    [
        pytest.param(compression, swap, ahead, marks=() if (i, swap, ahead) in PLANNED else pytest.mark.long)
        for i, compression in enumerate(COMPRESSIONS)
        for swap in ("always", "never")
        for ahead in (False, True)
    ],
)
def test_plans_are_those_of_the_engine(
    checkpoint: Path,
    cost: CostModel,
    monkeypatch: pytest.MonkeyPatch,
    compression: CompressionConfig | None,
    swap: str,
    ahead: bool,
) -> None:
    real = plans_of(monkeypatch, ModelRunner, "prepare")
    options = {"compression": compression, "swap": swap, "async_scheduling": ahead}
    pool = POOL if compression is None else POOL // 2
    llm = run_engine(checkpoint, **options, num_gpu_blocks_override=pool)
    simulated = plans_of(monkeypatch, SimulatedExecutor, "execute")
    outcome = run_simulated(cost, llm)
    assert simulated == real[: len(simulated)] and not any(map(any, real[len(simulated) :]))
    stats, block_bytes = llm.stats(), host_block_bytes(llm.config, llm.cache_shape)
    assert outcome.stored_bytes == block_bytes * stats.blocks_stored
    assert outcome.loaded_bytes == block_bytes * stats.blocks_loaded
    for name in ("preemptions", "tokens_recomputed", "swapped_out", "steps"):
        assert getattr(outcome, name) == stats[name], name
    assert outcome.preemptions > 0 and (outcome.swapped_out > 0) == (swap == "always")
    assert (outcome.host_bytes > 0) == (swap == "always")


@pytest.mark.usefixtures("_loads_end")
@pytest.mark.parametrize(
    ("policy", "period", "swap"),
    [
        pytest.param(policy, period, swap, marks=() if (policy, period, swap) in RECALLED else pytest.mark.long)
        for policy in RECALLING
        for period in (1, 3)
        for swap in ("always", "never")
    ],
)
def test_what_recall_scores_is_what_the_engine_scores(
    checkpoint: Path, cost: CostModel, monkeypatch: pytest.MonkeyPatch, policy: str, swap: str, period: int
) -> None:
    """The KV pairs of each step, and the bytes that are exchanged where as many pairs come back as in the engine."""
    real: list[tuple[int, int, int]] = []
    groups, of_cost, simulated = Recall.groups, CostModel.recall, list[tuple[int, int, int]]()

    def observing(self: Recall, *args: Any) -> Any:
        found = groups(self, *args)
        if found:
            resident = sum(int((group.last_kv_index[:, -1] + 1).sum()) for group in found)
            dropped = sum(int((group.last_dropped[:, -1] + 1).sum()) for group in found)
            real.append((sum(len(group.seq_ids) for group in found), resident, dropped))
        return found

    def noting(self: CostModel, batch: RecallBatch, *args: Any) -> float:
        simulated.append((0, batch.resident, batch.dropped))
        return of_cost(self, batch, *args)

    monkeypatch.setattr(Recall, "groups", observing)
    monkeypatch.setattr(CostModel, "recall", noting)
    given = {"method": "keydiff", "buffer": 4, "recall_dtype": "int8"}
    windows = {} if policy == "threshold" else {"window_blocks": 3, "retain_blocks": 1}
    compression = paper_compression(**given | windows | RECALLING[policy], recall_period=period)
    llm = run_engine(checkpoint, 12, compression=compression, swap=swap, num_gpu_blocks_override=POOL // 2)
    recalls = sum(count for count, *_ in real)
    shape, heads = llm.cache_shape, llm.cache_shape.num_layers * llm.cache_shape.num_kv_heads
    chunk_bytes = host_chunk_bytes(llm.config, shape) // 16 // heads - 8
    pairs = llm.stats().recalled_bytes / recalls / heads / (shape.pair_bytes + chunk_bytes)
    outcome = run_simulated(cost, llm, 12, recalled_pairs=pairs)
    assert [each[1:] for each in simulated] == [each[1:] for each in real]
    assert outcome.recalls == recalls > 0 and not outcome.lost_pairs
    assert outcome.phases.recall > 0 and outcome.host_bytes > 0
    assert 0.9 * llm.stats().recalled_bytes < outcome.recalled_bytes <= llm.stats().recalled_bytes + 1


# What the link decides


def tight(swap: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        **OPTIONS, **{"num_blocks": POOL, "num_host_blocks": 500, "kv_offload_dtype": "auto"} | options, swap=swap
    )


def test_auto_swaps_where_the_link_is_faster_than_a_prefill(cost: CostModel) -> None:
    lengths = some_lengths()

    def run(bytes_per_s: float, swap: str, **options: Any) -> Outcome:
        return simulate(tight(swap, **options), linked(cost, bytes_per_s), lengths, [0.0] * len(lengths))

    slow, fast = (run(link, "auto") for link in (10.0, 1e9))
    assert fast.swapped_out == fast.preemptions > 3 and fast.tokens_recomputed == 0
    assert 0 < slow.swapped_out < slow.preemptions / 2 and slow.tokens_recomputed > 0
    assert run(1e9, "always").seconds < run(1e9, "never").seconds
    assert run(1.0, "always").seconds > run(1.0, "never").seconds
    waited = run(1.0, "always")
    assert waited.phases.transfer > 10 * run(1e9, "always").phases.transfer
    assert waited.output_tokens == sum(output for _, output in lengths)
    small = run(1e9, "always", num_host_blocks=9)
    assert small.swapped_out < small.preemptions
    assert run(1e9, "always", kv_offload_dtype="int4").host_bytes < run(1e9, "always").host_bytes / 3


def test_steps_go_on_while_blocks_come_back(cost: CostModel) -> None:
    """A load of many steps: it costs those beside it nothing but the copies before it."""
    lengths = some_lengths()
    always, never = (
        simulate(tight(swap), linked(cost, 1e2), lengths, [0.0] * len(lengths)) for swap in ("always", "never")
    )
    on_link = (always.stored_bytes + always.loaded_bytes) / 1e2
    assert 0 < always.phases.transfer < on_link
    assert always.phases.prefill < never.phases.prefill


@pytest.mark.parametrize("chunks", [3, 100_000])
def test_dropped_pairs_without_room_are_lost(cost: CostModel, chunks: int) -> None:
    compression = paper_compression(
        method="keydiff", period=8, window_blocks=3, retain_blocks=1, buffer=4, recall_period=1, recall_chunks=1
    )
    config = tight("never", compression=compression, num_host_chunks=chunks)
    lengths = some_lengths()
    outcome = simulate(config, cost, lengths, [0.0] * len(lengths))
    assert (outcome.lost_pairs > 0) == (chunks == 3)
    assert (outcome.host_bytes <= 3 * cost.host_chunk_bytes(config)) == (chunks == 3)
    pair = 4 * 16 * 2 * 2 * cost.model.num_layers * cost.model.num_kv_heads
    assert outcome.recalls <= outcome.recalled_bytes / pair <= 16 * outcome.recalls
    more = msgspec.structs.replace(config, compression=msgspec.structs.replace(compression, recall_period=4))
    assert simulate(more, cost, lengths, [0.0] * len(lengths)).recalls < outcome.recalls / 3


@pytest.mark.parametrize(
    ("chunks", "pairs", "message"),
    [(0, None, "num_host_chunks=0 is not allowed"), (9, 17, "recalled_pairs=17 is not allowed: between 0 and 16")],
)
def test_a_recall_that_cannot_be_simulated(cost: CostModel, chunks: int, pairs: float | None, message: str) -> None:
    compression = paper_compression(method="keydiff", buffer=4, recall_period=1, recall_chunks=1)
    with pytest.raises(ConfigError, match=message):
        SimulatedExecutor(cost, tight("never", compression=compression, num_host_chunks=chunks), pairs)


# The command


def arguments(folder: Path, checkpoint: Path, *more: str) -> list[str]:
    hardware, workload = folder / "fast.json", folder / "w.json"
    hardware.write_text(msgspec.json.encode(FAST).decode())
    workload.write_text('{"num_requests": 12, "input_len": 8, "output_len": 100}')
    files = ["--model-config", str(checkpoint), "--hardware", str(hardware), "--workload", str(workload)]
    small = ["--block-size", "4", "--num-blocks", "60", "--max-num-seqs", "8", "--dtype", "float32"]
    return ["simulate", *files, *small, *more]


def test_command_shows_what_tiers_do(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compression = "method=keydiff,period=8,buffer=4,recall_bound=0.3,recall_dtype=int4"
    more = ["--kv-offloading-size", "0.01", "--swap", "always", "--recalled-pairs", "2", "--compression", compression]
    cli.main(arguments(tmp_path, checkpoint, *more))
    rows = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["preemptions"][0] == rows["sequences swapped out"][0] != "0"
    assert rows["exchanged, GiB"][0] == "0.00" and rows["recall, s"][1] != "0.0"
    assert rows["tokens computed again"][0] == "0"


def test_command_shows_no_tiers_where_there_are_none(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(arguments(tmp_path, checkpoint, "--compression", "none"))
    assert "transfer, s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--kv-offloading-size", "1e-9"], "kv_offloading_size=1e-09 is not allowed: at least a block of 4 tokens"),
        (["--compression", "method=keydiff,buffer=4,recall_bound=0.3"], "kv_offloading_size=None .* a number of GiB"),
        (["--kv-offload-dtype", "int8", "--kv-cache-dtype", "int8"], "what is quantized already"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, checkpoint: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments(tmp_path, checkpoint, *more))
    assert re.search(message, capsys.readouterr().err)
