"""Every compression method under every policy that it allows, in the engine, against dense attention in float64.

A `Recorder` keeps a map of each sequence's cache: for every layer and head, which position's entry lies where, or that
there is none. Memory that holds no entry is NaN between steps, the holes of single heads included.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.registry import METHODS
from kvllm.compression.specs import SPECS
from kvllm.core.policies import EventOptions
from kvllm.errors import ConfigError
from kvllm.worker.features.attention_mass import AttentionMass
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import refusal
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.engines import random_token_ids
from tests.helpers.examples import examples
from tests.helpers.features import feature_of
from tests.helpers.layout_recorder import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Recorder,
    assert_as_expected,
    assert_stats,
    completions,
    compression_config,
    greedy,
    make_llm,
    mean_retained,
    run,
    step,
    without_padding,
)
from tests.helpers.recorder import assert_dense

THRESHOLD_METHODS = [name for name, spec in SPECS.items() if not refusal(name, "threshold")]
POLICIES = ("threshold", "periodic", "pressure", "standalone")
OF_EACH_KIND = (
    "kara",
    "mean_attention",
    "kvzip",
    "adakv",
    "h2o",
    "sliding_window",
)
"""Methods that differ in what they need from the engine (`MethodSpec`): its states and passes are all among theirs."""


def methods(names: Iterable[str], usual: Container[str] = OF_EACH_KIND) -> list[Any]:
    """Methods as parameters; those that are not in `usual` are run with `--long` alone."""
    return [pytest.param(name, marks=() if name in usual else pytest.mark.long) for name in names]


def cases(*policies: str, compress_prompt: bool = False, usual: Container[str] = OF_EACH_KIND) -> pytest.MarkDecorator:
    """Every method under every one of these policies that it allows; with `compress_prompt` those that
    compress prompts. By default only the `usual` methods are run, each under one policy, in turn."""
    found, turn = [], 0
    for name, spec in SPECS.items():
        of_output = {"threshold"} if spec.reselects else set()  # prompts here are as long as the budgets
        allowed = [policy for policy in policies if not refusal(name, policy) and policy not in of_output]
        allowed *= not (compress_prompt and spec.reselects)
        for policy in allowed:
            by_default = name in usual and policy == allowed[turn % len(allowed)]
            found.append(pytest.param(name, policy, marks=() if by_default else pytest.mark.long))
        turn += name in usual
    return pytest.mark.parametrize(("method", "policy"), found)


checkpoint = checkpoint_fixture("qwen3", method_files=True, head_dim=16)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> DenseDecoder:
    return DenseDecoder(checkpoint)


# The battery


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts shorter and longer than what is compressed, a common beginning, two completions of one prompt."""
    common, *tails = random_token_ids(24, 50, 10, 3, 30)
    prompts = [common + tails[0], common + tails[1], tails[2], tails[3]]
    return prompts, [greedy(60, 0), greedy(60, 1), greedy(90, 2), completions(2, 60)]


def pool(policy: str) -> dict[str, int]:
    """Blocks that make a policy work: pressure needs a shortage."""
    return {"num_gpu_blocks_override": 26} if policy == "pressure" else {}


@cases(*POLICIES, usual=SPECS)
def test_decoding_and_survivors_are_those_of_dense_attention(
    checkpoint: Path, decoder: DenseDecoder, method: str, policy: str
) -> None:
    llm, recorder = make_llm(checkpoint, compression_config(method, policy), **pool(policy))
    run(llm, *mixed_requests())
    assert len(recorder.events) >= 10 and len({id(event.text) for event in recorder.events}) >= 4
    assert_as_expected(decoder, llm)
    assert_stats(llm)


