"""Where each KV pair of an engine with recall is, and whether it is what the model computed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from kvllm import LLM
from kvllm.kvcache.tiers.chunks import CHUNK
from kvllm.kvcache.tiers.dropped_pairs import read_pairs
from kvllm.worker.features.recall import Recall
from kvllm.worker.features.recalling_backend import CompressedSequence
from kvllm.worker.inline import InlineExecutor
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.windows import Move
from tests.helpers.features import feature_of


def runner_of(llm: LLM) -> ModelRunner:
    assert isinstance(llm.llm_engine.executor, InlineExecutor)
    return llm.llm_engine.executor.runner


def recall_of(llm: LLM) -> Recall:
    return feature_of(runner_of(llm), Recall)


class Watch:
    """Records every KV pair that the model computes, and holds the engine's sequences against them.

    pairs: by layer, head and position, the bytes of each key with its value that were computed there.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.runner = runner_of(llm)
        self.pairs: dict[tuple[int, int, int], set[bytes]] = defaultdict(set)
        self.recall = recall_of(llm)
        self._take, self.recall.take = self.recall.take, self._take_ordered
        self.runner.model._compiled = None  # which calls no `project`
        for index, layer in enumerate(self.runner.model.layers):
            self._record(index, layer.attention)

    def _record(self, layer: int, attention: Any) -> None:
        project = attention.project

        def recording(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
            queries, keys, values = project(x, positions)
            for head in range(keys.shape[1]):
                for position, pair in zip(positions.tolist(), pairs_of(keys[:, head], values[:, head]), strict=True):
                    self.pairs[layer, head, position].add(pair)
            return queries, keys, values

        attention.project = recording

    def _take_ordered(self, move: Move) -> None:
        """A compression finds its region in the order of positions."""
        sequence = self.recall.sequences.get(move.seq_id)
        if sequence:
            of_region = sequence.positions[..., move.job.first_block * self.runner.block_size :]
            assert (of_region.diff(dim=-1) > 0).all()
        self._take(move)

    def check(self) -> None:
        """Residents and dropped pairs of a running sequence are all its pairs, each once, as they were computed."""
        recall = self.recall
        owned = [chunk for sequence in recall.sequences.values() for chunk in sequence.held.chunks]
        assert len(set(owned)) == len(owned)
        layers, _, heads, _ = recall.dropped.positions.shape
        nothing = CompressedSequence(torch.empty((layers, heads, 0), dtype=torch.int32), torch.empty(0))
        for seq_id, state in self.runner.states.items():
            self._check(recall, state, recall.sequences.get(seq_id, nothing))

    def _check(self, recall: Recall, state: Any, sequence: CompressedSequence) -> None:
        assert sequence.held.is_complete and sequence.held.count == state.dropped
        num_known, size = sequence.positions.shape[-1], recall.cache.shape.block_size
        table = torch.from_numpy(self.runner.tables.parts[0].table[state.table_slot]).long()
        index, dropped = torch.arange(state.cached_length), torch.arange(sequence.held.count)
        chunks = torch.tensor(sequence.held.chunks, dtype=torch.int64)[dropped // CHUNK]
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
                for position, pair in zip(positions.tolist(), pairs_of(*pairs), strict=True):
                    assert pair in self.pairs[layer, head, position]


def pairs_of(keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
    """The bytes of each key with its value, of `[n, head_dim]` each."""
    return [row.tobytes() for row in torch.cat((keys, values), dim=-1).float().numpy()]
