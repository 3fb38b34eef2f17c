"""The engine end to end: transformers' tokens, whatever the blocks, chunks, batch mates and preemptions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.core import engine as engine_module
from kvllm.core.protocol import StepPlan
from kvllm.core.regions import Region
from kvllm.core.sequence import Sequence
from kvllm.engine_args import DEFAULT_MODEL
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import NEW_TOKENS, assert_greedy, greedy, make_llm, random_prompts, tokens

FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, request.param, **FAMILIES[request.param])
    return path


qwen3 = checkpoint_fixture("qwen3", **FAMILIES["qwen3"])


@pytest.fixture(scope="module")
def expected(qwen3) -> list[list[int]]:
    """Transformers' greedy tokens."""
    found = tokens(make_llm(qwen3), random_prompts(256))
    assert_greedy(qwen3, random_prompts(256), found)
    return found


def test_greedy_tokens_are_those_of_transformers(checkpoint: Path) -> None:
    prompts = random_prompts(256)
    found = tokens(make_llm(checkpoint), prompts)
    assert [len(each) for each in found] == [NEW_TOKENS] * len(prompts)
    assert_greedy(checkpoint, prompts, found)


def test_greedy_tokens_of_a_trained_model() -> None:
    prompts = random_prompts(229, lengths=(1, 2, 3, 5, 8, 13, 21, 34))
    assert_greedy(DEFAULT_MODEL, prompts, tokens(make_llm(DEFAULT_MODEL), prompts, greedy(64)))


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1, "num_gpu_blocks_override": 2000},
        {"block_size": 256, "num_gpu_blocks_override": 20},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"enable_prefix_caching": False},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_they_are_computed(qwen3: Path, expected, options: dict) -> None:
    assert tokens(make_llm(qwen3, **options), random_prompts(256)) == expected


def test_preemption_changes_no_token(qwen3: Path, expected) -> None:
    llm = make_llm(qwen3, num_gpu_blocks_override=40, enable_prefix_caching=False)
    assert tokens(llm, random_prompts(256)) == expected
    assert llm.stats().preemptions > 0


def test_prefix_caching_changes_no_token(qwen3: Path, expected) -> None:
    llm = make_llm(qwen3)
    prompts = random_prompts(256)
    tokens(llm, prompts)
    again = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert again[-1].metrics.num_cached_tokens == 96  # six of the 100 tokens' blocks are full
    longer = [{"prompt_token_ids": p["prompt_token_ids"] + e[:64]} for p, e in zip(prompts, expected, strict=True)]
    continued = llm.generate(longer, greedy(64), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in continued] == [e[64:] for e in expected]
    assert continued[0].metrics.num_cached_tokens == 64  # generated blocks are found too


COMPRESSION = paper_compression(method="kara", period=8, window_blocks=3, retain_blocks=1, buffer=4, chunk_budget=4)


@pytest.mark.parametrize("retain_tokens", [None, 17], ids=["whole blocks", "exact count"])
def test_compression_frees_blocks_while_decoding(qwen3: Path, retain_tokens: int | None) -> None:
    compression = paper_compression(method="kara", period=8, retain_tokens=retain_tokens, buffer=4, chunk_budget=4)
    llm = make_llm(qwen3, compression=compression)
    outputs = llm.generate(random_prompts(256), greedy(), use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)
    stats = llm.stats()
    assert stats.compression_events > 0
    assert stats.windows_compressed >= 8
    assert stats.blocks_released >= 8
    assert stats.entries_evicted == stats.windows_compressed * (48 - (retain_tokens or 16))
    assert sum(output.metrics.evicted_entries for output in outputs) == stats.entries_evicted


def test_retention_of_everything_changes_no_token(qwen3: Path, expected) -> None:
    compression = paper_compression(method="kara", period=4, window_blocks=3, retain_blocks=3, buffer=4)
    assert tokens(make_llm(qwen3, compression=compression), random_prompts(256)) == expected


@pytest.mark.parametrize("rows_per_pass", [48, None])
def test_what_survives_does_not_depend_on_how_it_is_computed(qwen3: Path, rows_per_pass: int | None) -> None:
    prompts = random_prompts(256)
    usual = tokens(make_llm(qwen3, compression=COMPRESSION), prompts)
    llm = make_llm(qwen3, compression=COMPRESSION, attention_backend="auto" if rows_per_pass else "reference")
    if rows_per_pass:
        llm.llm_engine.executor.runner.compressor.selector.max_num_batched_tokens = rows_per_pass
    assert tokens(llm, prompts) == usual


