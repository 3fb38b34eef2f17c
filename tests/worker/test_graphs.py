"""Recorded decode steps give the tokens of ordinary ones, whatever happens between two of them.

On a CPU a "recording" is the step itself: padding, static memory and inputs that are prepared ahead are those of a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.specs import SPECS
from kvllm.config import LayerGroup
from kvllm.core.protocol import StepPlan
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.worker import graphs
from kvllm.worker.features.attention_mass import AttentionMass
from kvllm.worker.graph_sizes import GraphSize, GraphSizes
from kvllm.worker.graphs import Step, StepGraphs, cuda_capture
from kvllm.worker.inputs import InputPreparer
from kvllm.worker.last_logits import LastLogits
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.state import PartTables, SequenceState
from kvllm.worker.step_inputs import StepInputs
from tests.helpers import layout_recorder
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint
from tests.helpers.compressions import fitting, paper_compression, refusal
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.devices import DEVICES, no_synchronization
from tests.helpers.engines import greedy, random_prompts, random_token_ids, records_chunks
from tests.helpers.features import feature_of

LENGTHS = (1, 2, 7, 16, 17, 40, 33, 5, 3, 20, 11)


checkpoint = checkpoint_fixture("qwen3", head_dim=16)


@pytest.fixture(autouse=True)
def narrow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences shall have tables of several widths."""
    monkeypatch.setattr(graphs, "LEAST_KV_PAIRS", 32)


