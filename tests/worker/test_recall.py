"""KV pairs that come back, in the engine: where each of them is, what it holds, and the bound that is reported."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, ConfigError, SamplingParams
from kvllm.kvcache.tiers.dropped_pairs import CHUNK, read_pairs
from kvllm.worker.recall import CompressedSequence, Recall
from kvllm.worker.recalling_backend import RecallGroup, RecallingBackend
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import greedy, make_llm, random_prompts, tokens

PROMPTS = random_prompts(256, (3, 17, 40, 63, 30))
POLICIES: dict[str, dict[str, Any]] = {
    "pressure": {"window_blocks": 3, "period": 8},
    "periodic": {"window_blocks": 3, "period": 8, "retain_tokens": 13},
    "threshold": {"threshold_tokens": 90, "budget_tokens": 70, "protect_prompt": True},
    "standalone": {"window_blocks": 24, "retain_blocks": 12},
}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 40, "block_size": 8, "max_num_seqs": 8, "watermark": 0.0}
SMALL |= {"max_num_batched_tokens": 64, "kv_offloading_size": 0.02}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path, "qwen3", head_dim=32, num_hidden_layers=2)
    return path


def recalling(policy: str, **options: Any) -> CompressionConfig:
    recall = {} if "recall_bound" in options else {"recall_period": 1}
    return CompressionConfig(method="keydiff", policy=policy, buffer=4, **POLICIES[policy] | recall | options)


def recall_of(llm: LLM) -> Recall:
    recall = llm.llm_engine.executor.runner.recall
    assert isinstance(recall, Recall)
    return recall


class Watch:
    """Records every KV pair that the model computes, and holds the engine's sequences against them.

    pairs: by layer, head and position, the bytes of each key with its value that were computed there.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.runner = llm.llm_engine.executor.runner
        self.pairs: dict[tuple[int, int, int], set[bytes]] = defaultdict(set)
        self._take, self.runner.recall.take = self.runner.recall.take, self._take_ordered
        self.runner.model._compiled = None  # which calls no `project`
        for index, layer in enumerate(self.runner.model.layers):
            self._record(index, layer.attention)

    def _record(self, layer: int, attention: Any) -> None:
        project = attention.project

        def recording(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
            queries, keys, values = project(x, positions)
            for row, position in enumerate(positions.tolist()):
                for head in range(keys.shape[1]):
                    self.pairs[layer, head, position].add(bytes_of(keys[row, head], values[row, head]))
            return queries, keys, values

        attention.project = recording

    def _take_ordered(self, job: Any, state: Any, blocks: Any, kept: torch.Tensor) -> None:
        """A compression finds its region in the order of positions."""
        sequence = self.runner.recall.sequences.get(job.seq_id)
        if sequence:
            of_region = sequence.positions[..., job.first_block * self.runner.block_size :]
            assert (of_region.diff(dim=-1) > 0).all()
        self._take(job, state, blocks, kept)

    def check(self) -> None:
        """Residents and dropped pairs of a sequence are all its pairs, each once, as they were computed."""
        recall = self.runner.recall
        owned = [chunk for sequence in recall.sequences.values() for chunk in sequence.chunks]
        assert len(set(owned)) == len(owned)
        for seq_id in recall.sequences.keys() & self.runner.states.keys():
            self._check(recall, self.runner.states[seq_id], recall.sequences[seq_id])

    def _check(self, recall: Recall, state: Any, sequence: CompressedSequence) -> None:
        assert sequence.is_complete and sequence.num_dropped == state.dropped
        num_known, size = sequence.positions.shape[-1], recall.cache.shape.block_size
        table = torch.from_numpy(self.runner.tables[0].table[state.table_slot]).long()
        index, dropped = torch.arange(state.cached_length), torch.arange(sequence.num_dropped)
        chunks = torch.tensor(sequence.chunks)[dropped // CHUNK]
        for layer, of_layer in enumerate(sequence.positions):
            for head, known in enumerate(of_layer):
                heads = torch.tensor(head)
                residents = torch.cat((known, (index[num_known:] + state.dropped).int()))
                there = chunks, heads, dropped % CHUNK
                others = recall.dropped.positions[layer][there]
                positions = torch.cat((residents, others))
                assert positions.sort().values.tolist() == list(range(state.logical_length))
                here = read_pairs(recall.cache, layer, (table[index // size], heads, index % size))
                pairs = torch.cat((here, read_pairs(recall.dropped.cache, layer, there)), dim=1)
                for position, key, value in zip(positions.tolist(), *pairs, strict=True):
                    assert bytes_of(key, value) in self.pairs[layer, head, position]


def bytes_of(key: torch.Tensor, value: torch.Tensor) -> bytes:
    return torch.cat((key, value)).float().numpy().tobytes()


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
    free = recall_of(llm).dropped.num_free
    run(llm, Watch(llm))
    stats = llm.stats()
    tokens(llm, PROMPTS[:1], greedy(2))  # with a plan that drops the last of the others
    assert stats.recalled_bytes > 0
    assert recall_of(llm).sequences == {} and recall_of(llm).dropped.num_free == free
    if policy != "pressure":  # which preempts less
        assert stats.preemptions > 0
        assert (stats.swapped_in > 0) == (swap == "always")


@pytest.mark.parametrize("dtype", ["auto", "int8", "int8_int4", "int4"])
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
    keys = recall.operations.gather_keys(layer, group.tables).double()
    others = originals[group.chunks].transpose(1, 2).flatten(2, 3).double()
    masses = []
    for row, last in enumerate(group.last_kv_index[:, -1].tolist()):
        num_dropped = int(group.num_dropped[row])
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
    recall_of(llm).dropped.allocate(recall_of(llm).dropped.num_free)
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
        ({"recall_period": 1}, {"tensor_parallel_size": 2}, "tensor_parallel_size=2 .* with recall_period"),
        ({"recall_period": 1, "recall_dtype": "int8"}, {"kv_cache_dtype": "int4"}, "recall_dtype='int8' .* already"),
    ],
)
def test_refusals(checkpoint: Path, compression: dict, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config = CompressionConfig(**{"method": "keydiff", "policy": "pressure", "buffer": 4} | compression)
        LLM(checkpoint, **{"kv_offloading_size": 0.1, "compression": config} | options)
