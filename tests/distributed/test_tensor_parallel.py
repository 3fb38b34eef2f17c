"""Tensor parallelism: equal tokens and survivors on any number of ranks, and workers that die, hang and fail.

The ranks run in real Ray actors, in a cluster of two nodes on this machine. What survives a compression is compared on
real runners in threads of this process, where it can be seen.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from kvllm import LLM, CheckpointError, CompressionConfig, ConfigError, SamplingParams
from kvllm.compression.registry import METHODS
from kvllm.config import LayerGroup
from kvllm.core.protocol import StepPlan, StepResult, TransferReport, decode_plan, encode
from kvllm.core.sequence import PENDING
from kvllm.distributed import worker_group
from kvllm.distributed.faults import HangDetector
from kvllm.distributed.rank import RankSpec
from kvllm.distributed.results import TransfersOfRanks
from kvllm.distributed.results import merge as merge_results
from kvllm.distributed.shared_memory import BUFFER_BYTES, SharedMemoryShard
from kvllm.distributed.worker_group import WorkerGroup
from kvllm.errors import WorkerError
from kvllm.lora.request import LoRARequest
from kvllm.models.layers import LMHead, VocabEmbedding
from kvllm.models.weights import Packing
from kvllm.parallel import Shard, SingleRank
from kvllm.worker.draws import NO_TOKEN, most_likely
from kvllm.worker.launched import Launched
from kvllm.worker.logit_parts import LogitParts
from tests.helpers.adapters import copied, make_adapter, merge
from tests.helpers.checkpoints import add_method_files, make_checkpoint
from tests.helpers.compressions import fitting, paper_compression
from tests.helpers.engines import greedy, make_llm, random_prompts, random_token_ids, tokens
from tests.helpers.thread_executor import ThreadExecutor, on_threads, shared_memory_shards
from tests.helpers.waiting import wait_until
from tests.worker.test_methods_engine import methods

ray = pytest.importorskip("ray", reason="needs ray: pip install ray")
pytestmark = pytest.mark.xdist_group("ray")

FAMILIES = {"qwen3": {"head_dim": 16}, "llama": {"tie_word_embeddings": True, "vocab_size": 257}}
KARA = paper_compression(method="kara", period=8, window_blocks=3, retain_blocks=1, buffer=4, chunk_budget=4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in paths.items():
        make_checkpoint(path, family, **FAMILIES[family])
    add_method_files(paths["qwen3"])
    return paths


@pytest.fixture
def ray_llm(ray_cluster) -> Iterator[Callable[..., LLM]]:
    """Makes an LLM on Ray; its workers end with the test."""
    made: list[LLM] = []

    def make(path: Path, ranks: int = 2, **options: Any) -> LLM:
        made.append(make_llm(path, tensor_parallel_size=ranks, distributed_executor_backend="ray", **options))
        return made[-1]

    yield make
    for llm in made:
        llm.llm_engine.close()


@pytest.mark.long
def test_the_choice_of_ranks_is_logged_where_the_engine_is(
    ray_llm: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Standard error of ranks goes nowhere. A rank has half of the heads: 65, more than operators share a KV head
    among."""
    heads = {"num_attention_heads": 130, "num_key_value_heads": 2, "head_dim": 4}
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, **heads)
    with caplog.at_level(logging.INFO, "kvllm"):
        ray_llm(tmp_path, attention_backend="auto")
    started, *warnings = [each.getMessage() for each in caplog.records if each.name == "kvllm.start_report"]
    reason = "reference (cpu shares a KV head among at most 64 query heads, the model has 65"
    assert f"attention backend {reason}" in started
    assert any(f"leaves {reason}" in warning for warning in warnings)


# The whole life, without a cluster to join