@pytest.mark.parametrize("method", methods(THRESHOLD_METHODS, ("mean_attention", "adakv", "h2o")))
def test_requests_with_budgets_of_their_own_and_a_protected_prompt(
    checkpoint: Path, decoder: DenseDecoder, method: str
) -> None:
    """A budget moves the threshold along; the blocks of the prompt stay whole and count."""
    llm, recorder = make_llm(checkpoint, compression_config(method, "threshold", protect_prompt=True))
    prompts, budgets = random_token_ids(9, 20, 3), [37, 45, None]  # 20 tokens: 3 blocks of 8, of which 4 are output
    params = [structs.replace(greedy(70, i), budget_tokens=budget) for i, budget in enumerate(budgets)]
    run(llm, prompts, params)
    assert_as_expected(decoder, llm)
    for prompt, budget in zip(prompts, [37, 45, 25], strict=True):
        protected = -(-len(prompt) // BLOCK_SIZE) * BLOCK_SIZE
        events = [event for event in recorder.events if event.text.tokens[: len(prompt)] == prompt]
        assert [event.start for event in events] == [protected] * len(events) and len(events) >= 2
        assert {event.layout.shape[-1] for event in events} == {budget + 44 - 25}
        assert {protected + mean_retained(event, llm.config.compression) for event in events} == {budget}


@cases("periodic", "pressure", "standalone", "threshold")
def test_requests_with_compression_settings_of_their_own(
    checkpoint: Path, decoder: DenseDecoder, method: str, policy: str
) -> None:
    """One request keeps everything, one another share of each window, one what the engine keeps."""
    config = compression_config(method, policy)
    llm, recorder = make_llm(checkpoint, config, **pool(policy))
    block_size = llm.config.block_size
    own = {"standalone": {"retain_blocks": 12}, "threshold": {}}.get(policy, {"retain_blocks": 1})
    prompts, settings = random_token_ids(9, 20, 3), [{"compress": False}, own, {}]
    run(llm, prompts, [structs.replace(greedy(90, i), **each) for i, each in enumerate(settings)])
    assert_as_expected(decoder, llm)
    usual = config.retained(block_size)
    size = 0 if policy == "threshold" else config.policy.window_blocks * block_size
    expected = [own["retain_blocks"] * block_size if own else usual, usual]
    for prompt, retained in zip(prompts, [None, *expected], strict=True):
        events = [event for event in recorder.events if event.text.tokens[: len(prompt)] == prompt]
        assert (retained is None) == (not events)
        for event in events:
            if SPECS[method].reselects:  # what was left of windows before is kept beside
                assert event.retain < event.size and (event.size - event.retain) % (size - retained) == 0
            else:
                assert event.retain == retained


def test_what_was_stored_before_scores_were_added_up_stays(checkpoint: Path, decoder: DenseDecoder) -> None:
    """One sequence has room for all of its output, until others come."""
    llm, recorder = make_llm(checkpoint, compression_config("mean_attention", "pressure"), num_gpu_blocks_override=26)
    prompts = random_token_ids(20, 9, 3)
    llm.llm_engine.add_request("oldest", prompts[0], greedy(150))
    for _ in range(40):
        step(llm)
    oldest = recorder.alive[0]
    stored = oldest.length
    run(llm, prompts[1:], [greedy(90, 1), greedy(90, 2)])
    starts = {event.start for event in recorder.events if event.text is oldest}
    assert min(starts) == -(-stored // BLOCK_SIZE) * BLOCK_SIZE
    assert_as_expected(decoder, llm)
    assert_stats(llm)


@cases("periodic", "standalone", compress_prompt=True)
def test_windows_of_a_prompt(checkpoint: Path, decoder: DenseDecoder, method: str, policy: str) -> None:
    """Several windows of a sequence in one event; here they drop whole blocks."""
    config = compression_config(method, policy, retain_tokens=8, compress_prompt=True)
    llm, recorder = make_llm(checkpoint, config)
    run(llm, random_token_ids(75, 50, 3), [completions(2, 30), greedy(30, 1), greedy(30, 2)])
    assert sum(event.length == 75 for event in recorder.events) >= 8
    assert_as_expected(decoder, llm)
    assert_stats(llm)


@pytest.mark.parametrize("method", methods(["snapkv", "pyramidkv", "adakv", "h2o", "sliding_window"], ["adakv", "h2o"]))
def test_the_reference_backend_does_the_same(checkpoint: Path, decoder: DenseDecoder, method: str) -> None:
    config = compression_config(method, "threshold")
    outputs, kept = [], []
    for backend in ("reference", "cpu"):
        llm, recorder = make_llm(checkpoint, config, attention_backend=backend)
        outputs.append(run(llm, *mixed_requests()))
        kept.append([without_padding(event.kept) for event in recorder.events])
        assert_as_expected(decoder, llm)
    assert outputs[0] == outputs[1] and kept[0] == kept[1]


@pytest.mark.parametrize(
    "method",
    methods((name for name in THRESHOLD_METHODS if SPECS[name].queries != "none"), ["kara_no_bi", "snapkv", "adakv"]),
)
def test_recomputed_queries_are_those_of_decoding(checkpoint: Path, decoder: DenseDecoder, method: str) -> None:
    """Between two thresholds nothing changes that the last tokens attended, so recomputing gives what they had."""
    config = compression_config(method, "threshold")
    llm, recorder = make_llm(checkpoint, config)
    run(llm, *mixed_requests())
    dense = {id(text): assert_dense(decoder, text) for text in recorder.texts}
    for event in recorder.events:
        positions, visible = event.scoring(config)
        assert torch.equal(visible, event.text.visible[:, :, positions])
        for recomputed, queries in zip(event.queries, dense[id(event.text)].queries, strict=True):
            torch.testing.assert_close(recomputed.double(), queries[:, positions], rtol=0, atol=1e-4)


# Blocks


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("snapkv", (44, 25)),
        pytest.param("h2o", (40, 24), marks=pytest.mark.long),
        ("adakv", (44, 24)),
        pytest.param("pyramidkv", (41, 20), marks=pytest.mark.long),
        ("sliding_window", (44, 25)),
        ("sliding_window", (48, 24)),
    ],
)
def test_blocks_come_back_to_the_pool(
    checkpoint: Path, decoder: DenseDecoder, method: str, sizes: tuple[int, int]
) -> None:
    threshold, budget = sizes
    held = (threshold + budget) // 2 if SPECS[method].ragged else budget
    config = compression_config(method, "threshold", threshold_tokens=threshold, budget_tokens=budget)
    llm, recorder = make_llm(checkpoint, config)
    (prompt,), blocks = random_token_ids(60), llm.llm_engine.scheduler.blocks
    llm.llm_engine.add_request("0", prompt, greedy(100))
    step(llm)
    step(llm)
    cached, owned = 60, []
    for _ in range(99):
        step(llm)
        cached = (held if cached >= threshold else cached) + 1
        if llm.llm_engine.has_unfinished_requests():
            assert recorder.alive[0].layout.shape[-1] == cached
            assert blocks.num_owned == -(-cached // BLOCK_SIZE)
            owned.append(blocks.num_owned)
    assert max(owned) == -(-threshold // BLOCK_SIZE) and min(owned) == -(-(held + 1) // BLOCK_SIZE)
    assert all(event.moved == (method != "sliding_window" or event.size % BLOCK_SIZE != 0) for event in recorder.events)
    assert_as_expected(decoder, llm)


def test_a_sliding_window_of_whole_blocks_moves_nothing(checkpoint: Path, decoder: DenseDecoder) -> None:
    """Forks and equal beginnings share the blocks that are let go."""
    config = compression_config("sliding_window", "threshold", threshold_tokens=32, budget_tokens=16)
    llm, recorder = make_llm(checkpoint, config, max_num_batched_tokens=64)
    common, *tails = random_token_ids(16, 16, 12, 21)
    run(llm, [common + tail for tail in tails], [completions(2, 90), greedy(90, 1), greedy(90, 2)])
    assert any(event.moved for event in recorder.events) and sum(not event.moved for event in recorder.events) >= 12
    assert_as_expected(decoder, llm)


# The same choice every time


def survivors(recorder: Recorder) -> dict[tuple[int, ...], list[tuple[int, list]]]:
    """For each prompt (its first two tokens) when its text was compressed, and what was kept."""
    found: dict[tuple[int, ...], list[tuple[int, list]]] = {}
    for event in recorder.events:
        key = tuple(event.text.tokens[:2])
        found.setdefault(key, []).append((event.length, event.start, without_padding(event.kept)))
    return found


@cases("threshold", "periodic", "standalone", usual=("kara", "kvzip", "adakv", "h2o"))
def test_survivors_depend_on_their_sequence_alone(checkpoint: Path, method: str, policy: str) -> None:
    """Not on the batch, its order, the rows that are recomputed at a time, nor the run."""
    prompts = random_token_ids(2, 2, 2)
    lengths = random_token_ids(2, 30, 57) if policy != "periodic" else prompts  # its clock is the engine's
    # An event with a clock is spread over steps unless its number of sequences is given.
    event = {"max_sequences": len(prompts)} if policy == "periodic" else {}
    together = {}

    def check(requests: list[tuple[int, list[int]]], rows_per_pass: int = 64, **options: Any) -> None:
        llm, recorder = make_llm(checkpoint, compression_config(method, policy, **event), **options)
        recorder.runner.compressor.selector.max_num_batched_tokens = rows_per_pass
        tokens = run(llm, [prompt for _, prompt in requests], [greedy(70, seed) for seed, _ in requests])
        found = survivors(recorder)
        assert len(found) == len(requests) and all(len(events) >= 2 for events in found.values())
        for (_, prompt), completion in zip(requests, tokens, strict=True):
            key = tuple(prompt[:2])
            assert together.setdefault(key, (found[key], completion)) == (found[key], completion)

    requests = list(enumerate(lengths))
    # With the tokens for only one window in a step, sequences wait for theirs; but those with a clock would go on.
    all_in_a_step, one_in_a_step = {"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 8}
    check(requests, **all_in_a_step)
    check(requests[::-1], rows_per_pass=8, **(one_in_a_step if policy != "periodic" else all_in_a_step))
    check(requests[1:2], **all_in_a_step)


REQUESTS = [(75, 10, 0), (46, 6, 0), (12, 20, 2)]
"""Tokens of a prompt and of its output, and the step at which the request arrives."""
WINDOWS = [name for name, spec in SPECS.items() if not refusal(name, "standalone")]
OF_VALUES = {"values", "value_norms"}
READS_MORE_THAN_KEYS = [n for n in WINDOWS if not SPECS[n].reads_cache_alone or OF_VALUES & METHODS[n].arguments]


def assert_each_as_alone(
    checkpoint: Path, config: CompressionConfig, requests: list[tuple[int, int, int]], budgets: list[int]
) -> None:
    """The survivors and the tokens of every request are those of an engine that has no other.

    requests: as REQUESTS. budgets: the tokens of a step, of the engine with all requests first.
    """
    prompts = random_token_ids(*(length for length, *_ in requests))
    for number, prompt in enumerate(prompts):
        prompt[0] = number  # so that they are told apart
    # With a clock, and where blocks decide, windows of the output are compressed when others need it.
    has_clock = isinstance(config.policy, EventOptions)

    def complete(numbers: list[int], budget: int) -> dict[int, tuple[list, list[int]]]:
        options = {"num_gpu_blocks_override": 200} if has_clock else {}
        llm, recorder = make_llm(checkpoint, config, max_num_batched_tokens=budget, **options)
        engine, outputs, waiting = llm.llm_engine, {}, sorted(numbers, key=lambda number: requests[number][2])
        step = 0 if len(numbers) > 1 else requests[numbers[0]][2]
        while waiting or engine.has_unfinished_requests():
            while waiting and requests[waiting[0]][2] <= step:
                number = waiting.pop(0)
                params = greedy(requests[number][1], number)
                outputs[number] = engine.add_request(str(number), prompts[number], params)
            engine.step()
            step += 1
        found = survivors(recorder)
        kept = {number: found.get(tuple(prompts[number][:2]), []) for number in numbers}
        if has_clock:
            return {n: ([event for event in kept[n] if event[0] == len(prompts[n])], []) for n in numbers}
        return {n: (kept[n], outputs[n].outputs[0].token_ids) for n in numbers}

    together = complete(list(range(len(requests))), budgets[0])
    for number, budget in zip(together, budgets[1:], strict=True):
        assert complete([number], budget)[number] == together[number]


@pytest.mark.parametrize("compress_prompt", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", methods(READS_MORE_THAN_KEYS))
def test_survivors_depend_on_no_other_request(checkpoint: Path, method: str, compress_prompt: bool) -> None:
    """Nor on the chunks of the prompt, or on how many of its windows a step has tokens for."""
    config = compression_config(method, "standalone", compress_prompt=compress_prompt)
    assert_each_as_alone(checkpoint, config, REQUESTS, [32, 13, 200, 200])


@settings(max_examples=examples(30))
@given(data=st.data())
def test_survivors_of_random_requests_depend_on_no_other(checkpoint: Path, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from([*SPECS]))
    policies = POLICIES[SPECS[method].reselects :]  # not by threshold, where prompts are longer than budgets
    policy = data.draw(st.sampled_from([policy for policy in policies if not refusal(method, policy)]))
    whole = policy == "threshold" or SPECS[method].reselects  # which leave prompts to no choice
    prompts = {} if whole else {"compress_prompt": data.draw(st.booleans())}
    config = compression_config(method, policy, **prompts)
    lengths = st.tuples(st.integers(3, 90), st.integers(1, 40), st.integers(0, 20))
    requests = data.draw(st.lists(lengths, min_size=2, max_size=4))
    budget = st.sampled_from([11, 16, 32, 64, 300])
    budgets = data.draw(st.lists(budget, min_size=len(requests) + 1, max_size=len(requests) + 1))
    assert_each_as_alone(checkpoint, config, requests, budgets)


# Preemption


def many_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = random_token_ids(3, 20, 60, 35, 50, 45)
    return prompts, [*[greedy(80, seed) for seed in range(5)], completions(3, 70)]


@cases("threshold", "periodic", "pressure", usual=("kara", "kvzip", "adakv", "h2o"))
def test_a_preempted_sequence_has_a_consistent_cache(
    checkpoint: Path, decoder: DenseDecoder, method: str, policy: str
) -> None:
    num_blocks = 11 if policy == "threshold" else 24
    llm, recorder = make_llm(checkpoint, compression_config(method, policy), num_gpu_blocks_override=num_blocks)
    tokens = run(llm, *many_requests())
    assert [len(each) for each in tokens] == [80] * 5 + [70] * 3
    assert llm.stats().preemptions >= 2
    assert sum(text.num_events for text in recorder.texts if text.resumed) >= 2
    assert_as_expected(decoder, llm)
    assert_stats(llm)


@pytest.mark.parametrize("method", methods(THRESHOLD_METHODS, ("mean_attention", "adakv", "h2o")))
def test_preemption_changes_no_token_under_a_threshold(checkpoint: Path, method: str) -> None:
    """Computed again, a text is compressed at the same lengths, from the same queries."""
    tokens, preemptions = [], []
    of_output = {"protect_prompt": True, "threshold_tokens": 90, "budget_tokens": 76} if SPECS[method].reselects else {}
    for num_blocks in (100, 22):
        config = compression_config(method, "threshold", **of_output)
        llm, _ = make_llm(checkpoint, config, num_gpu_blocks_override=num_blocks)
        prompts, params = many_requests()
        tokens.append(run(llm, prompts[:5], params[:5]))
        preemptions.append(llm.stats().preemptions)
    assert preemptions[0] == 0 < preemptions[1]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("method", methods(["h2o", "adakv", "pyramidkv", "random"], ["h2o", "adakv"]))
def test_a_failed_step_leaves_no_trace(
    checkpoint: Path, decoder: DenseDecoder, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises in the model, after the compressions; everything is computed again from the tokens."""
    prompts, params = random_token_ids(50, 20, 30), [greedy(60, 0), greedy(60, 1), greedy(60, 2)]

    def complete(failing_steps: tuple[int, ...]) -> list[list[int]]:
        llm, recorder = make_llm(checkpoint, compression_config(method, "threshold"))
        engine, model = llm.llm_engine, recorder.runner.model
        outputs = [engine.add_request(str(i), *each) for i, each in enumerate(zip(prompts, params, strict=True))]
        steps = 0
        while engine.has_unfinished_requests():
            steps += 1
            if steps in failing_steps:
                with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
                    patch.setattr(model, "forward", fail)
                    step(llm)
                continue
            step(llm)
        assert_as_expected(decoder, llm)
        return [output.outputs[0].token_ids for output in outputs]

    assert complete((3, 17, 30, 31)) == complete(())


def fail(*_: Any) -> None:
    raise ArithmeticError


# H2O's mass


def test_mass_of_completions_of_one_prompt(checkpoint: Path, decoder: DenseDecoder) -> None:
    """A prompt in chunks, forks after its last one, and a second life of those that are preempted."""
    llm, recorder = make_llm(
        checkpoint, compression_config("h2o", "threshold"), max_num_batched_tokens=8, num_gpu_blocks_override=13
    )
    run(llm, random_token_ids(30, 60), [completions(3, 60), completions(2, 60)])
    assert llm.stats().preemptions >= 1
    assert {record.length for record in recorder.masses} >= {8, 16, 24, 30, 31}
    assert any(record.text.resumed for record in recorder.masses)
    assert_as_expected(decoder, llm)


def test_mass_belongs_to_a_sequence_so_prefixes_are_not_shared(checkpoint: Path) -> None:
    (prompt,) = random_token_ids(40)
    hits = {}
    for method in ("h2o", "snapkv"):
        llm, _ = make_llm(checkpoint, compression_config(method, "threshold"))
        run(llm, [prompt], [greedy(2)])
        again = llm.llm_engine.add_request("again", prompt, greedy(2))
        while llm.llm_engine.has_unfinished_requests():
            step(llm)
        hits[method] = again.metrics.num_cached_tokens
    assert hits == {"h2o": 0, "snapkv": 32}


def test_mass_counts_as_memory_of_the_cache(checkpoint: Path) -> None:
    layers, kv_heads, head_dim, num_seqs = 3, 2, 16, 8
    block = 2 * layers * kv_heads * BLOCK_SIZE * head_dim * 4
    mass = layers * kv_heads * (num_seqs + 1) * MAX_MODEL_LEN * 4

    def with_memory(method: str, memory: int) -> LLM:
        return LLM(
            checkpoint,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs,
            kv_cache_memory_bytes=memory,
            compression=compression_config(method, "threshold"),
        )

    for method, state in (("h2o", mass), ("snapkv", 0)):
        llm = with_memory(method, state + 31 * block - 1)
        assert (llm.config.num_blocks, llm.stats().method_state_bytes) == (30, state)
    runner = with_memory("h2o", mass + 30 * block).llm_engine.executor.runner
    assert feature_of(runner, AttentionMass).mass.numel() * 4 == mass
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes={mass} .*beside {mass} bytes for the method"):
        with_memory("h2o", mass)


# Retention of everything


@pytest.fixture(scope="module")
def uncompressed(checkpoint: Path) -> list[list[int]]:
    return complete_without_recorder(checkpoint, None)


def complete_without_recorder(path: Path, compression: CompressionConfig | None) -> list[list[int]]:
    prompts, params = mixed_requests()
    llm = LLM(
        path,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=60,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        compression=compression,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert llm.stats().windows_compressed == 0
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("method", methods(THRESHOLD_METHODS))
def test_a_budget_of_everything_changes_no_token(checkpoint: Path, uncompressed: list, method: str) -> None:
    sizes: dict[str, Any] = {"threshold_tokens": 40, "budget_tokens": 40}
    if SPECS[method].reselects:
        sizes = {"threshold_tokens": 90, "budget_tokens": 90, "protect_prompt": True}
    config = compression_config(method, "threshold", **sizes)
    assert complete_without_recorder(checkpoint, config) == uncompressed


@pytest.mark.parametrize("method", ["keydiff", "snapkv"])
def test_tokens_of_completions_do_not_depend_on_the_pool(checkpoint: Path, method: str) -> None:
    """All completions share the prompt's blocks, which are due to be compressed right after their first token. In the
    tight pool there is no room for what survives of each: they wait, and none runs on uncompressed."""
    config = compression_config(method, "threshold", threshold_tokens=56, budget_tokens=40)
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    found = {}
    for blocks in (120, 13):
        options = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        llm = LLM(checkpoint, compression=config, block_size=8, num_gpu_blocks_override=blocks, **options)
        (output,) = llm.generate(random_token_ids(70), params, use_tqdm=False)
        found[blocks] = [completion.token_ids for completion in output.outputs]
        assert len(set(map(tuple, found[blocks]))) == 4
        llm.llm_engine.scheduler.check()
    assert llm.stats().preemptions > 0, "the pool is not as tight as the test needs it"
    assert found[13] == found[120]
