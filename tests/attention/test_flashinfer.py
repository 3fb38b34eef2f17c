"""FlashInfer as a backend: what its wrappers are given, which are written out, and what a graph holds of them."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM
from kvllm.attention import registry
from kvllm.attention.base import AttentionBatch, HostRows, Recording
from kvllm.attention.registry import make_backend
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.worker.graphs import Step, cuda_capture
from kvllm.worker.last_logits import LastLogits
from kvllm.worker.model_runner import ModelRunner
from tests.helpers import attention_cases, literal_flashinfer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.cuda_stand_in import stand_in
from tests.helpers.engines import greedy, random_prompts
from tests.helpers.literal_flashinfer import Wrapper

FLASHINFER = find_spec("flashinfer")


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Wrapper]]:
    with literal_flashinfer.installed(monkeypatch) as wrapper:
        yield wrapper


def on_the_cpu(case: attention_cases.AttentionCase) -> Any:
    """A backend over a cache on the CPU, which `make_backend` does not allow."""
    backend = import_module("kvllm.attention.flashinfer").FlashInferBackend
    return backend(case.cache, case.queries.shape[1], case.scale, (case.options,))


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("rows", [attention_cases.MIXED, [[600], [0], [255]]], ids=["mixed", "decodes"])
@pytest.mark.parametrize("options", ["plain", "window 1", "window 100", "soft cap", "sinks", "all"])
def test_flashinfer(flashinfer: type[Wrapper], rows: list[list[int]], options: str, block_size: int) -> None:
    case = attention_cases.make_case(rows, block_size=block_size, head_dim=64, group=3)
    case = attention_cases.with_options(case, attention_cases.OPTIONS[options])
    backend = on_the_cpu(case)
    found = backend.run(0, case.queries, backend.plan(case.batch), case.sinks)
    torch.testing.assert_close(found.double(), attention_cases.dense_attention(case), atol=3e-6, rtol=3e-6)


def test_flashinfer_plans_once_for_each_kind_of_layer(flashinfer: type[Wrapper]) -> None:
    """Layers of a kind share a wrapper; two plans that live at once, as those of two parts of KV groups, do not, and
    wrappers of a plan that is gone serve the next one. Sequences have other lengths in the second plan."""
    kinds = [attention_cases.OPTIONS[name] for name in ("plain", "window 5", "plain")]
    cases = [attention_cases.make_case([[length]], head_dim=64) for length in (70, 30)]
    shape = replace(cases[0].cache.shape, num_layers=3)
    cache = PagedKVCache(shape, 12)
    cache.data.normal_()
    backend = import_module("kvllm.attention.flashinfer").FlashInferBackend(cache, 8, 0.125, kinds)
    reference = make_backend("reference", cache, 8, 0.125, kinds)
    batches = [case.batch for case in cases]

    def check_step() -> None:
        plans, expected = [backend.plan(batch) for batch in batches], [reference.plan(batch) for batch in batches]
        for layer in range(3):
            for case, plan, literal in zip(cases, plans, expected, strict=True):
                found = backend.run(layer, case.queries, plan)
                torch.testing.assert_close(found, reference.run(layer, case.queries, literal), atol=3e-6, rtol=3e-6)

    check_step()
    counts = Counter(method for _, method, _, _ in flashinfer.calls)
    assert counts == {"__init__": 4, "plan": 4, "run": 6}
    check_step()
    counts = Counter(method for _, method, _, _ in flashinfer.calls)
    assert counts == {"__init__": 4, "plan": 8, "run": 12}


@cache
def signatures(module: str, name: str) -> dict[str, inspect.Signature]:
    """Those of a class's methods in the source of the installed package, which cannot be imported without CUDA."""
    assert FLASHINFER and FLASHINFER.submodule_search_locations
    tree = ast.parse((Path(FLASHINFER.submodule_search_locations[0]) / f"{module}.py").read_text())
    [definition] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    methods = {node.name: node.args for node in definition.body if isinstance(node, ast.FunctionDef)}  # overloads first
    return {method: signature_of(arguments) for method, arguments in methods.items()}


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    named, parameters = [*arguments.posonlyargs, *arguments.args], []
    required = len(named) - len(arguments.defaults)
    for number, each in enumerate(named):
        default = kinds.empty if number < required else None
        parameters.append(kinds(each.arg, kinds.POSITIONAL_OR_KEYWORD, default=default))
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [kinds(each.arg, kinds.KEYWORD_ONLY, default=None) for each in arguments.kwonlyargs]
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