def test_compression_under_preemption_and_compress_prompt(qwen3: Path) -> None:
    compression = paper_compression(method="kara", period=8, buffer=4, chunk_budget=4, compress_prompt=True)
    llm = make_llm(qwen3, compression=compression, num_gpu_blocks_override=20)
    assert all(len(found) == NEW_TOKENS for found in tokens(llm, random_prompts(256)))
    assert llm.stats().preemptions > 0 and llm.stats().windows_compressed > 0


def test_a_sequence_that_fits_only_compressed(qwen3: Path) -> None:
    llm = make_llm(qwen3, compression=COMPRESSION, num_gpu_blocks_override=12, max_num_seqs=2)
    prompts = random_prompts(256, lengths=(20, 30))
    found = tokens(llm, prompts, greedy(400))
    assert [len(each) for each in found] == [400, 400]


def test_less_is_preempted_with_compression(qwen3: Path) -> None:
    prompts = random_prompts(256, lengths=[20] * 12)
    pool = 12 * 17 // 4  # a quarter of 20 + 250 tokens each
    plain = make_llm(qwen3, num_gpu_blocks_override=pool, enable_prefix_caching=False)
    compressed = make_llm(qwen3, num_gpu_blocks_override=pool, compression=COMPRESSION, enable_prefix_caching=False)
    for llm in (plain, compressed):
        assert [len(each) for each in tokens(llm, prompts, greedy(250))] == [250] * 12
    assert compressed.stats().preemptions < plain.stats().preemptions
    assert compressed.stats().steps < plain.stats().steps


def test_an_abort_gives_out_what_might_have_begun_a_stop_string() -> None:
    engine = LLM(block_size=16, kv_cache_memory_bytes=64 << 20).llm_engine

    def text(stop: list[str]) -> str:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, stop=stop)
        output = engine.add_request("a", "words: a1,b2\n", params)
        while len(output.outputs[0].token_ids) < 12:
            engine.step()
        engine.abort("a")
        assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) == 12
        return output.outputs[0].text

    expected = text([])
    assert expected and text([expected + "and more"]) == expected


