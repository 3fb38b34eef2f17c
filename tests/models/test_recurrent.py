"""Models with recurrent layers in an engine: prefixes that go on from copies of states, swaps, options refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.core.drafting.base import Draft
from kvllm.core.drafting.lookup import NgramDrafter
from kvllm.core.engine import LLMEngine
from kvllm.errors import ConfigError
from kvllm.kvcache.recurrent import RecurrentStates, RecurrentStep
from kvllm.models.falcon_h1 import ParallelMixer
from kvllm.worker.build import state_shape
from kvllm.worker.features import recurrent_states
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import assert_greedy, greedy, make_llm, random_token_ids, records_chunks, tokens
from tests.helpers.families import FAMILIES
from tests.helpers.paged_model import load
from tests.helpers.tensors import randn
from tests.helpers.thread_executor import ThreadExecutor, shared_memory_shards


@pytest.fixture(scope="module", params=["qwen3.5", "lfm2", pytest.param("falcon-h1", marks=pytest.mark.long)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of matrices as states, of the inputs of a convolution alone, and of states beside KV pairs."""
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, **FAMILIES[request.param])
    return path


def cached(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[int, list[int]]:
    """Tokens of a prompt that were found in the prefix cache, and the output."""
    output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    assert output.metrics is not None
    return output.metrics.num_cached_tokens, list(output.outputs[0].token_ids)


def test_a_conversation_goes_on_from_states(checkpoint: Path) -> None:
    """The second turn begins with the first one and its answer, of which all but the last DISTANCE tokens are found."""
    llm = make_llm(checkpoint, max_num_batched_tokens=96, max_num_seqs=4)
    first, second = random_token_ids(200, 30)
    found, answer = cached(llm, first, greedy(90))
    assert found == 0
    turn = first + answer + second
    found, again = cached(llm, turn, greedy(20))
    assert found == 256  # 192 at the end of the first prompt, 256 in the answer
    assert_greedy(checkpoint, [{"prompt_token_ids": first}, {"prompt_token_ids": turn}], [answer, again])
    assert cached(llm, first[:150] + second, greedy(5))[0] == 96  # the end of an earlier chunk of the prompt


def test_few_copies_and_many_prefixes(checkpoint: Path) -> None:
    """States make way for others, and what is found then is shorter, never wrong; a salt separates what is equal."""
    llm = make_llm(checkpoint, max_num_seqs=2, max_num_batched_tokens=64)
    assert llm.config.num_state_snapshots == 4
    beginnings = random_token_ids(*[48] * 6)
    ends = random_token_ids(*[20] * 4, seed=1)
    prompts = [{"prompt_token_ids": begin + end} for end in ends for begin in beginnings]
    found = tokens(llm, prompts, greedy(6))
    assert_greedy(checkpoint, prompts, found)
    salted = [{**prompts[0], "cache_salt": salt} for salt in ("a", "b", "a")]
    outputs = [llm.generate([prompt], greedy(6), use_tqdm=False)[0] for prompt in salted]
    assert [output.metrics.num_cached_tokens for output in outputs if output.metrics] == [0, 0, 64]
    assert [output.outputs[0].token_ids for output in outputs] == [found[0]] * 3
    assert llm.reset_prefix_cache()
    assert cached(llm, prompts[0]["prompt_token_ids"], greedy(6)) == (0, found[0])


@pytest.mark.parametrize(
    "options",
    [
        {"swap": "always", "kv_offloading_size": 0.01},
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
    ],
    ids=["swap", "no-prefixes", "ahead"],
)
def test_preempted_sequences_go_on(checkpoint: Path, options: dict[str, Any]) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in random_token_ids(60, 40, 30, 20, 33)]
    expected = tokens(make_llm(checkpoint), prompts, greedy(100))
    llm = make_llm(checkpoint, num_gpu_blocks_override=18, max_num_seqs=5, **options)
    assert tokens(llm, prompts, greedy(100)) == expected
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.swapped_in > 0 if "swap" in options else stats.tokens_recomputed > 0


def drafting(path: Path, **options: Any) -> LLM:
    """An engine that tries all drafts."""
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm = make_llm(path, speculative_config=config, **options)
    assert isinstance(llm.llm_engine, LLMEngine) and llm.llm_engine.scheduler.speculation
    llm.llm_engine.scheduler.speculation.cost = None
    return llm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 5},
        {"num_gpu_blocks_override": 18, "max_num_seqs": 5, "swap": "always", "kv_offloading_size": 0.01},
        {"async_scheduling": True, "enable_prefix_caching": False},
    ],
    ids=["as-it-is", "chunks", "swap", "ahead"],
)
def test_wrong_drafts_are_taken_back(checkpoint: Path, options: dict[str, Any]) -> None:
    prompts = [
        {"prompt_token_ids": [3 + token % 5 for token in prompt]} for prompt in random_token_ids(60, 40, 30, 7, 33)
    ]
    expected = tokens(make_llm(checkpoint), prompts, greedy(100))
    llm = drafting(checkpoint, **options)
    for _ in range(2):  # the second time with cached prefixes
        assert tokens(llm, prompts, greedy(100)) == expected
    stats = llm.stats()
    assert 0 < sum(stats.drafts.right) < stats.drafts.tokens
    assert bool(stats.swapped_in) == ("swap" in options)