SCRIPT = """
import signal, sys
from kvllm import LLM, SamplingParams
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    llm = LLM(sys.argv[1], block_size=16, num_gpu_blocks_override=400, **{sys.argv[2]: 2})
    workers = llm.llm_engine.executor if sys.argv[2] == "tensor_parallel_size" else llm.llm_engine.replicas
    print(*workers.pids, flush=True)
    while True:
        llm.generate([[5]] * 8, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for a Ray of one's own, whose sockets must not have long names."""
    with tempfile.TemporaryDirectory(prefix="kvllm", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("end", "size"),
    [
        pytest.param(signal.SIGINT, "tensor_parallel_size", marks=pytest.mark.long, id="Ctrl-C"),
        pytest.param(signal.SIGKILL, "data_parallel_size", id="killed"),
    ],
)
def test_nothing_is_left_when_the_engine_is_ended(
    checkpoints, short_path: Path, end: signal.Signals, size: str
) -> None:
    """In a process of its own, which starts its own Ray: it finds none in its directory for temporary files."""
    script = short_path / "script.py"
    script.write_text(SCRIPT)
    memory = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, script, checkpoints["qwen3"], size],
        env=os.environ | {"TMPDIR": str(short_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout
        ranks = [int(pid) for pid in process.stdout.readline().split()]
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) == 2 and {*ranks} <= {each.pid for each in family}
        time.sleep(0.3)
        os.killpg(process.pid, end)  # a terminal, too, signals the whole group
        process.wait(120)
    finally:
        process.kill()
        process.stdout.close()
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert not alive and len(gone) == len(family)
    assert set(os.listdir("/dev/shm")) <= memory


# Collectives


@pytest.fixture
def shards() -> Iterator[Callable[..., list[SharedMemoryShard]]]:
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(shared_memory_shards(*args, **options))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_in_shared_memory(shards, world_size: int, dtype: torch.dtype) -> None:
    """Sums in the order of the ranks, bit for bit; sizes of one value up to several buffers, one call upon another."""
    several_buffers = 5 * BUFFER_BYTES // dtype.itemsize // 2 + 3
    shapes = [(1, 1), (3, 7), (1, several_buffers), (2, 5), (3, several_buffers // 3)] * 3
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(world_size, *shape, generator=generator).to(dtype) for shape in shapes]
    members = shards(world_size)

    def run(rank: int) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        shard = members[rank]
        return [
            (shard.all_gather_last_dim(own := each[rank]), shard.gather(own), shard.all_reduce(own.clone()))
            for each in inputs
        ]

    for rank, results in enumerate(on_threads(world_size, run)):
        for each, (gathered, on_first, reduced) in zip(inputs, results, strict=True):
            assert torch.equal(gathered, torch.cat(list(each), dim=-1))
            assert on_first is None if rank else torch.equal(on_first, each)
            expected = each[0].clone()
            for other in each[1:]:
                expected += other
            assert torch.equal(reduced, expected)


@pytest.mark.parametrize(("ranks", "vocab_size"), [(2, 40), (3, 40), (4, 5)])
def test_ranks_know_the_most_likely_tokens_of_all_parts(shards, ranks: int, vocab_size: int) -> None:
    """The first of equal logits, and none where one is not finite. Four ranks with two tokens each leave the last
    without any of five."""
    generator = torch.Generator().manual_seed(0)
    matrix, hidden = (torch.randint(-2, 3, (n, 8), generator=generator).float() for n in (vocab_size, 30))
    hidden[3], hidden[4] = math.nan, math.inf
    logits, members = hidden @ matrix.T, shards(ranks)

    def run(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        embedding = VocabEmbedding(vocab_size, 8, members[rank], torch.float32, torch.device("cpu"))
        head = LMHead(embedding, tied=True, shard=members[rank])
        head.allocate(Packing())
        [weight] = embedding.weights("").values()
        for first, last in weight.strips():
            weight.write(first, matrix[weight.rows(first, last)])
        parts, part = LogitParts(head), head.forward(hidden)
        return parts.most_likely(part), [parts.gather(part, rows) for rows in ([], [1, 29], range(30))]

    for rank, (chosen, (none, some, every)) in enumerate(on_threads(ranks, run)):
        assert chosen.tolist() == most_likely(logits).tolist() and chosen[3] == chosen[4] == NO_TOKEN
        assert none.shape == (0, vocab_size) and (rank == 0) == (len(some) == len(every) == 30)
        if rank == 0:
            assert torch.equal(some[[1, 29]], logits[[1, 29]])
            torch.testing.assert_close(every, logits, rtol=0, atol=0, equal_nan=True)


def test_a_collective_does_not_wait_for_ever(shards) -> None:
    shard = shards(2, timeout=0.2)[0]
    with pytest.raises(WorkerError, match=r"rank 0 has waited 0\.2 s for rank 1"):
        shard.all_reduce(torch.ones(3))


# What survives


def compression_of(method: str) -> CompressionConfig:
    options: dict[str, Any] = {"buffer": 4, "chunk_budget": 4, "query_window": 6, "period": 8, "window_blocks": 3}
    policy = "threshold" if METHODS[method].spec.ragged else "periodic"
    return CompressionConfig(**fitting(method, policy, threshold_tokens=44, budget_tokens=25, **options))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", methods(METHODS))
def test_every_method_keeps_on_all_ranks_what_it_keeps_on_one(checkpoints, shards, method: str, ranks: int) -> None:
    """On four ranks, two hold each KV head, with half of its query heads each."""
    path = checkpoints["qwen3"]
    prompts = random_prompts(256, lengths=(1, 17, 40, 63))

    def run(members: list[Shard]) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
        llm = make_llm(path, block_size=8, compression=compression_of(method), num_gpu_blocks_override=100)
        llm.llm_engine.executor = executor = ThreadExecutor(llm, path, members)
        return tokens(llm, prompts, greedy(60)), executor.kept

    expected_tokens, (expected,) = run([SingleRank()])
    found_tokens, kept = run(shards(ranks))
    assert sum(map(len, expected)) >= 6 or method == "sliding_window"  # which lets blocks go, and chooses nothing
    for of_ranks, of_one in zip(zip(*kept, strict=True), expected, strict=True):
        replicas = ranks * of_ranks[0].shape[1] // of_one.shape[1]
        for replica in range(replicas):
            assert torch.equal(torch.cat(of_ranks[replica::replicas], dim=1), of_one)
    assert found_tokens == expected_tokens


@pytest.mark.parametrize("groups", [(), (LayerGroup((1,), 1), LayerGroup((2,), 2))], ids=["one", "two"])
def test_ranks_have_the_same_kv_groups(shards, tmp_path: Path, groups: tuple[LayerGroup, ...]) -> None:
    """Layers with a window release their blocks on all ranks, and the others are compressed alike."""
    types = ["sliding_attention", "full_attention", "full_attention" if groups else "sliding_attention"]
    options = {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "layer_types": types}
    make_checkpoint(tmp_path, "qwen3", **options)

    def run(members: list[Shard]) -> list[list[int]]:
        compression = structs.replace(compression_of("mean_attention" if groups else "keydiff"), layer_groups=groups)
        llm = make_llm(tmp_path, block_size=8, compression=compression, num_gpu_blocks_override=60)
        llm.llm_engine.executor = ThreadExecutor(llm, tmp_path, members)
        found = tokens(llm, random_prompts(256, lengths=(1, 17, 40, 63)), greedy(60))
        assert llm.stats().windows_compressed > 0
        return found

    assert run(shards(2)) == run([SingleRank()])


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int6_int4", "int6_int4_hadamard"])
def test_ranks_quantize_alike(shards, tmp_path: Path, kv_cache_dtype: str) -> None:
    """A scale belongs to one head, so no rank needs to know of another's."""
    make_checkpoint(tmp_path, "qwen3", head_dim=32)
    compression = compression_of("mean_attention")

    def run(members: list[Shard]) -> list[list[int]]:
        llm = make_llm(tmp_path, kv_cache_dtype=kv_cache_dtype, compression=compression, num_gpu_blocks_override=60)
        llm.llm_engine.executor = ThreadExecutor(llm, tmp_path, members)
        found = tokens(llm, random_prompts(256, lengths=(1, 17, 40)), greedy(60))
        assert llm.stats().windows_compressed > 0
        return found

    assert run(shards(2)) == run([SingleRank()])


class PlannedAhead(ThreadExecutor):
    """Ranks that get a plan before the tokens of the one before are collected. ahead: how many have PENDING ones."""

    fills_pending = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ahead = 0
        self._in_flight = deque[list[Launched]]()

    def launch(self, plan: StepPlan) -> None:
        self.ahead += PENDING in plan.decodes.token_ids
        encoded = encode(plan)
        self._in_flight.append(
            on_threads(len(self.runners), lambda rank: self.runners[rank].launch(decode_plan(encoded)))
        )

    def collect(self) -> StepResult:
        return merge_results([step.result() for step in self._in_flight.popleft()], self.transfers)


@pytest.mark.parametrize("compression", [None, KARA], ids=["none", "kara"])
def test_ranks_give_each_other_tokens_for_a_plan_ahead(checkpoints, shards, compression: Any) -> None:
    """Of forks, of draws with penalties, and in windows whose queries all ranks compute again. Of logits, they give
    those that are drawn from."""
    path, prompts = checkpoints["qwen3"], random_prompts(256, lengths=(1, 17, 40, 63))
    members, gathered = shards(2), list[torch.Tensor]()
    gather, members[1].gather = members[1].gather, lambda part: gathered.append(part) or gather(part)
    drawn = SamplingParams(n=2, seed=7, temperature=0.7, max_tokens=60, ignore_eos=True)
    params = [greedy(50), drawn, greedy(60), structs.replace(drawn, repetition_penalty=1.2)]

    def run(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert bool(llm.stats().windows_compressed) == (compression is not None)
        return [each.token_ids for output in outputs for each in output.outputs]

    options = {"compression": compression, "num_gpu_blocks_override": 60}
    llm = make_llm(path, async_scheduling=True, **options)
    llm.llm_engine.executor = executor = PlannedAhead(llm, path, members)
    assert run(llm) == run(make_llm(path, **options))
    assert executor.ahead > 40 and sum(map(len, gathered)) == 2 * 2 * 60
    texts = [[state.token_ids for state in runner.states.values()] for runner in executor.runners]
    assert texts[0] == texts[1]


def test_ranks_verify_drafts_and_report_prompts(checkpoints, shards) -> None:
    """Of requests that take the most likely tokens, and of others."""
    path = checkpoints["qwen3"]
    prompts = [{"prompt_token_ids": [3 + token % 5 for token in each]} for each in random_token_ids(60, 40, 7)]
    drawn = SamplingParams(temperature=0.4, seed=1, max_tokens=50, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    params = [greedy(60), drawn, structs.replace(greedy(50), repetition_penalty=1.1)]
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

    def run(members: list[Shard]) -> list[tuple[Any, ...]]:
        llm = make_llm(path, speculative_config=ngram, num_gpu_blocks_override=60)
        llm.llm_engine.scheduler.speculation.cost = None
        llm.llm_engine.executor = ThreadExecutor(llm, path, members)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert 0 < sum(llm.stats().drafts.right) < llm.stats().drafts.tokens
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in outputs]

    found, expected = run(shards(2)), run([SingleRank()])
    assert [each[0] for each in found] == [each[0] for each in expected]
    assert found[1][1] and found[1][2] and len(found[1][2]) == len(expected[1][2]) == 40
    for of_two, of_one in zip(found[1][2][1:], expected[1][2][1:], strict=True):
        assert {key: each.logprob for key, each in of_two.items()} == pytest.approx(
            {key: each.logprob for key, each in of_one.items()}, abs=1e-4
        )


RECALL: dict[str, Any] = {"num_gpu_blocks_override": 28, "block_size": 8, "watermark": 0.0}
RECALL |= {"kv_offloading_size": 0.02, "swap": "always", "max_num_batched_tokens": 64, "max_num_seqs": 8}


def recalling(policy: str) -> CompressionConfig:
    sizes = {"window_blocks": 3, "period": 8} if policy == "periodic" else {"threshold_tokens": 60, "budget_tokens": 40}
    return paper_compression(method="keydiff", policy=policy, buffer=4, recall_bound=0.05, recall_chunks=1, **sizes)


def recalled(llm: LLM) -> tuple[list[list[int]], list[float]]:
    """Tokens, and the largest bounds on what is missing."""
    outputs = llm.generate(random_prompts(256, (3, 17, 40, 63, 30)), greedy(60), use_tqdm=False)
    assert llm.stats().recalled_bytes > 0 < llm.stats().windows_compressed
    return [each.outputs[0].token_ids for each in outputs], [each.metrics.missing_mass_max or 0 for each in outputs]


@pytest.mark.parametrize("policy", ["periodic", "threshold"])
def test_pairs_come_back_on_two_ranks_as_on_one(checkpoints, shards, policy: str) -> None:
    """Each head chooses for itself; the bound is that of all heads. With sequences that are swapped between."""
    found = []
    for members in ([SingleRank()], shards(2)):
        llm = make_llm(checkpoints["qwen3"], compression=recalling(policy), **RECALL)
        llm.llm_engine.executor = ThreadExecutor(llm, checkpoints["qwen3"], members)
        found.append((*recalled(llm), llm.stats().recalled_bytes))
        assert llm.stats().swapped_in > 0
    (tokens_of_one, bounds_of_one, bytes_of_one), (tokens_of_two, bounds_of_two, bytes_of_two) = found
    assert tokens_of_two == tokens_of_one and bytes_of_two == bytes_of_one
    assert bounds_of_two == pytest.approx(bounds_of_one, abs=1e-4) and max(bounds_of_one) > 0.05


# Ray


@pytest.mark.parametrize(
    ("family", "compression"),
    [
        ("qwen3", KARA),
        ("llama", KARA),
        ("llama", None),
        ("qwen3", None),
    ],
)
@pytest.mark.long
def test_two_ranks_give_the_tokens_of_one(ray_llm, checkpoints, family: str, compression) -> None:
    prompts = random_prompts(256)
    expected = tokens(make_llm(checkpoints[family], compression=compression), prompts)
    llm = ray_llm(checkpoints[family], compression=compression)
    assert tokens(llm, prompts) == expected
    assert (llm.stats().windows_compressed > 0) == (compression is not None)


def test_two_ranks_hold_parts_of_adapters(ray_llm, checkpoints, tmp_path: Path) -> None:
    """Tokens are those of merged weights. One that cannot be read ends its request alone, on all ranks."""
    path = checkpoints["llama"]
    adapters = [make_adapter(tmp_path / str(seed), path, rank=4 + seed, seed=seed) for seed in range(2)]
    requests = [LoRARequest(each.name, 1, str(each)) for each in adapters]
    prompts = random_prompts(256, lengths=(40, 17))
    llm = ray_llm(path, enable_lora=True, max_loras=2)
    outputs = llm.generate([*prompts, prompts[0]], greedy(30), use_tqdm=False, lora_request=[*requests, None])
    models = [*(merge(tmp_path / f"{each.name}-merged", path, each) for each in adapters), path]
    for model, prompt, output in zip(models, [*prompts, prompts[0]], outputs, strict=True):
        assert [output.outputs[0].token_ids] == tokens(make_llm(model), [prompt], greedy(30))
    lost = copied(adapters[0], tmp_path / "lost", lora_alpha=3)
    engine = llm.llm_engine
    bad = engine.add_request("bad", prompts[0], greedy(9), lora_request=LoRARequest("lost", 3, str(lost)))
    good = engine.add_request("good", prompts[1], greedy(30), lora_request=requests[1])
    (lost / "adapter_config.json").unlink()
    while engine.has_unfinished_requests():
        engine.step()
    assert "the adapter 'lost' cannot be read" in str(bad.error)
    assert good.outputs[0].token_ids == outputs[1].outputs[0].token_ids


@pytest.mark.long
def test_four_ranks_with_two_kv_heads(ray_llm, checkpoints) -> None:
    prompts = random_prompts(256, lengths=(1, 17, 63))
    expected = tokens(make_llm(checkpoints["qwen3"], compression=KARA), prompts)
    llm = ray_llm(checkpoints["qwen3"], ranks=4, compression=KARA, async_scheduling=True)
    assert tokens(llm, prompts) == expected


def test_ranks_on_two_nodes(ray_llm, checkpoints, monkeypatch) -> None:
    """They meet over gloo. One on the other node that hangs is ended too."""
    prompts = random_prompts(256, lengths=(1, 17, 63))
    expected = tokens(make_llm(checkpoints["qwen3"], compression=KARA), prompts)
    llm = ray_llm(checkpoints["qwen3"], compression=KARA, placement_strategy="STRICT_SPREAD")
    assert tokens(llm, prompts) == expected
    stopped = llm.llm_engine.executor.pids[1]
    monkeypatch.setattr(worker_group, "SILENCE_SECONDS", 5.0)
    os.kill(stopped, signal.SIGSTOP)
    assert all(len(found) == 60 for found in tokens(llm, prompts, greedy(60)))
    wait_until(lambda: not psutil.pid_exists(stopped), "the stopped rank's end")


def test_sampling_and_pool_size(ray_llm, checkpoints) -> None:
    """Without a size for the pool, the ranks agree on one."""
    options = {"num_gpu_blocks_override": None, "max_num_seqs": 8}
    params = SamplingParams(n=2, seed=3, temperature=0.8, top_p=0.9, logprobs=2, max_tokens=20, ignore_eos=True)

    def sample(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(random_prompts(256), params, use_tqdm=False)
        return [completion.token_ids for output in outputs for completion in output.outputs]

    llm = ray_llm(checkpoints["qwen3"], **options)
    assert llm.config.num_blocks == 8 * 512 // 16  # more than sequences fill is never wanted
    assert sample(llm) == sample(make_llm(checkpoints["qwen3"], **options))


# Faults


def test_requests_survive_workers_that_die_and_hang(ray_llm, checkpoints, monkeypatch, caplog, pytestconfig) -> None:
    """When a rank is stopped, the other waits for it, and its heartbeats say that it has got no further. Steps are
    planned while the one before them may be lost. Long: then the other rank is killed."""
    monkeypatch.setattr(worker_group, "STANDSTILL_SECONDS", 2.5)
    rng = random.Random(0)
    prompts = random_prompts(256, lengths=[rng.randrange(1, 60) for _ in range(32)])
    params = [greedy(40 + i) for i in range(32)]
    expected = [
        output.outputs[0].token_ids
        for output in make_llm(checkpoints["qwen3"]).generate(prompts, params, use_tqdm=False)
    ]
    llm = ray_llm(checkpoints["qwen3"], async_scheduling=True)
    engine, executor = llm.llm_engine, llm.llm_engine.executor
    launch, ahead = executor.launch, list[bool]()
    executor.launch = lambda plan: ahead.append(PENDING in plan.decodes.token_ids) or launch(plan)
    outputs = [engine.add_request(str(i), prompt, params[i]) for i, prompt in enumerate(prompts)]
    faults = [(rng.randrange(3, 15), signal.SIGKILL, 1), (rng.randrange(20, 30), signal.SIGSTOP, 0)]
    faults += [(rng.randrange(35, 45), signal.SIGKILL, 0)] * pytestconfig.getoption("long")
    expected_restarts = len(faults)
    while engine.has_unfinished_requests():
        if faults and llm.stats().steps >= faults[0][0]:
            _, number, rank = faults.pop(0)
            threading.Timer(rng.random() / 100, os.kill, (executor.pids[rank], number)).start()
        engine.step()
    assert not faults and len(executor.restart_seconds) >= expected_restarts  # more where a busy machine stops a rank
    assert "hangs: no progress for 2.5 s" in caplog.text and sum(ahead) > 20
    assert [output.outputs[0].token_ids for output in outputs] == expected
    engine.scheduler.check()
    assert tokens(llm, prompts[:4], greedy(40)) == [found[:40] for found in expected[:4]]


def test_a_heartbeat_alone_is_no_progress() -> None:
    watch = HangDetector(silence=5, standstill=60, now=0)
    for second in range(50):
        watch.hear(second, b"7")
    assert watch.complaint(54) is None
    assert watch.complaint(55) == "hangs: silent for 5 s"
    for second in range(50, 100):
        watch.hear(second, str(second // 30).encode())
    assert watch.complaint(100) is None
    for second in range(100, 151):
        watch.hear(second, b"3")
        assert watch.complaint(second) is None
    watch.hear(152, b"3")
    assert watch.complaint(152) == "hangs: no progress for 60 s"
    watch.hear(153)
    assert watch.complaint(153) is None


def test_the_budget_of_restarts_ends_with_the_workers_traceback(ray_llm, checkpoints) -> None:
    llm = ray_llm(checkpoints["qwen3"], ranks=1, max_worker_restarts=1)
    engine = llm.llm_engine
    output = engine.add_request("broken", [5], greedy(3))
    for token_ids in (output.prompt_token_ids, engine.outputs.requests["broken"].sequences[0].token_ids):
        token_ids[0] = 10**6  # behind the door, which checks this: the embedding has no such row
    with pytest.raises(WorkerError, match=r"(?s)again after 1 restarts.*index out of range"):
        while engine.has_unfinished_requests():
            engine.step()
    engine.abort("broken")
    with pytest.raises(WorkerError, match="again after 1 restarts"):
        llm.generate([[5]], use_tqdm=False)
    assert not engine.has_unfinished_requests()


def test_logits_that_are_not_finite_end_requests_and_no_worker(ray_llm, checkpoints, tmp_path: Path) -> None:
    for file in checkpoints["qwen3"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = ray_llm(tmp_path, ranks=1, max_worker_restarts=0)
    for _ in range(2):
        outputs = llm.generate([[5], [6]], use_tqdm=False)
        assert all("logits are not finite" in str(output.error) for output in outputs)


def test_an_interrupted_step_loses_no_request(ray_llm, checkpoints, monkeypatch) -> None:
    """Ctrl-C between plan and result, then before every rank has the plan, which is one ahead."""
    expected = tokens(make_llm(checkpoints["qwen3"]), random_prompts(256, lengths=(3, 20)), greedy(12))
    engine = ray_llm(checkpoints["qwen3"], enable_prefix_caching=False, async_scheduling=True).llm_engine
    for all_have_it in (True, False):
        interrupt_a_step(engine, monkeypatch, expected, all_have_it=all_have_it)
        assert len(engine.executor.restart_seconds) == (0 if all_have_it else 1)


def interrupt_a_step(engine, monkeypatch, expected: list[list[int]], *, all_have_it: bool) -> None:
    outputs = [engine.add_request(str(i), p, greedy(12)) for i, p in enumerate(random_prompts(256, lengths=(3, 20)))]
    engine.step()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    pool = engine.executor._groups[0]
    with monkeypatch.context() as patch:
        patch.setattr(*((pool, "_receive") if all_have_it else (pool._channels[1], "send")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert [output.outputs[0].token_ids for output in outputs] == expected


# Errors and leftovers


def test_connections_that_are_no_ranks_are_dropped(ray_llm, checkpoints, monkeypatch) -> None:
    """A scan of ports ended the start, and a restart with it."""
    start = WorkerGroup._start_rank

    def start_after_a_scan(group: WorkerGroup, spec: RankSpec, bundle: Any) -> None:
        socket.create_connection(spec.address).close()
        start(group, spec, bundle)

    monkeypatch.setattr(WorkerGroup, "_start_rank", start_after_a_scan)
    llm = ray_llm(checkpoints["qwen3"], ranks=1)
    prompts = random_prompts(256, lengths=(5,))
    assert tokens(llm, prompts) == tokens(make_llm(checkpoints["qwen3"]), prompts)


def test_errors_of_a_rank_are_the_callers(ray_llm, checkpoints, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoints["qwen3"] / "config.json").read_text())
    with pytest.raises(CheckpointError, match="has no weights"):
        ray_llm(tmp_path, ranks=1)


def test_more_ranks_than_the_cluster_holds(ray_llm, checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8 needs as many CPUs on one node .* have 4, 1"):
        ray_llm(checkpoints["qwen3"], ranks=8)


def test_the_device_of_ranks(ray_llm, checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few GPUs are an error, and CPUs take their place only where they are asked for."""
    with pytest.raises(ConfigError, match='needs as many GPUs on one node .* have 0, 0. device="cpu" runs ranks'):
        ray_llm(checkpoints["qwen3"], ranks=2, device="cuda")
    resources = ray.cluster_resources() | {"GPU": 1.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 needs as many GPUs"):
        ray_llm(checkpoints["qwen3"], ranks=2)
    assert ray_llm(checkpoints["qwen3"], ranks=1, device="cpu").llm_engine.executor.device == "cpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 .* divisor of the model's 2 KV heads, or a multiple"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size=16 .* divisor of the model's 8 query heads"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "inline"}, 'one rank.*=2 .*: use "ray" or None'),
        ({"distributed_executor_backend": "mp"}, "choose one of inline, ray, None"),
        ({"placement_strategy": "pack"}, "choose one of STRICT_PACK, PACK, SPREAD, STRICT_SPREAD"),
        ({"max_worker_restarts": -1}, "max_worker_restarts=-1 is not allowed: at least 0"),
    ],
    ids=str,
)
def test_wrong_options(checkpoints, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoints["qwen3"], **options)


def test_without_ray_the_error_says_what_to_install(checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvllm.distributed")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'needs Ray, which is not installed: pip install "kvllm\[ray\]"'):
        LLM(checkpoints["qwen3"], tensor_parallel_size=2)
    assert LLM(checkpoints["qwen3"], tensor_parallel_size=1, num_gpu_blocks_override=4)


def our_memory() -> list[int]:
    """Processes started from here that have the shared memory of a group open."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        if "memfd:kvllm" in maps:
            found.append(process.pid)
    return found


@pytest.mark.parametrize("end", [pytest.param("close", marks=pytest.mark.long), "garbage"])
def test_nothing_is_left_of_a_pool(ray_llm, checkpoints, end: str) -> None:
    first = make_llm(checkpoints["qwen3"], tensor_parallel_size=2)  # the first pool makes Ray open sockets
    pids = first.llm_engine.executor.pids
    first.llm_engine.close()
    assert not any(map(psutil.pid_exists, pids))
    gc.collect()
    sockets_before, memory_before = len(psutil.Process().net_connections()), set(our_memory())
    free_before = ray.available_resources()["CPU"]
    llm = make_llm(checkpoints["qwen3"], tensor_parallel_size=2)
    tokens(llm, random_prompts(256, lengths=(3,)), greedy(3))
    pids = llm.llm_engine.executor.pids
    assert set(our_memory()) - memory_before == set(pids) and all(map(psutil.pid_exists, pids))
    assert len(psutil.Process().net_connections()) > sockets_before
    if end == "close":
        llm.llm_engine.close()
        llm.llm_engine.close()
    else:
        del llm
        gc.collect()
    assert not any(map(psutil.pid_exists, pids))
    assert set(our_memory()) == memory_before
    wait_until(lambda: len(psutil.Process().net_connections()) <= sockets_before, "the sockets' end")
    wait_until(lambda: ray.available_resources().get("CPU") == free_before, "the CPUs' return")
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


# Blocks on the host


def test_two_ranks_swap_their_heads(ray_llm, checkpoints) -> None:
    """Each to host memory of its own, of which both together have as many bytes as one rank would."""
    options = {"num_gpu_blocks_override": 24, "block_size": 8, "watermark": 0.0}
    options |= {"kv_offloading_size": 0.01, "swap": "always"}
    prompts = random_prompts(256, (3, 17, 40, 63, 30))
    expected = tokens(make_llm(checkpoints["qwen3"]), prompts, greedy(60))
    llm = ray_llm(checkpoints["qwen3"], **options)
    assert llm.config.num_host_blocks == make_llm(checkpoints["qwen3"], **options).config.num_host_blocks
    assert tokens(llm, prompts, greedy(60)) == expected
    assert llm.stats().swapped_in == llm.stats().preemptions > 0


@pytest.mark.long
def test_what_is_on_the_host_is_computed_again_when_a_rank_dies(ray_llm, checkpoints, tmp_path: Path) -> None:
    """Each rank that starts again finds its part of the disk."""
    options = {"num_gpu_blocks_override": 24, "block_size": 8, "watermark": 0.0, "kv_offloading_size": 0.01}
    options |= {"swap": "always", "kv_offloading_path": str(tmp_path)}
    prompts = random_prompts(256, (3, 17, 40, 63, 30))
    expected = tokens(make_llm(checkpoints["qwen3"]), prompts, greedy(60))
    llm = ray_llm(checkpoints["qwen3"], **options)
    engine = llm.llm_engine
    outputs = [engine.add_request(str(i), prompt, greedy(60)) for i, prompt in enumerate(prompts)]
    while engine.stats.swapped_out == engine.stats.swapped_in:
        engine.step()
    os.kill(engine.executor.pids[1], signal.SIGKILL)
    while engine.has_unfinished_requests():
        engine.step()
        engine.scheduler.check()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(engine.executor.restart_seconds) >= 1 and engine.stats.swapped_out > engine.stats.swapped_in
    before = engine.stats.prefix_host_hits
    assert tokens(llm, prompts, greedy(60)) == expected and engine.stats.prefix_host_hits > before


@pytest.mark.long
def test_two_ranks_recall_as_one(ray_llm, checkpoints) -> None:
    options = RECALL | {"compression": recalling("periodic")}
    one = make_llm(checkpoints["qwen3"], **options)
    two = ray_llm(checkpoints["qwen3"], **options)
    expected, bounds = recalled(one)
    assert recalled(two) == (expected, pytest.approx(bounds, abs=1e-4))
    assert two.stats().recalled_bytes == one.stats().recalled_bytes
    assert two.config.num_host_chunks == one.config.num_host_chunks  # of half of the heads each


def test_a_load_is_there_when_all_ranks_have_it() -> None:
    ranks = TransfersOfRanks()
    first = ranks.add([TransferReport([0, 1], [], 4, 0.5), TransferReport([1], [2], 3, 0.6)])
    assert first == TransferReport([1], [], 3, 0.6)
    second = ranks.add([TransferReport([2]), TransferReport([], [0])])
    assert (sorted(second.lost), second.loaded) == ([0, 2], [])
    assert ranks.add([TransferReport([3]), TransferReport([3])]).loaded == [3]