@pytest.mark.skipif(FLASHINFER is None, reason="needs the package flashinfer-python, or its source")
def test_flashinfer_takes_what_it_is_given(flashinfer: type[Wrapper]) -> None:
    case = attention_cases.make_case(attention_cases.MIXED, head_dim=64)
    case = attention_cases.with_options(case, attention_cases.OPTIONS["all"])
    backend = on_the_cpu(case)
    backend.run(0, case.queries, backend.plan(case.batch), case.sinks)
    decode = AttentionBatch(*(torch.zeros(size, dtype=torch.int32) for size in (2, 1, (1, 4))), recording=Recording())
    decode.query_start_loc[1] = 1
    backend.run(0, case.queries[:1], backend.plan(decode), case.sinks)
    names = {"BatchDecodeWithPagedKVCacheWrapper": "decode", "BatchPrefillWithPagedKVCacheWrapper": "prefill"}
    for name, method, args, options in flashinfer.calls:
        of_class = signatures(names[name], name)
        if method == "plan" and "_plan_impl" in of_class:  # to which `plan` passes everything on
            method = "_plan_impl"
        of_class[method].bind(backend, *args, **options)
    assert {(name, method) for name, method, _, _ in flashinfer.calls} == {
        ("BatchDecodeWithPagedKVCacheWrapper", "reset_workspace_buffer"),
        *((name, method) for name in names for method in ("__init__", "plan", "run")),
    }


# Graphs


