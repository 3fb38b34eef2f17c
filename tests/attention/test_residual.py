"""Attention that reads recent KV pairs as they were, against a literal dense attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvllm._extension import operator
from kvllm.attention.base import AttentionBatch
from kvllm.attention.cpu import CpuBackend
from kvllm.attention.layer import LayerAttention
from kvllm.attention.registry import make_backend
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.worker.features.residual import KVResidual
from tests.helpers.attention_cases import (
    KV_HEADS,
    AttentionCase,
    dense_attention,
    dense_scores,
    make_case,
    make_scored_case,
)
from tests.helpers.examples import thinned

FORMATS = pytest.mark.parametrize("name", list(KV_FORMATS))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Decodes, a first token, a whole prompt, chunks after others and across the ends of tiles and segments.
ROWS = [[64], [0], list(range(35)), list(range(40, 59)), [600], [63], [511], [512], list(range(505, 580)), [5]]
# Of each sequence: KV pairs that a compression dropped, and positions that were found in the prefix cache.
DROPPED = [0, 0, 0, 7, 300, 64, 0, 513, 11, 3]
FOUND = [0, 0, 0, 16, 0, 120, 500, 0, 20, 4]


class ResidualCase:
    """A case whose recent KV pairs are held, too, in slots in an order of their own."""

    def __init__(self, case: AttentionCase, size: int, dropped: list[int], found: list[int]) -> None:
        self.case, self.size, self.dropped, self.found = case, size, dropped, found
        count = len(case.keys)
        self.slots = torch.randperm(count + 2)[:count]
        self.residual = KVResidual(case.cache.shape, size, count + 2)
        self.residual.pairs.fill_(torch.nan)
        for sequence, pairs in enumerate(case.originals):
            self.residual.first[int(self.slots[sequence])] = found[sequence]
            own = int(case.batch.last_kv_index[case.rows(sequence).start])
            for index in range(max(0, own - size, found[sequence] - dropped[sequence]), own):
                row = (index + dropped[sequence]) % size
                for plane, vectors in enumerate(pairs):
                    self.residual.pairs[0, plane, self.slots[sequence], row] = vectors[index]

    def run(self, tokens: slice | None = None, sequence: int | None = None) -> torch.Tensor:
        """Attention of all query tokens; or of some of a sequence's."""
        case, sequences = self.case, range(len(self.case.keys)) if sequence is None else [sequence]
        tokens = tokens or slice(0, len(case.queries))
        index = case.batch.last_kv_index
        of_token = torch.cat([torch.full((index[case.rows(s)].shape), s) for s in range(len(case.keys))])[tokens]
        positions = index[tokens].long() + torch.tensor(self.dropped)[of_token]
        batch = case.batch
        if sequence is not None:
            starts = torch.tensor([0, len(positions)], dtype=torch.int32)
            batch = AttentionBatch(starts, index[tokens], case.batch.block_tables[sequence : sequence + 1])
        step = self.residual.step(self.slots[list(sequences)].numpy(), positions)
        news = [
            torch.stack([case.originals[s][plane][i] for s, i in zip(of_token.tolist(), index[tokens], strict=True)])
            for plane in range(2)
        ]
        step.new_pairs = news[0], news[1]
        backend = CpuBackend(case.cache, case.queries.shape[1], case.scale, (case.options,))
        return backend.run(0, case.queries[tokens], backend.plan(replace(batch, residual=step)), case.sinks)

    def keys_and_values(self, sequence: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What query token `row` of a sequence attends, in float64."""
        case = self.case
        own = int(case.batch.last_kv_index[case.rows(sequence).start + row])
        first = max(0, own + 1 - self.size, self.found[sequence] - self.dropped[sequence])
        pairs = (case.keys[sequence], case.values[sequence])
        mixed = [
            torch.cat((rounded[:first].double(), original[first:].double()))
            for rounded, original in zip(pairs, case.originals[sequence], strict=True)
        ]
        return mixed[0], mixed[1]

    def dense(self) -> torch.Tensor:
        output = torch.empty(self.case.queries.shape, dtype=torch.float64)
        for sequence in range(len(self.case.keys)):
            rows = self.case.rows(sequence)
            for row in range(rows.stop - rows.start):
                keys, values = self.keys_and_values(sequence, row)
                token = rows.start + row
                one = replace(
                    self.case,
                    keys=[keys],
                    values=[values],
                    queries=self.case.queries[token : token + 1],
                    batch=AttentionBatch(torch.tensor([0, 1]), self.case.batch.last_kv_index[token : token + 1], None),
                )
                output[token] = dense_attention(one)[0]
        return output


def residual_case(size: int, **options) -> ResidualCase:
    torch.manual_seed(0)
    return ResidualCase(make_case(ROWS, **options), size, DROPPED, FOUND)


@FORMATS
@DTYPES
@pytest.mark.parametrize(
    "size, block_size, head_dim, group",
    [pytest.param(1, 16, 64, 4, marks=pytest.mark.long), (32, 1, 32, 1), (64, 256, 96, 3)],
)
def test_matches_dense(name: str, dtype: torch.dtype, size: int, block_size: int, head_dim: int, group: int) -> None:
    held = residual_case(size, block_size=block_size, head_dim=head_dim, group=group, dtype=dtype, kv_cache_dtype=name)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(held.run().double(), held.dense(), atol=tolerance, rtol=tolerance)


def test_matches_dense_with_a_soft_cap_and_sinks() -> None:
    held = residual_case(32, kv_cache_dtype="int4")
    sinks = torch.linspace(-2, 2, held.case.queries.shape[1])
    held.case = replace(held.case, options=LayerAttention(soft_cap=0.5, sinks=True), sinks=sinks)
    torch.testing.assert_close(held.run().double(), held.dense(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size, window", [(32, 33), (32, 48), (48, 48), (64, 520)])
def test_matches_dense_in_a_sliding_window(size: int, window: int) -> None:
    held = residual_case(size, kv_cache_dtype="int4")
    held.case = replace(held.case, options=LayerAttention(window=window))
    torch.testing.assert_close(held.run().double(), held.dense(), atol=1e-4, rtol=1e-4)


def test_what_is_held_matters() -> None:
    """Rounding to 4 bits is plain to see, and a residual of all tokens undoes it."""
    case = make_case([list(range(48))], kv_cache_dtype="int4")
    exact = replace(case, keys=[case.originals[0][0]], values=[case.originals[0][1]])
    rounded = (case.run().double() - dense_attention(exact)).abs().max()
    held = (ResidualCase(case, 48, [0], [0]).run().double() - dense_attention(exact)).abs().max()
    assert rounded > 1e-2 and held < 1e-5


@pytest.mark.parametrize("name", thinned(KV_FORMATS, 3))
@DTYPES
def test_steps_of_one_token_have_the_bits_of_a_chunk(name: str, dtype: torch.dtype) -> None:
    """The rows that are held are those of the tokens before, whatever the steps were."""
    for size in (16, 70):
        together = residual_case(size, dtype=dtype, group=3, kv_cache_dtype=name)
        expected = together.run()
        alone = residual_case(size, dtype=dtype, group=3, kv_cache_dtype=name)
        for sequence in range(len(ROWS)):
            rows = alone.case.rows(sequence)
            for begin in range(rows.start, rows.stop, 1 if sequence % 2 else 5):
                tokens = slice(begin, min(rows.stop, begin + (1 if sequence % 2 else 5)))
                assert torch.equal(alone.run(tokens, sequence), expected[tokens])
        assert torch.equal(alone.residual.pairs.nan_to_num(9), together.residual.pairs.nan_to_num(9))


@FORMATS
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    outputs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        decode, prefill = make_case([[1500]], kv_cache_dtype=name), make_case([list(range(300))], kv_cache_dtype=name)
        outputs.append(torch.cat([ResidualCase(case, 40, [0], [0]).run() for case in (decode, prefill)]))
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])


@FORMATS
def test_scores_are_of_what_is_attended(name: str) -> None:
    tokens = [(0, 0), (16, 16), (95, 16), (111, 16), (130, 16), (160, 0), (700, 640), (1500, 512)]
    case = make_scored_case(tokens, kv_cache_dtype=name)
    torch.manual_seed(0)
    held = ResidualCase(case, 32, [0] * len(tokens), [0] * len(tokens))
    attended = [held.keys_and_values(sequence, 0)[0] for sequence in range(len(tokens))]
    expected = dense_scores(replace(case, keys=attended))
    held.run()
    assert case.cache.scores is not None
    torch.testing.assert_close(case.cache.scores.double(), expected, atol=1e-4, rtol=1e-4)


def test_other_backends_say_that_they_do_not_read_it() -> None:
    cache = PagedKVCache(CacheShape(1, 2, 64, 256, torch.bfloat16, kv_format=KV_FORMATS["int4"]), 2)
    assert make_backend("auto", cache, 4, 1.0, residual=True).name == "cpu"
    with pytest.raises(ConfigError, match="'reference' does not read kv_residual_tokens: use 'cpu'"):
        make_backend("reference", cache, 4, 1.0, residual=True)
    wide = PagedKVCache(CacheShape(1, 2, 80, 256, torch.bfloat16, kv_format=KV_FORMATS["int4"]), 2)
    with pytest.raises(ConfigError, match="no attention backend for cpu reads kv_residual_tokens"):
        make_backend("auto", wide, 4, 1.0, residual=True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"positions": torch.tensor([2, 4])}, "position 4 of query token 1 does not follow"),
        ({"residual_first": torch.tensor([6], dtype=torch.int32)}, "or lies before 6"),
        ({"positions": torch.tensor([40, 41])}, "attends 4 KV pairs as they were, and 3 in all"),
        ({"residual_slots": torch.tensor([3], dtype=torch.int32)}, "slot 3 of sequence 0 is none of 3"),
        ({"new_keys": torch.zeros(2, 1, 32)}, "new_keys"),
        ({"positions": None}, "kv_residual needs residual_slots, residual_first, positions"),
        ({"sliding_window": 3}, "a residual of 4 KV pairs is longer than a sliding window of 3"),
    ],
)
def test_the_operator_checks_its_arguments(change: dict, message: str) -> None:
    cache = PagedKVCache(CacheShape(1, KV_HEADS, 32, 16, torch.float32, kv_format=KV_FORMATS["int4"]), 2)
    cache.data.view(torch.uint8).zero_()
    arguments = {
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
        "last_kv_index": torch.tensor([2, 3], dtype=torch.int32),
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "packed_len": None,
        "head_lengths": None,
        "scores": None,
        "scored_from": None,
        "scale": 1.0,
        "kv_residual": KVResidual(cache.shape, 4, 3).pairs[0],
        "residual_slots": torch.tensor([1], dtype=torch.int32),
        "residual_first": torch.tensor([0], dtype=torch.int32),
        "positions": torch.tensor([2, 3]),
        "new_keys": torch.zeros(2, KV_HEADS, 32),
        "new_values": torch.zeros(2, KV_HEADS, 32),
    }
    attend = operator("paged_attention")
    assert attend(torch.zeros(2, 4, 32), cache.keys(0), cache.values(0), **arguments).shape == (2, 4, 32)
    with pytest.raises(RuntimeError, match=message):
        attend(torch.zeros(2, 4, 32), cache.keys(0), cache.values(0), **(arguments | change))
