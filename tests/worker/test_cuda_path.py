"""The path for GPUs where there is none: engines on a stand-in for a CUDA device, with graphs and Triton's kernels,
give the tokens of the CPU, and a step waits for nothing but its tokens.

The interpreter must be chosen before Triton is first imported, so the engines run in a process of their own.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from kvllm import LLM, SamplingParams, engine_builder
from kvllm.core.protocol import StepPlan, StepResult
from kvllm.lora.request import LoRARequest
from kvllm.memory_plan import plan_memory
from kvllm.models.config import load_model_config
from kvllm.outputs import RequestOutput
from kvllm.worker import draws, graph_sizes, memory, sampler
from kvllm.worker.drafter import Text
from kvllm.worker.features.drafts import Drafts
from kvllm.worker.features.ragged_lengths import RaggedLengths
from kvllm.worker.memory import measure_graphs
from kvllm.worker.transfer import Download, to_device_early
from tests.helpers.adapters import ATTENTION, MLP, make_adapter
from tests.helpers.checkpoints import make_checkpoint, make_draft
from tests.helpers.compressions import paper_compression
from tests.helpers.cuda_stand_in import Device, DeviceTensor, stand_in, without_first_launches
from tests.helpers.families import FAMILIES
from tests.helpers.plans import scheduled_in
from tests.helpers.processes import run_python
from tests.worker.test_mtp import make_with_mtp

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

MIB = 1 << 20
PROMPTS = [list(range(7, 18)), list(range(5, 45))]
MOST_TOKENS, MOST_RECORDED_TOKENS = 20, 16
"""Two steps have 20 tokens, the third has a decode beside the last 12 tokens of a prompt."""
COUNTS_OF_HEADS = "a copy to the host"
"""Heads that keep different numbers of entries: the host must know them, once an event."""


# Engines


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 7, "ignore_eos": True} | options))


RECURRENT, LATENTS = "forks, recurrent layers", "latents, keydiff"


def cases() -> dict[str, tuple[dict[str, Any], list[SamplingParams]]]:
    """Options of an engine, and what its requests ask for."""
    window = {"period": 4, "window_blocks": 2, "buffer": 4, "compress_prompt": True}
    chunks = {**window, "chunk_budget": 3}
    cache = {"policy": "threshold", "threshold_tokens": 32, "budget_tokens": 16, "buffer": 4, "query_window": 4}
    sampled = [
        params(n=2, temperature=0.8, top_p=0.9, seed=3),
        params(
            temperature=0.7,
            top_k=20,
            min_p=0.01,
            seed=4,
            repetition_penalty=1.2,
            min_tokens=4,
            logprobs=2,
            allowed_token_ids=list(range(3, 255, 2)),
        ),
    ]
    forks = {"max_num_seqs": 3, "num_gpu_blocks_override": 5}
    return {
        "forks, options of sampling, a short pool": (forks, sampled),
        RECURRENT: (forks, [*sampled[:1], params()]),
        "kara": ({"compression": paper_compression(method="kara", retain_tokens=9, **chunks)}, [params()] * 2),
        "h2o": ({"compression": paper_compression(method="h2o", retain_blocks=1, **window)}, [params()] * 2),
        LATENTS: ({"compression": paper_compression(method="keydiff", retain_tokens=9, **window)}, [params()] * 2),
        "int8, adakv": (
            {"kv_cache_dtype": "int8", "compression": paper_compression(method="adakv", **cache)},
            [params()] * 2,
        ),
        "int4, kara_no_bi, a pool of what is free": (
            {
                "num_gpu_blocks_override": None,
                "gpu_memory_utilization": 0.02,
                "kv_cache_dtype": "int4",
                "compression": paper_compression(method="kara_no_bi", retain_tokens=9, **chunks),
            },
            [params()] * 2,
        ),
    }


def make_llm(path: Path, device: str, **options: Any) -> LLM:
    defaults = {"max_num_seqs": 2, "num_gpu_blocks_override": 12, "max_num_batched_tokens": MOST_TOKENS}
    options = defaults | options
    takes_what_is_free = options["num_gpu_blocks_override"] is None
    with nullcontext() if takes_what_is_free else without_first_launches():
        return LLM(path, device=device, dtype="float32", max_model_len=64, block_size=16, **options)


def run(
    llm: LLM,
    requested: list[SamplingParams],
    step: Callable[[], Any],
    adapters: Sequence[LoRARequest | None] = (None, None),
) -> list[RequestOutput]:
    engine = llm.llm_engine
    outputs = [
        engine.add_request(str(i), prompt, each, lora_request=adapter)
        for i, (prompt, each, adapter) in enumerate(zip(PROMPTS, requested, adapters, strict=True))
    ]
    while engine.has_unfinished_requests():
        step()
    return outputs


@contextmanager
def watched(device: Device, llm: LLM, *, greedy: bool) -> Iterator[None]:
    """A launch waits for nothing, and its tokens come in one download, which it does not wait for either. It replays a
    graph, with chunks of prompts or without, events or not, unless it has too many tokens. The graph has found the most
    likely ones."""
    executor = llm.llm_engine.executor
    is_ragged = any(isinstance(feature, RaggedLengths) for feature in executor.runner.features)
    launch, collect = executor.launch, executor.collect

    def watched_launch(plan: StepPlan) -> None:
        device.waits, device.downloads, device.replays = [], 0, 0
        before = choose.call_count
        launch(plan)
        expected = [COUNTS_OF_HEADS] if plan.compressions and is_ragged else []
        sampled = any(item.samples for item in scheduled_in(plan))
        assert (device.waits, device.downloads) == (expected, sampled + len(expected))
        total = sum(num_tokens for _, num_tokens in plan.query_tokens())
        assert device.replays == (0 < total <= MOST_RECORDED_TOKENS)
        assert not (greedy and device.replays) or choose.call_count == before

    def watched_collect() -> StepResult:
        device.waits, device.downloads = [], 0
        result = collect()
        assert (device.waits, device.downloads) == ([], 0)
        return result

    watching = patch.multiple(executor, launch=watched_launch, collect=watched_collect)
    with watching, patch.object(sampler.draws, "most_likely", wraps=draws.most_likely) as choose:
        yield


def check_case(path: Path, options: dict[str, Any], requested: list[SamplingParams]) -> None:
    on_cpu = options | {"num_gpu_blocks_override": options.get("num_gpu_blocks_override") or 12}
    if "kv_cache_dtype" in options:
        on_cpu["attention_backend"] = "reference"  # the operators want larger heads
    llm = make_llm(path, "cpu", **on_cpu)
    expected = run(llm, requested, llm.llm_engine.step)
    chunk_tokens = patch.object(graph_sizes, "LEAST_CHUNK_TOKENS", MOST_RECORDED_TOKENS)
    with stand_in() as device, chunk_tokens:
        on_device = make_llm(path, "cuda", **options)
        runner = on_device.llm_engine.executor.runner
        assert runner.device.type == "cuda" and runner.forward_pass.graphs
        assert on_device.config.async_scheduling
        with watched(device, on_device, greedy=all(each.greedy for each in requested)):
            found = run(on_device, requested, on_device.llm_engine.step)
    assert on_device.stats().compression_events == llm.stats().compression_events >= ("compression" in options)
    for request, other in zip(found, expected, strict=True):
        for completion, like in zip(request.outputs, other.outputs, strict=True):
            assert completion.token_ids == like.token_ids
            assert completion.cumulative_logprob == pytest.approx(like.cumulative_logprob, abs=1e-3)


MODEL_DRAFTS, LAYER_DRAFTS, RECURRENT_DRAFTS = DRAFTS = (
    "drafts of a model",
    "drafts of a layer",
    "drafts of a layer after recurrent ones",
)


def drafts_of(path: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(path / "draft"), "num_speculative_tokens": 4}


def all_drafts_pay() -> Any:
    """Engines that are made here measure no steps, and try all drafts."""
    return patch.object(engine_builder, "measure_steps", lambda *_: None)


@contextmanager
def watched_drafts(device: Device, llm: LLM) -> Iterator[list[int]]:
    """Every pass is replayed, one that verifies drafts as well, whose tokens come together. Those of a draft follow
    each other before the host waits for any of its tokens. Yields the lengths of the longest drafts."""
    executor, events, lengths = llm.llm_engine.executor, list[str](), list[int]()
    [drafts] = [each for each in executor.runner.features if isinstance(each, Drafts)]
    launch, draft, compute, wait = executor.launch, drafts.model.draft, drafts.model._pass, Download.wait

    def watched_launch(plan: StepPlan) -> None:
        events.clear()
        device.waits, device.replays = [], 0
        launch(plan)
        total = sum(num_tokens for _, num_tokens in plan.query_tokens())
        assert device.waits == [] and device.replays == (0 < total <= MOST_RECORDED_TOKENS)
        assert events == ["wait"] * bool(plan.verifications)

    def watched_draft(texts: list[Text]) -> None:
        events.clear()
        device.waits, device.replays = [], 0
        draft(texts)
        passes, longest = events.count("pass"), max(len(text.draft) for text in texts)
        assert device.waits == [] and events == ["pass"] * passes + ["wait"] * longest
        whole = device.replays - passes
        assert whole in (0, -1)  # a whole prompt is too long for a graph
        lengths.append(longest)

    with (
        patch.object(executor, "launch", watched_launch),
        patch.object(drafts.model, "draft", watched_draft),
        patch.object(drafts.model, "_pass", lambda *args: events.append("pass") or compute(*args)),
        patch.object(Download, "wait", lambda download: events.append("wait") or wait(download)),
    ):
        yield lengths


def check_drafts(path: Path, config: dict[str, Any]) -> None:
    """One request takes the most likely tokens, and one draws."""
    requested = [params(max_tokens=10), params(max_tokens=10, temperature=0.7, top_k=20, seed=4, min_tokens=4)]
    llm = make_llm(path, "cpu")
    expected = run(llm, requested, llm.llm_engine.step)
    chunk_tokens = patch.object(graph_sizes, "LEAST_CHUNK_TOKENS", MOST_RECORDED_TOKENS)
    with stand_in() as device, chunk_tokens, all_drafts_pay():
        on_device = make_llm(path, "cuda", speculative_config=config)
        recorded = on_device.llm_engine.executor.runner.recorded
        assert len(device.graphs) == 3 * len(recorded)  # of 16 tokens, and of 2 and 1 sequences
        with watched_drafts(device, on_device) as lengths:
            found = run(on_device, requested, on_device.llm_engine.step)
    counts = on_device.stats().drafts
    has_states = on_device.llm_engine.executor.runner.cache.shape.recurrent is not None
    assert max(lengths) == 4 and sum(counts.right) < counts.tokens and (sum(counts.right) or has_states)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]


def check_scored_drafts(path: Path) -> None:
    """Passes that verify drafts are replayed, and add the scores of right queries, by which pairs are kept."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    window = {"period": 4, "window_blocks": 2, "retain_blocks": 1, "buffer": 4}
    compression = paper_compression(method="mean_attention", recent=4, **window)
    options: dict[str, Any] = {"compression": compression, "speculative_config": ngram}
    requested, kinds = [params(max_tokens=44), params(max_tokens=9)], set[bool]()
    chunk_tokens = patch.object(graph_sizes, "LEAST_CHUNK_TOKENS", MOST_RECORDED_TOKENS)

    def watched_launch(plan: StepPlan) -> None:
        device.waits, device.replays = [], 0
        launch(plan)
        if plan.verifications:
            assert device.waits == [] and device.replays == 1
            kinds.add(bool(plan.decodes.seq_ids))

    with all_drafts_pay():
        llm = make_llm(path, "cpu", async_scheduling=True, **options)
        expected_scores = llm.llm_engine.executor.runner.cache.scores.zero_()
        expected = run(llm, requested, llm.llm_engine.step)
        with stand_in() as device, chunk_tokens:
            on_device = make_llm(path, "cuda", **options)
            executor = on_device.llm_engine.executor
            scores, launch = executor.runner.cache.scores.zero_(), executor.launch
            with patch.object(executor, "launch", watched_launch):
                found = run(on_device, requested, on_device.llm_engine.step)
            torch.testing.assert_close(scores.cpu(), expected_scores, atol=1e-4, rtol=1e-4)
    assert kinds == {True, False}, "alone, and beside a decode"
    counts = on_device.stats().drafts
    assert 0 < sum(counts.right) < counts.tokens and on_device.stats().compression_events == 1
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]


