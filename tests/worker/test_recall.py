"""KV pairs that come back, in the engine: where each of them is, what it holds, and the bound that is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, ConfigError, SamplingParams
from kvllm.worker.features.recall import Recall
from kvllm.worker.features.recalling_backend import RecallGroup, RecallingBackend
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import greedy, make_llm, random_prompts, tokens
from tests.helpers.examples import thinned
from tests.helpers.watched_pairs import Watch, recall_of

PROMPTS = random_prompts(256, (3, 17, 40, 63, 30))
POLICIES: dict[str, dict[str, Any]] = {
    "pressure": {"window_blocks": 3, "period": 8},
    "periodic": {"window_blocks": 3, "period": 8, "retain_tokens": 13},
    "threshold": {"threshold_tokens": 90, "budget_tokens": 70, "protect_prompt": True},
    "standalone": {"window_blocks": 24, "retain_blocks": 12},
}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 40, "block_size": 8, "max_num_seqs": 8, "watermark": 0.0}
SMALL |= {"max_num_batched_tokens": 64, "kv_offloading_size": 0.02}


checkpoint = checkpoint_fixture("qwen3", head_dim=32, num_hidden_layers=2)


def recalling(policy: str, **options: Any) -> CompressionConfig:
    recall = {} if "recall_bound" in options else {"recall_period": 1}
    return paper_compression(method="keydiff", policy=policy, buffer=4, **POLICIES[policy] | recall | options)


def run(llm: LLM, watch: Watch, count: int = 60) -> None:
    for number, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(number), prompt, greedy(count))
    steps = 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        llm.llm_engine.scheduler.check()
        steps += 1
        if steps % 9 == 0:
            watch.check()
        if steps == 50:
            llm.llm_engine.abort("1")


@pytest.mark.parametrize("swap", ["never", "always"])
@pytest.mark.parametrize("policy", POLICIES)
def test_residents_and_dropped_pairs_are_all_pairs(checkpoint: Path, policy: str, swap: str) -> None:
    """With preempted sequences, computed again or not, and one that is aborted."""
    options = SMALL | {"compression": recalling(policy), "swap": swap}
    if policy == "standalone":
        options |= {"block_size": 1, "num_gpu_blocks_override": 280}
    llm = make_llm(checkpoint, **options)
    free = recall_of(llm).dropped.chunks.num_free
    run(llm, Watch(llm))
    stats = llm.stats()
    tokens(llm, PROMPTS[:1], greedy(2))  # with a plan that drops the last of the others
    assert stats.recalled_bytes > 0
    assert recall_of(llm).sequences == {} and recall_of(llm).dropped.chunks.num_free == free
    if policy != "pressure":  # which preempts less
        assert stats.preemptions > 0
        assert (stats.swapped_in > 0) == (swap == "always")


@pytest.mark.parametrize("dtype", thinned(["auto", "int8", "int6_int4", "int4", "int6_int4_hadamard"], 4))
def test_the_reported_bound_is_above_the_true_mass(checkpoint: Path, dtype: str, monkeypatch: Any) -> None:
    compression = recalling("threshold", recall_dtype=dtype, recall_bound=0.2, recall_chunks=1)
    llm = make_llm(checkpoint, **SMALL | {"num_gpu_blocks_override": 200, "compression": compression})
    recall, found = recall_of(llm), []
    originals = originals_of(recall)
    inner = RecallingBackend._recall

    def observing(self: Any, layer: int, queries: torch.Tensor, group: RecallGroup, softmax: Any) -> None:
        inner(self, layer, queries, group, softmax)
        found.append((true_mass(recall, originals[layer], layer, queries, group), group.masses[-1]))

    monkeypatch.setattr(RecallingBackend, "_recall", observing)
    outputs = llm.generate(PROMPTS, greedy(100), use_tqdm=False)
    assert found and all((mass <= bound + 1e-5).all() for mass, bound in found)
    if dtype == "auto":
        assert all(torch.allclose(mass.float(), bound, atol=1e-4) for mass, bound in found)
    for output in outputs:
        worst, average = output.metrics.missing_mass_max, output.metrics.missing_mass_mean
        assert worst is not None and average is not None and 0 < average <= worst < 1


def originals_of(recall: Recall) -> torch.Tensor:
    """The keys of dropped pairs as they were before they were stored: `[layers, chunks, kv_heads, CHUNK, head_dim]`."""
    store, keys = recall.dropped.store, torch.zeros(*recall.dropped.positions.shape, recall.cache.shape.head_dim)

    def storing(layer: int, places: Any, pairs: torch.Tensor, positions: torch.Tensor) -> None:
        keys[layer][places] = pairs[0]
        store(layer, places, pairs, positions)

    recall.dropped.store = storing
    return keys


def true_mass(
    recall: Recall, originals: torch.Tensor, layer: int, queries: torch.Tensor, group: RecallGroup
) -> torch.Tensor:
    """The largest share of attention that lies in dropped pairs, of each sequence of a group whose sequences have one
    query token: float64."""
    keys = recall.operations.gather_keys(
        [layer], group.tables, group.tables.shape[1] * recall.cache.shape.block_size
    ).double()
    others = originals[group.chunks].transpose(1, 2).flatten(2, 3).double()
    masses = []
    for row, last in enumerate(group.last_kv_index[:, -1].tolist()):
        num_dropped = int(group.last_dropped[row, -1]) + 1
        of_row = torch.cat((keys[row, :, : last + 1], others[row, :, :num_dropped]), dim=1)
        of_heads = queries[row, -1].double().unflatten(0, (of_row.shape[0], -1))
        shares = (of_heads @ of_row.mT * of_row.shape[-1] ** -0.5).softmax(-1)
        masses.append(shares[..., last + 1 :].sum(-1).max())
    return torch.stack(masses)


def test_batch_mates_change_nothing(checkpoint: Path) -> None:
    options = SMALL | {"num_gpu_blocks_override": 200, "compression": recalling("threshold", recall_period=3)}
    llm = make_llm(checkpoint, **options)
    together = tokens(llm, PROMPTS, greedy(60))
    assert [tokens(llm, [prompt], greedy(60))[0] for prompt in PROMPTS] == together
    assert llm.stats().recalled_bytes > 0


def test_a_tier_without_room_reports_that_all_may_be_missing(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, **SMALL | {"compression": recalling("pressure")})
    recall_of(llm).dropped.chunks.allocate(recall_of(llm).dropped.chunks.num_free)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)
    assert any(output.metrics.missing_mass_max == 1 for output in outputs)
    assert llm.stats().recalled_bytes == 0


@pytest.mark.parametrize(
    ("compression", "options", "words"),
    [
        ({"recall_period": 0}, {}, "recall_period=0 .* at least 1"),
        ({"recall_period": 2, "recall_bound": 0.1}, {}, "recall_bound=0.1 .* give one"),
        ({"recall_period": 1, "recall_dtype": "int3"}, {}, "recall_dtype='int3' .* choose one of"),
        ({"recall_period": 1, "method": "sliding_window"}, {}, "method='sliding_window' .* with recall_period"),
        ({"recall_period": 1}, {"kv_offloading_size": None}, "kv_offloading_size=None .* a number of GiB"),
        ({"recall_period": 1}, {"tensor_parallel_size": 4}, "tensor_parallel_size=4 .* 2 KV heads with recall_period"),
        ({"recall_period": 1, "recall_dtype": "int8"}, {"kv_cache_dtype": "int4"}, "recall_dtype='int8' .* already"),
    ],
)
def test_refusals(checkpoint: Path, compression: dict, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config = paper_compression(**{"method": "keydiff", "policy": "pressure", "buffer": 4} | compression)
        LLM(checkpoint, **{"kv_offloading_size": 0.1, "compression": config} | options)