def test_a_graph_attends_what_is_planned_before_its_replay(flashinfer: type[Wrapper], monkeypatch: Any) -> None:
    """On the stand-in for a device, where a capture allows neither copies nor waiting, and a replay repeats launches
    alone. Steps have other lengths and blocks; the host waits for none of them; nothing is planned in a capture."""
    kinds = [attention_cases.OPTIONS[name] for name in ("plain", "all", "plain")]
    cache = PagedKVCache(CacheShape(3, 2, 64, 16, torch.float32), 24)
    cache.data.normal_(generator=torch.Generator().manual_seed(1))
    queries = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(2))
    sinks = torch.linspace(-1, 1, 8)
    reference = make_backend("reference", cache, 8, 0.125, kinds)
    steps = [[0, 0, 0], [70, 0, 33], [71, 1, 15], [5, 90, 16], [6, 91, 17]]
    tables = [torch.randperm(24, generator=torch.Generator().manual_seed(i)).int().view(3, 8) for i in range(5)]

    def expected(index: int) -> list[torch.Tensor]:
        batch = AttentionBatch(torch.arange(4, dtype=torch.int32), torch.tensor(steps[index]).int(), tables[index])
        plan = reference.plan(batch)
        return [reference.run(layer, queries, plan, sinks if layer == 1 else None) for layer in range(3)]

    literal = [expected(index) for index in range(5)]
    module, cuda = import_module("kvllm.attention.flashinfer"), torch.device("cuda")
    with stand_in() as device:
        monkeypatch.setattr(flashinfer, "device", device)
        on_device = PagedKVCache(cache.shape, 24, device=cuda)
        on_device.data.copy_(cache.data)
        backend = module.FlashInferBackend(on_device, 8, 0.125, kinds)
        q, s = queries.to(cuda), sinks.to(cuda)
        rows = torch.arange(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        static = [tensor.to(cuda) for tensor in (*rows, tables[0])]
        batch = AttentionBatch(*static, recording=Recording())

        def attend() -> LastLogits:
            plan = backend.plan(batch)
            outputs = [backend.run(layer, q, plan, s if layer == 1 else None) for layer in range(3)]
            return LastLogits(torch.stack(outputs))

        replay = cuda_capture()(attend)
        assert plans_of(flashinfer) == 2
        device.waits, found = [], [replay().logits.clone()]
        for index in range(1, 5):
            last = torch.tensor(steps[index]).int()
            static[1].copy_(last.pin_memory(), non_blocking=True)
            static[2].copy_(tables[index].pin_memory(), non_blocking=True)
            backend.before_replay(replace(batch, on_host=HostRows(rows[0].numpy(), last.numpy())))
            found.append(replay().logits.clone())
        assert device.waits == []
        for outputs, like in zip(found, literal, strict=True):
            torch.testing.assert_close(list(outputs.cpu()), like, atol=3e-6, rtol=3e-6)
        counts = Counter(method for _, method, _, _ in flashinfer.calls)
        assert counts == {"__init__": 2, "reset_workspace_buffer": 2, "plan": 2 + 4 * 2, "run": 6}


def test_partial_results_of_many_sequences_have_room(flashinfer: type[Wrapper]) -> None:
    """A graph takes a tile of 16 query heads for each sequence and head: 640 sequences of 32 heads of 128 channels have
    more partial results than what the library recommends for others."""
    cache = PagedKVCache(CacheShape(1, 8, 128, 16, torch.bfloat16), 4)
    backend = import_module("kvllm.attention.flashinfer").FlashInferBackend(cache, 32, 0.1)
    for num_seqs in (640, 2):
        ints = [torch.zeros(size, dtype=torch.int32) for size in ((num_seqs,), (num_seqs, 2))]
        batch = AttentionBatch(torch.arange(num_seqs + 1, dtype=torch.int32), *ints, recording=Recording())
        [plan] = backend.plan(batch)
        backend._planned(plan, backend.layers[0])
    workspaces = [len(args[0]) for _, method, args, _ in flashinfer.calls if method == "__init__"]
    tiles = 640 * 4 // 16 + 639
    assert workspaces[0] == workspaces[1] >= 32 * tiles * 16 * (128 + 1) * 4 > 128 << 20


@pytest.mark.parametrize("method", [None, "keydiff"])
def test_recorded_steps_of_an_engine(flashinfer: type[Wrapper], monkeypatch: Any, tmp_path: Path, method: Any) -> None:
    """Layers with windows and without, in several parts of KV groups, batches of every size, and events in between. A
    recording is the step itself, and plans nothing. What is planned lies at one place for each part, whatever the size.
    """
    types = ["full_attention" if layer in (1, 4) else "sliding_attention" for layer in range(5)]
    make_checkpoint(
        tmp_path,
        "qwen3",
        head_dim=16,
        num_hidden_layers=5,
        use_sliding_window=True,
        sliding_window=20,
        layer_types=types,
    )
    entry = registry.Entry("kvllm.attention.flashinfer", "FlashInferBackend", lambda case: None)
    monkeypatch.setitem(registry.BACKENDS, "flashinfer", entry)
    compression = paper_compression(method=method, period=4, window_blocks=2, buffer=4) if method else None
    options: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 200, "max_num_seqs": 5}
    found = []
    for backend in ("cpu", "flashinfer"):
        llm = LLM(
            tmp_path, attention_backend=backend, device="cpu", max_model_len=128, compression=compression, **options
        )
        if backend == "flashinfer":
            replayed = record(llm.llm_engine.executor.runner, flashinfer)
        prompts = random_prompts(256, (1, 9, 33, 20, 5, 17))
        outputs = llm.generate(prompts, [greedy(30 + 5 * i) for i in range(6)], use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert (llm.stats().compression_events >= 3) == bool(method)
    assert found[0] == found[1] and len(replayed) > 30
    plans = [id(args[1]) for _, method, args, _ in flashinfer.calls if method == "reset_workspace_buffer"]
    assert len(plans) == 3 * 4 and len({*plans}) == 3  # a part without windows and two with them, four sizes


def record(runner: ModelRunner, library: type[Wrapper]) -> list[int]:
    """Let a runner record its steps -> the number of plans that the library has made, at each replay."""
    replayed: list[int] = []

    def capture(step: Step) -> Step:
        step()  # as a capture does, to compile what it holds

        def replay() -> LastLogits:
            before = plans_of(library)
            last = step()
            assert plans_of(library) == before
            replayed.append(before)
            return last

        return replay

    runner.forward_pass.use_graphs(capture, runner.cache.num_blocks)
    assert runner.forward_pass.graphs
    return replayed


def plans_of(library: type[Wrapper]) -> int:
    return sum(method == "plan" for _, method, _, _ in library.calls)
