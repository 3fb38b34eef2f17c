"""Caches with a few sequences in them and queries over them, and literal dense attention in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.layer import PLAIN, LayerAttention
from kvllm.attention.registry import make_backend
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.plain import TorchOperations
from tests.helpers.caches import head_dim_for

KV_HEADS = 2
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
# A decode, a first token, a whole prompt, a chunk after cached entries, a recomputation with stride 3, a long decode.
MIXED = [[64], [0], list(range(35)), list(range(40, 59)), list(range(7, 80, 3)), [600]]
# Ends of tiles (64 entries) and of segments (512), one row each, and a chunk across both.
EDGES = [[62], [63], [64], [511], [512], [513], [1023], list(range(505, 580))]
# Heads of different lengths: the query tokens of a sequence, `packed_len`, and the lengths of both heads.
RAGGED = [
    ([64], 50, (50, 31)),  # one head has none
    ([64], 64, (0, 10)),  # one head has nothing but the row's own entry
    (list(range(40, 59)), 40, (17, 0)),  # a chunk right after the packed part
    (list(range(23, 80, 3)), 20, (3, 20)),  # a recomputation with stride 3
    (list(range(35)), 0, (0, 0)),  # a prompt
    ([600], 0, (7, 99)),  # never compressed: the lengths mean nothing
    ([700], 650, (5, 649)),  # across tiles and segments, and a hole of one entry
    (list(range(1100, 1130)), 1090, (64, 513)),
    ([300], 256, (256, 256)),  # compressed, and no hole
]
NEVER = 2**31 - 1
# Of caches whose KV pairs are scored.
SCORED = ({}, {"group": 3, "head_dim": 32}, {"group": 1, "block_size": 64, "head_dim": 96})
# Bits that are NaN, or that make a code or a scale one.
GARBAGE = {
    torch.float32: math.nan,
    torch.float16: math.nan,
    torch.bfloat16: math.nan,
    torch.uint8: 255,
    torch.int32: 0x7FC07FC0,
}
# Windows beside the ends of tiles and segments, within a block and longer than a sequence; with learned scores that are
# far below the others, and far above.
OPTIONS = {
    "plain": PLAIN,
    "window 1": LayerAttention(window=1),
    "window 5": LayerAttention(window=5),
    "window 64": LayerAttention(window=64),
    "window 100": LayerAttention(window=100),
    "window 513": LayerAttention(window=513),
    "window 5000": LayerAttention(window=5000),
    "soft cap": LayerAttention(soft_cap=0.5),
    "sinks": LayerAttention(sinks=True),
    "all": LayerAttention(window=70, soft_cap=2.0, sinks=True),
}


@dataclass
class AttentionCase:
    """A cache with a few sequences in it, and query rows over them. options, sinks: of the only layer. originals: keys
    and values of each sequence before a quantized cache rounded them."""

    cache: PagedKVCache
    keys: list[torch.Tensor]  # per sequence [entries, kv_heads, head_dim]
    values: list[torch.Tensor]
    queries: torch.Tensor
    batch: AttentionBatch
    options: LayerAttention = PLAIN
    sinks: torch.Tensor | None = None
    originals: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def scale(self) -> float:
        return self.cache.shape.head_dim**-0.5

    def backend(self, name: str) -> AttentionBackend:
        return make_backend(name, self.cache, self.queries.shape[1], self.scale, (self.options,))

    def run(self, name: str = "cpu") -> torch.Tensor:
        backend = self.backend(name)
        return backend.run(0, self.queries, backend.plan(self.batch), self.sinks)

    def to(self, device: str) -> AttentionCase:
        """The case with a cache, queries and a batch that are on a device; keys and values stay."""
        cache = PagedKVCache(self.cache.shape, self.cache.num_blocks, device)
        cache.data.view(torch.uint8).copy_(self.cache.data.view(torch.uint8))
        cache.scores = None if self.cache.scores is None else self.cache.scores.to(device, copy=True)
        tensors = {name: value for name, value in vars(self.batch).items() if isinstance(value, torch.Tensor)}
        batch = replace(self.batch, **{name: value.to(device) for name, value in tensors.items()})
        return replace(self, cache=cache, queries=self.queries.to(device), batch=batch)

    def rows(self, sequence: int) -> slice:
        return slice(*self.batch.query_start_loc[sequence : sequence + 2].tolist())


def make_case(
    last_kv_index: list[list[int]],
    *,
    block_size: int = 16,
    head_dim: int = 64,
    group: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
    shared: bool = False,
    seed: int = 0,
) -> AttentionCase:
    """One sequence per list in `last_kv_index`. Slots that hold no entry are NaN, unused table columns invalid. shared:
    values are the keys.

    Keys and values of a quantized cache are what it holds, in float32. `head_dim` is made one that its format can have.
    """
    if kv_cache_dtype != "auto":
        head_dim = head_dim_for(kv_cache_dtype, head_dim)
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    lengths = [rows[-1] + 1 for rows in last_kv_index]
    num_blocks = [-(-length // block_size) for length in lengths]
    kv_format = KV_FORMATS.get(kv_cache_dtype)
    shape = CacheShape(1, KV_HEADS, head_dim, block_size, dtype, kv_format=kv_format, shared=shared)
    cache = PagedKVCache(shape, sum(num_blocks) + 3)
    cache.data.view(torch.uint8).fill_(255)  # NaN in every dtype, or a scale that is one
    operations = TorchOperations(cache)
    free = torch.randperm(cache.num_blocks, generator=generator).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + 2), -7, dtype=torch.int32)
    keys, values, originals = [], [], []
    for sequence, (length, count) in enumerate(zip(lengths, num_blocks, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(count)])
        tables[sequence, :count] = blocks
        keys.append(randn(length, KV_HEADS, head_dim))
        values.append(keys[-1] if shared else randn(length, KV_HEADS, head_dim))
        originals.append((keys[-1], values[-1]))
        entries = torch.arange(length)
        slots = blocks[entries // block_size] * block_size + entries % block_size
        operations.store(0, keys[-1], values[-1], slots)
        if cache.shape.kv_format:
            stored = zip(cache.planes, (keys[-1], values[-1]), strict=True)
            keys[-1], values[-1] = (plane.decode(plane.encode(vectors), torch.float32) for plane, vectors in stored)
    index = torch.tensor([i for rows in last_kv_index for i in rows], dtype=torch.int32)
    starts = torch.tensor([0] + [len(rows) for rows in last_kv_index]).cumsum(0).int()
    queries = randn(len(index), KV_HEADS * group, head_dim)
    return AttentionCase(cache, keys, values, queries, AttentionBatch(starts, index, tables), originals=originals)


def with_options(case: AttentionCase, options: LayerAttention) -> AttentionCase:
    """The case with other options of its layer. What lies before every window is NaN, in a block that no one holds."""
    tables, block_size = case.batch.block_tables.clone(), case.cache.shape.block_size
    unused = min(set(range(case.cache.num_blocks)) - set(tables.flatten().tolist()))
    for sequence in range(len(case.keys) if options.window is not None else 0):
        first = max(0, int(case.batch.last_kv_index[case.rows(sequence).start]) + 1 - options.window)
        behind = torch.arange(first)
        blocks = tables[sequence].long()[behind // block_size]
        for part in case.cache.parts:
            part[0, :, blocks, :, behind % block_size] = GARBAGE[part.dtype]
        tables[sequence, : first // block_size] = unused
    sinks = torch.linspace(-9, 9, case.queries.shape[1]) if options.sinks else None
    return replace(case, batch=replace(case.batch, block_tables=tables), options=options, sinks=sinks)


def make_ragged_case(**options) -> AttentionCase:
    """The case RAGGED; slots that were evicted from a head are NaN."""
    case = make_case([rows for rows, _, _ in RAGGED], **options)
    batch = replace(
        case.batch,
        packed_len=torch.tensor([packed_len for _, packed_len, _ in RAGGED], dtype=torch.int32),
        head_lengths=torch.tensor([[lengths for _, _, lengths in RAGGED]], dtype=torch.int32),
    )
    block_size = case.cache.shape.block_size
    for sequence, values in enumerate(case.values):
        for head in range(KV_HEADS):
            (entries,) = hole(batch, sequence, head, len(values)).nonzero(as_tuple=True)
            blocks = batch.block_tables[sequence].long()[entries // block_size]
            for part in case.cache.parts:
                part[0, :, blocks, head, entries % block_size] = GARBAGE[part.dtype]
    return replace(case, batch=batch)


def dense_attention(case: AttentionCase) -> torch.Tensor:
    """Softmax attention of every row over its own entries, written out, in float64."""
    output = torch.empty(case.queries.shape, dtype=torch.float64)
    group = case.queries.shape[1] // KV_HEADS
    for sequence, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        rows = case.rows(sequence)
        later = torch.arange(len(keys)) > case.batch.last_kv_index[rows, None]
        for head in range(case.queries.shape[1]):
            hidden = later | hole(case.batch, sequence, head // group, len(keys))
            scores = case.queries[rows, head].double() @ keys[:, head // group].double().T * case.scale
            if case.options.window is not None:
                oldest = case.batch.last_kv_index[rows, None] + 1 - case.options.window
                hidden |= torch.arange(len(keys)) < oldest
            if case.options.soft_cap is not None:
                scores = case.options.soft_cap * (scores / case.options.soft_cap).tanh()
            scores.masked_fill_(hidden, -torch.inf)
            if case.sinks is not None:
                scores = torch.cat((scores, case.sinks[head].double().expand(len(scores), 1)), dim=1)
            output[rows, head] = scores.softmax(-1)[:, : len(keys)] @ values[:, head // group].double()
    return output


def hole(batch: AttentionBatch, sequence: int, kv_head: int, length: int) -> torch.Tensor:
    """bool `[length]`, the entries that a head of layer 0 lacks."""
    if batch.packed_len is None or batch.head_lengths is None:
        return torch.zeros(length, dtype=torch.bool)
    entries = torch.arange(length)
    return (entries >= batch.head_lengths[0, sequence, kv_head]) & (entries < batch.packed_len[sequence])


def assert_matches_dense(case: AttentionCase, name: str, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[case.queries.dtype]
    torch.testing.assert_close(case.run(name).double(), dense_attention(case), atol=tolerance, rtol=tolerance)


def assert_each_layer_has_its_own_holes(name: str) -> None:
    """The same entries in two layers, with the lengths of the heads exchanged."""
    case = make_case([[40]], head_dim=16)
    shape = replace(case.cache.shape, num_layers=2)
    cache = PagedKVCache(shape, case.cache.num_blocks)
    cache.data.copy_(case.cache.data.expand_as(cache.data))
    lengths = torch.tensor([[[9, 25]], [[25, 9]]], dtype=torch.int32)
    batch = replace(case.batch, packed_len=torch.tensor([30], dtype=torch.int32), head_lengths=lengths)
    backend = make_backend(name, cache, case.queries.shape[1], case.scale)
    for layer in range(2):
        found = backend.run(layer, case.queries, backend.plan(batch))
        one = replace(case, batch=replace(batch, head_lengths=lengths[layer : layer + 1]))
        torch.testing.assert_close(found.double(), dense_attention(one), atol=2e-6, rtol=2e-6)


def assert_bits_of_a_row_do_not_depend_on_the_batch(
    group: int, dtype: torch.dtype, layer: LayerAttention = PLAIN, **options
) -> None:
    _assert_rows_alone(with_options(make_case(MIXED + EDGES, group=group, dtype=dtype, **options), layer))


def assert_bits_of_sums_that_cancel(dtype: torch.dtype) -> None:
    """Every third query has weights of 1 for values whose sum is little but its rounding."""
    case = make_case([list(range(100))], group=1, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    two = 4 * torch.randint(-120, 121, (33, 2, KV_HEADS, 64), generator=generator)
    values = torch.cat((two, -two.sum(1, keepdim=True)), 1).flatten(0, 1)
    values = torch.cat((1e-4 * torch.randn(1, KV_HEADS, 64, generator=generator), values)).to(dtype)
    entries = torch.arange(100)
    slots = case.batch.block_tables[0].long()[entries // 16] * 16 + entries % 16
    TorchOperations(case.cache).store(0, case.keys[0], values, slots)
    _assert_rows_alone(replace(case, queries=torch.zeros_like(case.queries)))


def _assert_rows_alone(case: AttentionCase) -> None:
    together = case.run()
    for sequence in range(len(case.keys)):
        rows = case.rows(sequence)
        for row in range(rows.start, rows.stop):
            alone = replace(
                case,
                queries=case.queries[row : row + 1],
                batch=AttentionBatch(
                    torch.tensor([0, 1], dtype=torch.int32),
                    case.batch.last_kv_index[row : row + 1],
                    case.batch.block_tables[sequence : sequence + 1],
                ),
            )
            assert torch.equal(alone.run()[0], together[row])


def assert_later_entries_stay_hidden(dtype: torch.dtype, **options) -> None:
    case = make_case([list(range(100))], dtype=dtype, group=2, **options)
    before = case.run()
    blocks = case.batch.block_tables[0].long()
    for first_hidden in (99, 70, 64, 31):
        entries = torch.arange(first_hidden, 100)
        for part in case.cache.parts:
            part[0, :, blocks[entries // 16], :, entries % 16] = GARBAGE[part.dtype]
        after = case.run()
        assert torch.equal(after[:first_hidden], before[:first_hidden])
        assert after[first_hidden:].isnan().all()


def make_scored_case(tokens: list[tuple[int, int]], **options) -> AttentionCase:
    """Sequences of one query token each, with its KV pair's index and the first that is scored; the cache has scores of
    garbage."""
    case = make_case([[index] for index, _ in tokens], **options)
    case.cache.scores = torch.rand(1, case.cache.num_blocks, KV_HEADS, case.cache.shape.block_size) + 1
    starts = torch.tensor([start for _, start in tokens], dtype=torch.int32)
    return replace(case, batch=replace(case.batch, scored_from=starts))


def dense_scores(case: AttentionCase) -> torch.Tensor:
    """The scores of the cache after a step, written out sequence by sequence, in float64."""
    assert case.cache.scores is not None and case.batch.scored_from is not None
    scores, block_size = case.cache.scores.double(), case.cache.shape.block_size
    for sequence, index in enumerate(case.batch.last_kv_index.tolist()):
        table = case.batch.block_tables[sequence].long()
        queries = case.queries[sequence].double().unflatten(0, (KV_HEADS, -1))
        pairs = torch.arange(min(int(case.batch.scored_from[sequence]), index + 1), index + 1)
        keys = case.keys[sequence][pairs].double().transpose(0, 1)
        logits = queries @ keys.mT * case.scale
        if case.options.soft_cap is not None:
            logits = case.options.soft_cap * (logits / case.options.soft_cap).tanh()
        if case.sinks is not None:
            logits = torch.cat((logits, case.sinks.double().view(KV_HEADS, -1, 1)), dim=-1)
        added = logits.softmax(-1)[..., : len(pairs)].square().sum(1)
        places = (0, table[pairs // block_size], slice(None), pairs % block_size)
        before = scores[places].T
        before[:, pairs == index] = 0
        scores[places] = (before + added).T
    return scores


def assert_scores(
    name: str, layer: LayerAttention = PLAIN, *, short: bool = False, tolerance: float = 2e-6, **common
) -> None:
    """A backend adds to the scores of the KV pairs that are scored, whatever the lengths, and leaves all others; its
    output is the same. short: no long sequence, where kernels are interpreted."""
    tokens = [(0, 0), (16, 16), (15, 16), (95, 19), (130, 16), (160, 0), (700, 640), (1500, 512), (9, NEVER)]
    for options in SCORED:
        chosen = [(index, start) for index, start in tokens if not short or index < 300]
        case = with_options(make_scored_case(chosen, **options, **common), layer)
        expected, before = dense_scores(case), case.cache.scores.clone()
        output = case.run(name)
        unscored = replace(case.batch, scored_from=None)
        assert torch.equal(output, replace(case, batch=unscored).run(name))
        torch.testing.assert_close(case.cache.scores.double(), expected, atol=tolerance, rtol=tolerance)
        changed = case.cache.scores != before
        assert changed.any() and not changed[expected == before].any()