class Recordings:
    """Counts what is recorded and replayed, and how often inputs of a replay were not prepared ahead of their step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.recorded = self.replayed = self.late = 0
        capture = cuda_capture() if self.runner.device.type == "cuda" else lambda step: step

        def counting(step: Step) -> Step:
            self.recorded += 1
            recorded = capture(step)

            def replay() -> LastLogits:
                self.replayed += 1
                return recorded()

            return replay

        self.runner.forward_pass.use_graphs(counting, self.runner.cache.num_blocks)
        inputs, graphs = self.runner.forward_pass.inputs, self.runner.forward_pass.graphs
        if graphs:
            self._begin, inputs._begin = inputs._begin, self._counting_begin
            self._prepare, graphs.prepare = graphs.prepare, self._counting_prepare
            self._preparing = False

    def _counting_prepare(self, *args: Any) -> StepInputs:
        self._preparing = True
        inputs = self._prepare(*args)
        self._preparing = False
        return inputs

    def _counting_begin(self, *args: Any) -> Any:
        self.late += self._preparing
        return self._begin(*args)


def make_llm(path: Path, device: str, **options: Any) -> LLM:
    defaults = {"block_size": 16, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 64, "max_num_seqs": 11}
    return LLM(path, device=device, enforce_eager=True, **(defaults | options))


def tokens(llm: LLM, params: SamplingParams, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    outputs = llm.generate(random_prompts(256, lengths), params, use_tqdm=False)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def assert_same_tokens(path: Path, device: str, params: SamplingParams, **options: Any) -> tuple[LLM, Recordings]:
    """Recorded steps give the tokens of ordinary ones, and on a GPU nothing in a step waits for it, but for an event of
    a compression -> the engine that recorded."""
    ordinary, llm = make_llm(path, device, **options), make_llm(path, device, **options)
    executor = llm.llm_engine.executor
    recordings, launch = Recordings(executor.runner), executor.launch

    def launching(plan: StepPlan) -> None:
        with nullcontext() if plan.compressions or plan.choices else no_synchronization():
            launch(plan)

    with patch.object(executor, "launch", launching):
        assert tokens(llm, params) == tokens(ordinary, params)
    counters = ("steps", "preemptions", "windows_compressed", "entries_evicted")
    assert [llm.stats()[name] for name in counters] == [ordinary.stats()[name] for name in counters]
    return llm, recordings


# Tokens


@DEVICES
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 3}, {"block_size": 128}], ids=str)
def test_batches_of_every_size(checkpoint: Path, device: str, options: dict) -> None:
    params = [greedy(20 + 9 * i) for i in range(len(LENGTHS))]  # they end one after the other
    _, recordings = assert_same_tokens(checkpoint, device, params, **options)
    assert recordings.replayed > 60
    assert recordings.recorded == len(
        recordings.runner.forward_pass.graphs.sizes.all()
    )  # none while requests were served


def assert_replays_have_the_bits_of_steps(path: Path, device: str) -> None:
    """Of three sizes or more, with chunks and without. A step computes the same KV pairs once more."""
    llm, replayed = make_llm(path, device, max_num_seqs=3, max_num_batched_tokens=20), set[int]()
    runner, capture = llm.llm_engine.executor.runner, cuda_capture()

    def compared(step: Step) -> Step:
        recorded = capture(step)

        def replay() -> LastLogits:
            with no_synchronization():
                found = recorded().logits.clone()
            last = step()
            assert torch.equal(found, last.logits)
            replayed.add(id(step))
            return last

        return replay

    runner.forward_pass.use_graphs(compared, runner.cache.num_blocks)
    params = [greedy(3 + 2 * i) for i in range(3)]
    assert tokens(llm, params, (3, 20, 7)) == tokens(make_llm(path, device), params, (3, 20, 7))
    assert len(replayed) >= 3


@pytest.mark.gpu
def test_a_replay_has_the_bits_of_its_step(checkpoint: Path) -> None:
    assert_replays_have_the_bits_of_steps(checkpoint, "cuda")


@DEVICES
def test_forks_and_preemption(checkpoint: Path, device: str) -> None:
    """Forks share a block until the first of them writes it, and a short pool has some of them start again."""
    params = SamplingParams(n=3, seed=7, max_tokens=60, ignore_eos=True, repetition_penalty=1.1)
    options = {"num_gpu_blocks_override": 30, "enable_prefix_caching": False}
    llm, recordings = assert_same_tokens(checkpoint, device, params, **options)
    assert llm.stats().preemptions > 0 and recordings.replayed > 60


def test_drafts_are_verified_in_recorded_steps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decodes and chunks of prompts, of requests that take the most likely tokens and of others."""
    records_chunks(monkeypatch)
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drawn = SamplingParams(temperature=0.3, seed=1, max_tokens=60, ignore_eos=True, logprobs=2)
    params = [greedy(60 + 3 * i) if i % 3 else drawn for i in range(len(LENGTHS))]
    options = {"attention_backend": "reference"}
    llm, kinds = make_llm(checkpoint, "cpu", speculative_config=ngram, **options), set[tuple[bool, bool]]()
    llm.llm_engine.scheduler.speculation.cost = None
    recordings, executor = Recordings(llm.llm_engine.executor.runner), llm.llm_engine.executor
    launch = executor.launch
    assert recordings.recorded == len(GraphSizes.with_chunks(11, 64).all()), "no more than without drafts"

    def launching(plan: StepPlan) -> None:
        replayed = recordings.replayed
        launch(plan)
        if plan.verifications:
            assert recordings.replayed == replayed + 1
            kinds.add((bool(plan.decodes.seq_ids), bool(plan.chunks)))

    monkeypatch.setattr(executor, "launch", launching)
    assert tokens(llm, params) == tokens(make_llm(checkpoint, "cpu", **options), params)
    assert len(kinds) >= 3 and 0 < sum(llm.stats().drafts.right) < llm.stats().drafts.tokens


def compressions() -> dict[str, CompressionConfig]:
    common: dict[str, Any] = {"buffer": 4, "chunk_budget": 3, "query_window": 6}
    clock = {"period": 4, "window_blocks": 2, "retain_tokens": 9}

    def make(method: str, policy: str, **options: Any) -> CompressionConfig:
        return CompressionConfig(**fitting(method, policy, **common, **options))

    found = {f"{name}-kara": make("kara", name, **clock) for name in ("periodic", "pressure")}
    found["periodic-kara-prompt"] = make("kara", "periodic", compress_prompt=True, **clock)
    found["periodic-mean_attention"] = make("mean_attention", "periodic", period=4, window_blocks=2)
    found["pressure-mean_attention"] = make("mean_attention", "pressure", **clock)
    for method, spec in SPECS.items():
        if not refusal(method, "threshold") and not spec.reads_file and not spec.reselects:
            found[f"threshold-{method}"] = make(method, "threshold", threshold_tokens=44, budget_tokens=25)
    return found