def check_adapters(path: Path) -> None:
    """Chunks and decodes of two, then of a third one in the place of the first beside none."""
    modules, requests = {"all": (*ATTENTION, *MLP), "mlp": MLP, "output": ("o_proj",)}, {None: None}
    for rank, (name, of_name) in enumerate(modules.items(), 3):
        adapter = make_adapter(path / name, path, of_name, rank=rank, seed=rank, std=0.3)
        requests[name] = LoRARequest(name, rank, str(adapter))
    batches = [[requests[name] for name in names] for names in (("all", "mlp"), ("output", None), (None, "mlp"))]
    options, requested = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}, [params(max_tokens=4)] * 2
    llm = make_llm(path, "cpu", **options)
    expected = [run(llm, requested, llm.llm_engine.step, batch) for batch in batches]
    with stand_in() as device, patch.object(graph_sizes, "LEAST_CHUNK_TOKENS", MOST_RECORDED_TOKENS):
        on_device = make_llm(path, "cuda", **options)
        with watched(device, on_device, greedy=True):
            found = [run(on_device, requested, on_device.llm_engine.step, batch) for batch in batches]
    for request, other in zip(chain(*found), chain(*expected), strict=True):
        assert request.outputs[0].token_ids == other.outputs[0].token_ids
        assert request.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    assert len({tuple(request.outputs[0].token_ids) for batch in found for request in batch}) == 5