def test_completions_of_a_prompt(qwen3: Path) -> None:
    llm = make_llm(qwen3)
    prompts = random_prompts(256, lengths=(5, 21))
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    alone = llm.generate(prompts[1], SamplingParams(seed=7, max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert alone[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids  # a seed holds whatever runs beside it


def test_the_engines_seed_makes_a_run_reproducible(qwen3: Path) -> None:
    def run(seed: int):
        llm = make_llm(qwen3, seed=seed)
        return tokens(llm, random_prompts(256), SamplingParams(max_tokens=10, ignore_eos=True))

    assert run(1) == run(1) != run(2)


def test_stepping_the_engine_by_hand(qwen3: Path, expected) -> None:
    engine = make_llm(qwen3).llm_engine
    prompts = random_prompts(256)
    for i, prompt in enumerate(prompts[:3]):
        engine.add_request(f"request-{i}", prompt, greedy())
    engine.step()
    engine.abort("request-1")
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
    assert finished == {"request-0": expected[0], "request-2": expected[2]}
    assert engine.scheduler.blocks.num_owned == 0


def test_metrics_of_requests_are_kept_while_they_run(qwen3: Path) -> None:
    engine = make_llm(qwen3, compression=COMPRESSION, num_gpu_blocks_override=20, max_num_seqs=8).llm_engine
    outputs = [engine.add_request(str(i), p, greedy(250)) for i, p in enumerate(random_prompts(256, lengths=[20] * 6))]
    assert all(output.metrics.scheduled_time is None for output in outputs)
    seen_evicted = seen_preempted = 0
    while engine.has_unfinished_requests():
        engine.step()
        sequences = [seq for request in engine.outputs.requests.values() for seq in request.sequences.values()]
        for seq in sequences:
            metrics = seq.metrics
            assert metrics is engine.outputs.requests[seq.request_id].output.metrics
            assert metrics.missing_entries == seq.logical_length - seq.cached_length
            assert (metrics.evicted_entries, metrics.preemptions) == (seq.evicted, seq.preemptions)
            seen_evicted += metrics.evicted_entries > 0
            seen_preempted += metrics.preemptions > 0
    stats = engine.stats
    assert seen_evicted and seen_preempted
    assert sum(output.metrics.evicted_entries for output in outputs) == stats.entries_evicted
    assert sum(output.metrics.windows_compressed for output in outputs) == stats.windows_compressed
    assert sum(output.metrics.preemptions for output in outputs) == stats.preemptions
    for output in outputs:
        metrics = output.metrics
        assert 0 < metrics.missing_entries <= metrics.evicted_entries
        assert metrics.arrival_time <= metrics.scheduled_time <= metrics.first_token_time < metrics.finished_time


def test_a_completion_that_branches_off_a_compressed_prompt_lacks_it_too() -> None:
    seq = Sequence(0, "x", [0] * 96, SamplingParams(n=2), max_length=100, forks=1)
    seq.advance(96)
    seq.compacted(Region(0, size=48, retain=16, stride=48, count=2), 0, dropped=64)
    seq.count_compression(2, dropped=64)
    child = seq.fork(1, 1, seed=0)
    metrics = seq.metrics
    assert metrics.missing_entries == seq.missing + child.missing == 128
    assert (metrics.windows_compressed, metrics.evicted_entries) == (2, 64)  # of work, which was done once
    child.reset()
    assert metrics.missing_entries == seq.missing == 64


def test_statistics_of_what_is_there_now(qwen3: Path) -> None:
    engine = make_llm(qwen3, max_num_seqs=2).llm_engine
    stats = engine.stats

    def now() -> tuple[int, int, int]:
        return stats.num_running, stats.num_waiting, stats.blocks_in_use

    for i, prompt in enumerate(random_prompts(256, lengths=(20, 40, 60))):
        engine.add_request(str(i), prompt, greedy(8))
    assert now() == (0, 3, 0)
    engine.step()
    assert now() == (2, 1, 2 + 3)
    assert (stats.prompt_tokens, stats.prefix_cache_queries, stats.prefix_cache_hits) == (60, 60, 0)
    engine.abort("1")
    assert now() == (1, 1, 2)
    while engine.has_unfinished_requests():
        engine.step()
    assert now() == (0, 0, 0)
    engine.add_request("again", random_prompts(256, lengths=(20, 40, 60))[2], greedy(2))
    engine.step()
    assert (stats.prompt_tokens, stats.prefix_cache_queries, stats.prefix_cache_hits) == (180, 180, 48)


def test_the_longest_stall_is_that_of_a_running_sequence(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts take a second here, others none, by a clock of the test. The step of a first token, and pauses
    between steps, keep nobody waiting."""
    engine = make_llm(qwen3, max_num_batched_tokens=64, max_num_seqs=8).llm_engine
    launch, now = engine.executor.launch, 0.0

    def slow_with_prompts(plan: StepPlan) -> None:
        nonlocal now
        now += plan.has_prefill
        launch(plan)

    monkeypatch.setattr(engine.executor, "launch", slow_with_prompts)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    for i, length in enumerate((20, 100)):
        prompt = random_prompts(256, lengths=(length,))[0]
        engine.add_request(str(i), prompt, greedy(8))
        engine.step()
        now += 10
        for _ in range(3):
            engine.step()
        assert engine.stats.longest_stall_seconds == i
    stalls = engine.stats.stalls  # 7 of the first request, 2 of the second, whose prompt took two steps
    assert (sum(stalls.counts), stalls.total) == (9, 2.0)


def test_stalls_by_events_are_counted_apart(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with an event take 1.5 s here, others 0.125 s, by a clock of the test."""
    compression = CompressionConfig(method="kara", period=8, window_blocks=2, buffer=1, policy="periodic")
    engine = make_llm(qwen3, block_size=4, compression=compression).llm_engine
    launch, now = engine.executor.launch, 0.0

    def slow_with_events(plan: StepPlan) -> None:
        nonlocal now
        now += 1.5 if plan.compressions else 0.125
        launch(plan)

    monkeypatch.setattr(engine.executor, "launch", slow_with_events)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    for i in range(3):
        engine.add_request(str(i), random_prompts(256, lengths=(8,))[0], greedy(40))
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats
    assert sum(stats.stalls.counts) == 3 * 39 and sum(stats.event_stalls.counts) == 3 * stats.compression_events > 0
    assert (stats.stalls.p50, stats.stalls.p99, stats.longest_stall_seconds) == (0.125, 1.5, 1.5)
    assert stats.event_stalls.p50 == 1.5


def test_logprobs_are_those_of_transformers(qwen3: Path) -> None:
    prompt = random_prompts(256, lengths=(9,))[0]
    (output,) = make_llm(qwen3).generate(prompt, greedy(5, logprobs=3), use_tqdm=False)
    completion = output.outputs[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    ids = torch.tensor([prompt["prompt_token_ids"] + completion.token_ids])
    with torch.inference_mode():
        logprobs = model(ids).logits[0].log_softmax(-1)
    for i, (token_id, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = logprobs[len(prompt["prompt_token_ids"]) + i - 1]
        assert set(entry) == set(row.topk(3).indices.tolist())
        assert entry[token_id].rank == 1
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[other].item(), abs=1e-3)
    total = sum(entry[t].logprob for t, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