OF_EACH_KIND = (
    "periodic-kara",
    "periodic-kara-prompt",
    "pressure-kara",
    "pressure-mean_attention",
    "threshold-h2o",
    "threshold-adakv",
    "threshold-kvzip",
    "threshold-snapkv",
)


@DEVICES
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.long) for name in compressions()]
)
def test_compression_events_between_recorded_steps(checkpoint: Path, device: str, name: str) -> None:
    """Events fire with recordings on: they change tables and lengths, and the next recorded step sees that."""
    options = {"compression": compressions()[name], "block_size": 8, "num_gpu_blocks_override": 60}
    if device == "cuda":
        options |= {"block_size": 16, "num_gpu_blocks_override": 40}
    llm, recordings = assert_same_tokens(checkpoint, device, greedy(60), **options)
    assert llm.stats().compression_events > (10 if device == "cpu" else 4)
    if recordings.runner.forward_pass.graphs:
        assert recordings.replayed > llm.stats().compression_events
    else:
        assert device == "cpu" and feature_of(
            recordings.runner, AttentionMass
        )  # attention that is observed is read by the host


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with a window, in two parts, and two without."""
    path = tmp_path_factory.mktemp("mixed")
    types = ["full_attention" if layer in (1, 4) else "sliding_attention" for layer in range(5)]
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 20, "layer_types": types}
    make_checkpoint(path, "qwen3", head_dim=16, num_hidden_layers=5, **options)
    return path


def group_compressions() -> dict[str, CompressionConfig | None]:
    common: dict[str, Any] = {"period": 4, "window_blocks": 3, "buffer": 4}
    groups = [LayerGroup((1,), 2), LayerGroup((4,), 1)]
    return {
        "windows": None,
        "keydiff": paper_compression(method="keydiff", **common),
        "shares by layer": paper_compression(method="mean_attention", layer_groups=groups, **common),
    }


@DEVICES
@pytest.mark.parametrize("name", group_compressions())
def test_kv_groups_in_recorded_steps(mixed: Path, device: str, name: str) -> None:
    """Tables that slide, and tables that compressions shorten by different numbers of blocks."""
    num_blocks = 75 if name == "shares by layer" else 150  # of which each is two then
    options = {"compression": group_compressions()[name], "block_size": 8, "num_gpu_blocks_override": num_blocks}
    if device == "cuda":
        options |= {"block_size": 16, "num_gpu_blocks_override": num_blocks * 2 // 5}
    llm, recordings = assert_same_tokens(mixed, device, greedy(60), **options)
    assert recordings.replayed > 60 and llm.stats().preemptions > 0
    assert (llm.stats().windows_compressed > (10 if device == "cpu" else 1)) == (name != "windows")


@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_a_quantized_cache(tmp_path: Path, kv_cache_dtype: str) -> None:
    """Steps quantize in their static memory, and events move codes with scales between them."""
    make_checkpoint(tmp_path, "qwen3", head_dim=32)
    options = {"compression": compressions()["periodic-mean_attention"], "block_size": 8, "num_gpu_blocks_override": 60}
    llm, recordings = assert_same_tokens(tmp_path, "cpu", greedy(40), kv_cache_dtype=kv_cache_dtype, **options)
    assert recordings.replayed > llm.stats().compression_events > 3


def test_a_recording_scores_nothing(checkpoint: Path) -> None:
    """Shapes are recorded with inputs of nobody: no score in the pool may change."""
    compression = paper_compression(method="mean_attention", window_blocks=2, buffer=4)
    runner = make_llm(checkpoint, "cpu", compression=compression).llm_engine.executor.runner
    scores = runner.cache.scores.fill_(7.0)

    def record(step: Step) -> Step:
        step()  # as a capture does, to compile what it holds
        return step

    runner.forward_pass.use_graphs(record, runner.cache.num_blocks)
    assert runner.forward_pass.graphs and (scores == 7.0).all()


@pytest.mark.parametrize("method", ["kara", "pyramidkv", "adakv"])
def test_all_that_a_run_with_recordings_computes(checkpoint: Path, method: str) -> None:
    """Against dense attention over what survived, where all memory that holds no entry is NaN."""
    policy = "threshold" if SPECS[method].ragged else "periodic"
    compression = layout_recorder.compression_config(method, policy)
    llm, recorder = layout_recorder.make_llm(checkpoint, compression, device="cpu", max_num_batched_tokens=64)
    recordings = Recordings(recorder.runner)
    prompts = random_token_ids(3, 20, 41)
    layout_recorder.run(llm, prompts, [layout_recorder.greedy(60)] * len(prompts))
    assert recordings.replayed > len(recorder.events) >= 6
    layout_recorder.assert_as_expected(DenseDecoder(checkpoint), llm)


# Steps


@DEVICES
def test_padding_is_not_stored(checkpoint: Path, device: str) -> None:
    """Five sequences in a batch of eight: a step writes one entry of each, and nothing else."""
    llm = make_llm(checkpoint, device)
    recordings, cache = Recordings(llm.llm_engine.executor.runner), llm.llm_engine.executor.runner.cache
    cache.data.fill_(7)
    for i, prompt in enumerate(random_prompts(256, (1, 7, 16, 3, 40))):
        llm.llm_engine.add_request(str(i), prompt, greedy(40))
    for _ in range(4):
        llm.llm_engine.step()
    before, replayed = cache.data.clone(), recordings.replayed
    llm.llm_engine.step()
    assert recordings.replayed == replayed + 1
    written = (cache.data != before).any(dim=-1).any(dim=3).any(dim=1).any(dim=0)  # [blocks, block_size]
    states = recordings.runner.states.values()
    index = torch.tensor([state.cached_length - 1 for state in states])
    blocks = [
        int(recordings.runner.tables.parts[0].table[state.table_slot, i // 16])
        for state, i in zip(states, index, strict=True)
    ]
    assert written.nonzero().tolist() == sorted(map(list, zip(blocks, (index % 16).tolist(), strict=True)))


@DEVICES
def test_recording_writes_nothing(checkpoint: Path, device: str) -> None:
    llm = make_llm(checkpoint, device)
    runner = llm.llm_engine.executor.runner
    runner.cache.data.fill_(3)

    def run_once(step: Step) -> Step:
        step()
        return step

    runner.forward_pass.use_graphs(cuda_capture() if device == "cuda" else run_once, runner.cache.num_blocks)
    assert (runner.cache.data == 3).all()


def test_inputs_are_prepared_ahead(checkpoint: Path) -> None:
    """New blocks are no surprise."""
    llm = make_llm(checkpoint, "cpu")
    recordings = Recordings(llm.llm_engine.executor.runner)
    tokens(llm, greedy(100), (3, 20, 30))
    assert recordings.replayed == 99
    assert recordings.late == 1


def test_what_was_prepared_before_a_chunk_of_a_prompt_is_not_used_behind_it(checkpoint: Path) -> None:
    prompts = random_prompts(256, (3, 20, 200))
    expected = tokens(make_llm(checkpoint, "cpu"), greedy(40), (3, 20))
    llm = make_llm(checkpoint, "cpu")
    recordings, engine = Recordings(llm.llm_engine.executor.runner), llm.llm_engine
    outputs = [engine.add_request(str(i), prompt, greedy(40)) for i, prompt in enumerate(prompts[:2])]
    for _ in range(10):
        engine.step()
    engine.add_request("2", prompts[2], greedy(40))
    engine.step()
    engine.abort("2")
    late = recordings.late
    while engine.has_unfinished_requests():
        engine.step()
    assert recordings.late > late
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_graph_for_every_batch_size() -> None:
    sizes = [GraphSizes(100).of([1] * num_seqs) for num_seqs in range(1, 101)]
    assert all(size and num_seqs <= size.num_seqs == size.num_query_tokens for num_seqs, size in enumerate(sizes, 1))
    every = GraphSizes(100).all()
    assert {*sizes} == {*every} and every == [(size, size) for size in (100, 96, 80, 64, 48, 32, 16, 8, 4, 2, 1)]


def test_many_sequences_have_few_graphs() -> None:
    sizes = [GraphSizes(4096).of_decodes(num_seqs) for num_seqs in range(1, 4097)]
    assert all(num_seqs <= size <= num_seqs * 9 / 8 + 15 for num_seqs, size in enumerate(sizes, start=1))
    assert len(set(sizes)) == 52


def test_thirty_graphs_for_the_default_batch() -> None:
    sizes = GraphSizes.with_chunks(256, 2048)
    assert len(sizes.all()) == 30 and sizes.all()[0] == (512, 257)
    assert GraphSizes.with_chunks(256, 300).of([45] + [1] * 255) == (300, 257)
    assert GraphSizes.with_chunks(1024, 8192).all()[0] == (2048, 1025)


@pytest.mark.parametrize("max_num_seqs, max_num_batched_tokens", [(256, 2048), (4, 20), (1, 2), (300, 300)])
def test_a_step_with_chunks_fits_its_size(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Tokens that fill it up have a sequence of their own, and it is never taken for a step of decodes."""
    sizes = GraphSizes.with_chunks(max_num_seqs, max_num_batched_tokens)
    every = sizes.all()
    for total in range(2, sizes.most_chunk_tokens + 1):
        num_seqs = min(max_num_seqs, total - 1)
        size = sizes.of([total - num_seqs + 1] + [1] * (num_seqs - 1))
        assert size and size in every and total <= size.num_query_tokens != size.num_seqs
        assert num_seqs + (size.num_query_tokens > total) <= size.num_seqs
    assert sizes.of([sizes.most_chunk_tokens + 1]) is None