@pytest.mark.parametrize("most_rows", [64, 12])
def test_wrong_drafts_of_recorded_passes_are_taken_back(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    """A pass of more rows than are noted is not recorded."""
    records_chunks(monkeypatch)
    monkeypatch.setattr(recurrent_states, "MOST_RECORDED_ROWS", most_rows)
    prompts = [{"prompt_token_ids": [3 + token % 5 for token in each]} for each in random_token_ids(60, 40, 30, 7, 33)]
    llm, replayed = drafting(checkpoint, attention_backend="reference", max_num_seqs=5), list[int]()
    runner = llm.llm_engine.executor.runner
    runner.use_graphs(lambda step: lambda: replayed.append(1) or step(), runner.cache.num_blocks)
    assert tokens(llm, prompts, greedy(100)) == tokens(make_llm(checkpoint), prompts, greedy(100))
    stats = llm.stats()
    assert 0 < sum(stats.drafts.right) < stats.drafts.tokens
    assert len(replayed) == stats.steps if most_rows == 64 else 0 < len(replayed) < stats.steps


def test_a_conversation_goes_on_from_states_after_right_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts end where a state is copied."""
    llm, (first, second) = drafting(checkpoint), random_token_ids(200, 30)
    text = first + cached(make_llm(checkpoint), first, greedy(90))[1]
    monkeypatch.setattr(NgramDrafter, "propose", lambda _, seq, most: Draft(text[seq.num_tokens :][:most], 1))
    _, answer = cached(llm, first, greedy(90))
    assert answer == text[200:] and sum(llm.stats().drafts.right) > 60
    monkeypatch.undo()
    turn = text + second
    found, again = cached(llm, turn, greedy(20))
    assert found == 256
    assert_greedy(checkpoint, [{"prompt_token_ids": turn}], [again])


def test_several_completions_branch_off(checkpoint: Path) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
    [prompt] = random_token_ids(40)
    llm = make_llm(checkpoint)
    together = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    alone = make_llm(checkpoint, max_num_seqs=3, max_num_batched_tokens=16, num_gpu_blocks_override=12)
    again = alone.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    texts = [output.token_ids for output in together.outputs]
    assert len({*map(tuple, texts)}) == 3
    assert texts == [output.token_ids for output in again.outputs]


def test_room_for_states(checkpoint: Path) -> None:
    """Sequences at once follow from the memory of the pool, of which states and their copies take half."""
    size = make_llm(checkpoint, max_num_seqs=1).stats().recurrent_state_bytes // 4
    llm = LLM(checkpoint, kv_cache_memory_bytes=40 * size)
    stats = llm.stats()
    assert (llm.config.max_num_seqs, llm.config.num_state_snapshots) == (15, 4)
    assert stats.recurrent_state_bytes == 20 * size
    assert stats.num_blocks * stats.block_bytes + stats.recurrent_state_bytes <= 40 * size
    with pytest.raises(ConfigError, match="a sequence holds .* bytes in recurrent layers"):
        LLM(checkpoint, kv_cache_memory_bytes=size)


def test_what_states_cannot_do_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="layers with a recurrent state, .* so no query can be computed again"):
        make_llm(checkpoint, compression=CompressionConfig(method="kara"))
    with pytest.raises(ConfigError, match="recurrent layers, which are computed for text alone"):
        LLM(checkpoint, runner="pooling", convert="embed")
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        make_llm(checkpoint, tensor_parallel_size=4 if "qwen" in checkpoint.name else 3)


def test_all_ranks_take_back_the_same_tokens(checkpoint: Path) -> None:
    prompts = [{"prompt_token_ids": [3 + token % 5 for token in prompt]} for prompt in random_token_ids(40, 7)]
    expected, llm = tokens(make_llm(checkpoint), prompts, greedy(60)), drafting(checkpoint)
    with shared_memory_shards(2) as shards:
        llm.llm_engine.executor = ThreadExecutor(llm, checkpoint, shards)
        assert tokens(llm, prompts, greedy(60)) == expected
    assert llm.stats().drafts.tokens > sum(llm.stats().drafts.right)


def test_mamba_2_over_a_long_text(tmp_path: Path) -> None:
    """Against the sum over all earlier tokens in double precision; little of a state decays."""
    make_checkpoint(tmp_path, **FAMILIES["falcon-h1-norm"])
    model, config = load(tmp_path)
    attention, shape, length = model.layers[0].attention, state_shape(config, torch.float32), 1000
    assert isinstance(attention, ParallelMixer) and shape is not None
    part = attention.mamba2
    part.log_rates.sub_(5)
    mixed, steps = randn(length, part.mixed), 0.1 * randn(length, part.heads, seed=1).exp()
    slots, starts = torch.zeros(1, dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32)
    found = part.scan(mixed, steps, RecurrentStep(RecurrentStates(shape, 1), slots, starts), 0)
    c, b, x = (each.double() for each in mixed.split(part.widths[:3], 1))
    c, b = (each.unflatten(1, (2, 8)).repeat_interleave(2, 1).transpose(0, 1) for each in (c, b))
    x, steps = x.unflatten(1, (4, 12)).transpose(0, 1), steps.double().T
    total = (-steps * part.log_rates.double().exp()[:, None]).cumsum(1)
    seen = (total[:, :, None] - total[:, None]).tril().exp().tril() * (c @ b.transpose(1, 2))
    expected = (seen @ (x * steps[:, :, None]) + x * part.skip[:, None, None]).transpose(0, 1)
    assert expected[-100:].std() > 3
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)