def check_drafts_of_a_layer(family: str) -> None:
    with TemporaryDirectory() as directory:
        path = make_with_mtp(Path(directory), family)
        check_drafts(path, {"method": "mtp", "num_speculative_tokens": 4})


ADAPTERS, SCORED_DRAFTS = "adapters", "drafts and observed scores"
LONG = ("kara", "h2o", "int8, adakv", LAYER_DRAFTS, RECURRENT_DRAFTS)
ALL = (*cases(), ADAPTERS, SCORED_DRAFTS, *DRAFTS)
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in ALL]


def run_cases(*, long: bool) -> None:
    failures = {}
    with TemporaryDirectory() as directory, TemporaryDirectory() as recurrent, TemporaryDirectory() as latents:
        model = make_checkpoint(Path(directory), "qwen3", head_dim=16, num_hidden_layers=1, num_attention_heads=2)
        make_draft(Path(directory), model)
        of_states = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        make_checkpoint(Path(recurrent), **{**FAMILIES["qwen3.5"], "num_attention_heads": 2, **of_states})
        of_latents = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        make_checkpoint(Path(latents), **{**FAMILIES["glm4-moe-lite"], **of_latents})
        paths = {RECURRENT: recurrent, LATENTS: latents}
        checks = {name: partial(check_case, Path(paths.get(name, directory)), *case) for name, case in cases().items()}
        checks[MODEL_DRAFTS] = partial(check_drafts, Path(directory), drafts_of(Path(directory)))
        checks[ADAPTERS] = partial(check_adapters, Path(directory))
        checks[SCORED_DRAFTS] = partial(check_scored_drafts, Path(directory))
        checks[LAYER_DRAFTS] = partial(check_drafts_of_a_layer, "glm4-moe")
        checks[RECURRENT_DRAFTS] = partial(check_drafts_of_a_layer, "qwen3.5")
        for name, check in checks.items():
            if name in LONG and not long:
                continue
            try:
                check()
            except Exception:
                failures[name] = traceback.format_exc()
        print(json.dumps([failures, measured_graphs(Path(directory)), kept_for_adapters(Path(directory))]))