def test_a_graph_reads_tables_of_every_width() -> None:
    """Of wide tables only the columns that a step needs are copied; what lies after is of an earlier step. Logits are
    computed where they stay, once it is known of which kind they are."""
    params, tables = SamplingParams(), PartTables(3, [40], block_size=16)
    tables.table[0] = np.arange(120).reshape(3, 40)
    read, places = list[torch.Tensor](), list[torch.Tensor | None]()

    def compute(inputs: StepInputs, into: torch.Tensor | None) -> LastLogits:
        read.append(inputs.parts[0].block_tables.clone())
        places.append(into)
        logits = inputs.token_ids[:, None].float()
        return LastLogits(logits if into is None else into[: len(logits)].copy_(logits))

    inputs = InputPreparer(tables, torch.device("cpu"))
    recorded = StepGraphs(compute, lambda step: step, inputs, GraphSizes(3), [40])
    for length, width in ((600, 40), (20, 2), (100, 8)):
        states = [SequenceState([5] * 601, slot, tables, SampleRow(params, 0, [], [])) for slot in (2, 0)]
        for slot in (2, 0):
            tables.start(slot, length, [])
        of_step = recorded.prepare(states, [1, 1], GraphSize(2, 2))
        of_step.write_tokens(np.array([5, 5]))
        logits = recorded.run(of_step, GraphSize(2, 2)).logits
        assert logits.tolist() == [[5.0], [5.0]]
        assert places[-1] is None if len(places) == 1 else logits.data_ptr() == places[-1].data_ptr()
        assert (read[-1][:, :width] == torch.from_numpy(tables.table[0, [2, 0], :width])).all()
        assert read[-1].shape == (2, 40)


@pytest.mark.parametrize("drafts, expected", [(0, [8, 100, 100]), (1, [8, 200, 200]), (20, [8, 256, 512])])
def test_a_step_has_rows_of_logits_for_all_drafts(drafts: int, expected: list[int]) -> None:
    sizes = GraphSizes.with_chunks(100, 2048, 1 + drafts)
    assert [sizes.num_logits(GraphSize(*size)) for size in ((8, 8), (256, 101), (512, 101))] == expected


def test_what_cannot_be_recorded_runs_as_before(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, "cpu", attention_backend="reference")
    recordings = Recordings(llm.llm_engine.executor.runner)
    assert tokens(llm, greedy(5)) == tokens(make_llm(checkpoint, "cpu"), greedy(5))
    assert recordings.recorded == 0