def measured_graphs(path: Path) -> list[Any]:
    """Of graphs of which the first takes 30 MiB of a device and the others 5 each, of a model and one that drafts, by a
    runner that had none: the estimate for all in MiB, how many were captured for it, and whether it has none again."""
    with stand_in() as device, all_drafts_pay():
        options = {"enforce_eager": True, "speculative_config": drafts_of(path)}
        runner = make_llm(path, "cuda", **options).llm_engine.executor.runner

        def mem_get_info(_: Any) -> tuple[int, int]:
            return (1 << 30) - (25 * MIB * bool(device.graphs) + 5 * MIB * len(device.graphs)), 1 << 30

        with patch.object(torch.cuda, "mem_get_info", mem_get_info):
            estimate = measure_graphs(runner, 12, torch.cuda.Stream())
        return [estimate // MIB, len(device.graphs), [each.graphs for each in runner.recorded]]


def kept_for_adapters(path: Path) -> list[int]:
    """Bytes that an engine has more if it takes adapters, before the first one comes, and those that are planned."""
    taken, options = list[int](), {"enable_lora": True, "max_loras": 2}
    for each in ({}, options):
        with stand_in():
            llm = make_llm(path, "cuda", enforce_eager=True, **each)
            taken.append(torch.cuda.memory_allocated())
    return [taken[1] - taken[0], plan_memory(load_model_config(path), llm.config, "float32").rank_adapter_bytes]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> tuple[dict[str, str], list[Any], list[int]]:
    """The failures of cases, `measured_graphs` and `kept_for_adapters`."""
    long = request.config.getoption("long")
    return tuple(run_python(f"run_cases(long={long})", "tests.worker.test_cuda_path", TRITON_INTERPRET="1"))


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_on_the_stand_in(name: str, found: tuple[dict[str, str], list[Any], list[int]]) -> None:
    assert name not in found[0], found[0][name]


def test_a_pool_leaves_room_for_adapters(found: tuple[dict[str, str], list[Any], list[int]]) -> None:
    taken, planned = found[2]
    assert 0 < planned <= taken < planned + 4096


def test_graphs_are_measured_by_two_of_them(found: tuple[dict[str, str], list[Any], list[int]]) -> None:
    """For at most 2 sequences and 20 tokens there are four: of 20 and 16 with chunks, of 2 and 1 without. Each model
    has as many."""
    assert found[1] == [30 + 3 * 5 + 4 * 5, 2 * 2, [None, None]]


def test_what_libraries_keep_is_not_for_the_pool() -> None:
    """A workspace for each thread and stream that multiplies, and what the driver keeps of graphs that are gone."""
    users, kept, multiply = set[tuple[int, int]](), list[int](), torch.mm

    def mm(*args: Any) -> torch.Tensor:
        users.add((threading.get_ident(), torch.cuda.current_stream().number))
        return multiply(*args)

    def measured(*_: Any) -> int:
        kept.append(5 * MIB)
        return 7 * MIB

    steps = patch.multiple(memory, run_heaviest_steps=MagicMock(), run_largest_transfers=MagicMock())
    with stand_in(), steps, patch.object(memory, "measure_graphs", measured), patch.object(torch, "mm", mm):
        probe = MagicMock(device=torch.device("cuda", 0), bytes_per_block=MIB)
        in_use = lambda *_: ((1 << 30) - sum(kept) - 8 * MIB * len(users), 1 << 30)  # noqa: E731
        with patch.object(torch.cuda, "mem_get_info", in_use):
            num_blocks = memory.fitting_blocks(probe, MagicMock(), 0.5, torch.cuda.Stream())
    assert len(users) == 3 and num_blocks == 512 - 3 * 8 - 5 - 7


# The stand-in


def test_operands_must_be_on_one_device() -> None:
    with stand_in():
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        assert there.is_cuda and (there + there[0] + torch.tensor(1.0)).tolist() == [3, 3, 3]
        for operation in (lambda: there + here, lambda: there[torch.tensor([1])], lambda: torch.cat((here, there))):
            with pytest.raises(AssertionError, match="on the CPU and on the device"):
                operation()
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()


def test_what_waits_is_counted() -> None:
    with stand_in() as device:
        numbers = torch.arange(4, device="cuda")
        assert device.waits == []
        for operation, downloads in (
            (numbers.tolist, 1),
            (lambda: numbers[1].item(), 0),
            (lambda: numbers[numbers > 1], 0),
            (lambda: torch.ones(2).to("cuda:0", non_blocking=True), 0),  # memory that is not pinned
            (lambda: torch.ones(2).pin_memory().to("cuda:0"), 0),
            (torch.cuda.synchronize, 0),
        ):
            device.waits, device.downloads = [], 0
            operation()
            assert len(device.waits) == 1 and device.downloads == downloads
        device.waits = []
        torch.ones(2).pin_memory().to("cuda:0", non_blocking=True)
        assert not device.waits


def test_memory_that_is_being_copied_must_not_change() -> None:
    with stand_in():
        host, target, copied = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda"), torch.cuda.Event()
        target.copy_(host, non_blocking=True)
        copied.record()
        copied.synchronize()
        host.fill_(2)  # late enough
        target.copy_(host, non_blocking=True)
        copied.record()
        host.fill_(3)
        with pytest.raises(AssertionError, match="overwritten while"):
            copied.synchronize()


def test_a_download_arrives_at_its_event() -> None:
    with stand_in():
        host = torch.zeros(3, pin_memory=True)
        earlier, later = torch.cuda.Event(), torch.cuda.Event()
        earlier.record()
        host.copy_(torch.ones(3, device="cuda"), non_blocking=True)
        later.record()
        earlier.synchronize()
        assert host[0] > 1e30
        later.synchronize()
        assert host.tolist() == [1, 1, 1]


def test_what_another_stream_makes_must_be_waited_for() -> None:
    for waits in (True, False):
        with nullcontext() if waits else pytest.raises(AssertionError, match="nothing orders them"), stand_in():
            uploads, here = torch.cuda.Stream(), torch.cuda.current_stream()
            with torch.cuda.stream(uploads):
                found = torch.ones(3).pin_memory().to("cuda:0", non_blocking=True)
            found.record_stream(here)
            if waits:
                here.wait_stream(uploads)
            assert (found + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_is_not_given_back_while_another_stream_uses_it(recorded: bool) -> None:
    with nullcontext() if recorded else pytest.raises(AssertionError, match="is given back while"), stand_in():
        numbers, other = torch.ones(3, device="cuda"), torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            more = numbers + 1
        if recorded:
            numbers.record_stream(other)
        del numbers
        torch.cuda.current_stream().wait_stream(other)
        assert more.tolist() == [2, 2, 2]


def test_an_early_upload_does_not_queue_behind_a_pass() -> None:
    with stand_in() as device:
        found = to_device_early([1, 2], torch.device("cuda", 0))
        assert isinstance(found, DeviceTensor) and found.memory
        assert found.memory.stream != device.streams.current.number
        assert (found + 1).tolist() == [2, 3] and not device.waits[:-1]


def test_a_graph_repeats_operations_and_not_the_program() -> None:
    with stand_in() as device:
        static, factor, steps = torch.ones(3, device="cuda"), 2, []

        def step() -> torch.Tensor:
            steps.append(1)
            doubled = static * factor
            doubled[1:] += static[:2].flip(0)
            return doubled + 1

        def captured() -> tuple[Any, torch.Tensor]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=None):
                return graph, step()

        (first, result), (second, _) = captured(), captured()
        factor = 100  # too late
        static.copy_(torch.tensor([1.0, 2.0, 3.0]).pin_memory(), non_blocking=True)
        first.replay()
        assert result.tolist() == [3, 7, 8] and len(steps) == 2
        second.replay()
        assert result[0].item() > 1e30  # memory of the first one is free for the second
        assert device.replays == 2


@pytest.mark.parametrize(
    "operation", [lambda x: x.item(), lambda x: x.tolist(), lambda x: x + torch.ones(1).to(x.device)]
)
def test_what_a_graph_cannot_hold(operation: Callable[[torch.Tensor], Any]) -> None:
    with stand_in():
        number = torch.ones(1, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(AssertionError, match="in the capture of a graph"):
            operation(number)
