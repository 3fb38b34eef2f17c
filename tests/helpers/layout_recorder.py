"""An executor that keeps a map of each sequence's cache, and what every method has to keep by dense attention.

The map says for every layer and head which position's KV pair lies where, or that there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.registry import METHODS
from kvllm.compression.statistics import QueryStatistics
from kvllm.core.policies import Standalone, Threshold
from kvllm.core.protocol import BlockCopy, CompressionJob, SequenceStart, StepPlan, StepResult
from kvllm.worker.features.attention_mass import AttentionMass
from kvllm.worker.features.observed_scores import PRIOR
from kvllm.worker.repetition import pieces
from tests.helpers.compressions import fitting
from tests.helpers.dense_decoder import DenseDecoder, attention_probabilities
from tests.helpers.features import feature_of
from tests.helpers.plans import scheduled_in
from tests.helpers.recorder import Accounts, assert_dense, block_table_of, kv_pairs_in, kv_pairs_of, poison
from tests.helpers.transformers_decoder import TransformersDecoder

MAX_MODEL_LEN = 200
BLOCK_SIZE = 8


def compression_config(method: str, policy: str, **options: Any) -> CompressionConfig:
    """Small, with odd numbers: most events move entries after the region, or end within a block."""
    sizes = {
        "threshold": {"threshold_tokens": 44, "budget_tokens": 25},
        "periodic": {"period": 4, "window_blocks": 2, "retain_tokens": 9},
        "pressure": {"period": 6, "window_blocks": 2, "retain_tokens": 8},
        "standalone": {"window_blocks": 18, "retain_tokens": 9},
    }[policy]
    common: dict[str, Any] = {"buffer": 4, "chunk_budget": 3, "max_chunk": 5, "query_window": 6}
    return CompressionConfig(**fitting(method, policy, **(common | sizes)) | options)


@dataclass
class Text:
    """The tokens and logits of a sequence, from its start to its end or preemption.

    layout: int64 `[layers, kv_heads, KV pairs]`, the position whose KV pair lies there, -1 where there is none.
    visible: bool `[layers, kv_heads, tokens, positions]`, the positions cached when a token was computed.
    logits: by position. resumed: whether some of its output was known when it started.
    """

    tokens: list[int]
    length: int
    layout: Tensor
    visible: Tensor
    resumed: bool
    logits: dict[int, Tensor] = field(default_factory=dict)
    num_events: int = 0

    def see(self, position: int) -> None:
        """A token is computed: its KV pair lies after the others, and it attends all of them."""
        own = torch.full((*self.layout.shape[:2], 1), position)
        self.layout = torch.cat((self.layout, own), dim=-1)
        self.visible[..., position, :] = positions_of(self.layout, self.visible.shape[-1])


@dataclass
class Event:
    """One region that was compressed: `size` entries from `start` on, of a cache that was laid out as `layout`.

    length: of the text. kept: offsets `[layers, kv_heads, any]`, padded with -1. moved: False if blocks were let go.
    queries: that it was scored with, by layer `[Hq, rows, d]`, or None. seed: that the method was given.
    """

    text: Text
    length: int
    start: int
    size: int
    retain: int
    layout: Tensor
    kept: Tensor
    moved: bool = True
    queries: list[Tensor] | None = None
    seed: int | None = None

    @property
    def region(self) -> Tensor:
        """The part of the layout that is compressed: `[layers, kv_heads, size]`."""
        return self.layout[..., self.start : self.start + self.size]

    def query_offsets(self, config: CompressionConfig) -> Tensor:
        """Where in the region the tokens are whose queries score."""
        offsets = torch.arange(self.size)
        match METHODS[config.method].spec.queries:
            case "window":
                return offsets
            case "buffer":
                return offsets[self.size - config.buffer :]
            case "recent":
                return offsets[-config.query_window :]
        return offsets[:0]

    def scoring(self, config: CompressionConfig) -> tuple[Tensor, Tensor]:
        """Positions of the tokens whose queries score, and what these see of the cache before the event: bool
        `[layers, kv_heads, rows, positions]`."""
        positions = self.region[..., self.query_offsets(config)]
        assert (positions == positions[0, 0]).all() and (positions >= 0).all()
        positions, size = positions[0, 0], self.text.visible.shape[-1]
        cached = positions_of(self.layout, size)
        return positions, cached[:, :, None] & (torch.arange(size) <= positions[:, None])


@dataclass
class MassRecord:
    """H2O's mass `[layers, kv_heads, KV pairs]` in the worker, after a step."""

    text: Text
    length: int
    layout: Tensor
    mass: Tensor


class Recorder(Accounts):
    """Runs plans on the real worker, and checks that a compression moves survivors bit for bit, and nothing else."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.llm_engine.executor, llm.config)
        self.events: list[Event] = []
        self.masses: list[MassRecord] = []
        self.released = 0
        self._selections: list[tuple[Tensor | None, Tensor, dict[str, Any]]] = []
        self._held: dict[int, list] = {}  # by sequence, of windows that are compressed later
        selector = self.runner.compressor.selector
        self._scored: list[tuple[Tensor, dict[str, Any]]] = []  # of each layer that waits for a choice
        self._select, selector.select = selector.select, self._record_selection
        self._score, selector.score = selector.score, self._record_score
        self._choose, selector.choose = selector.choose, self._record_choice

    def _record_selection(self, queries: Tensor | None, keys: Tensor, **options: Any) -> Tensor:
        kept = self._select(queries, keys, **options)
        self._selections.append((queries, kept, options))
        return kept

    def _record_score(self, queries: Tensor, keys: Tensor, **options: Any) -> Tensor:
        self._scored.append((queries, options))
        return self._score(queries, keys, **options)

    def _record_choice(self, scores: Tensor, **options: Any) -> Tensor:
        kept = self._choose(scores, **options)
        for (queries, offered), of_layer in zip(self._scored, kept.unflatten(0, (len(self._scored), -1)), strict=True):
            self._selections.append((queries, of_layer, offered))
        self._scored = []
        return kept

    def execute(self, plan: StepPlan) -> StepResult:
        self._logits, self._selections = [], []
        self._drop(plan)
        before = {seq_id: kv_pairs_of(self.runner, seq_id) for seq_id in self.alive} if plan.compressions else {}
        tables = {seq_id: block_table_of(self.runner, seq_id) for seq_id in self.alive}
        resumed = set(self.suspended)
        for start in plan.new_seqs:
            self._start(start)
            (table,) = start.tables
            if start.seq_id in resumed:  # it has come from the host, and may be compressed at once
                length = start.logical_length - table.dropped
                before[start.seq_id] = kv_pairs_in(self.runner.cache, table.blocks, length)
                tables[start.seq_id] = table.blocks
        result = self.inline.execute(plan)
        windows = self._windows()
        for job in plan.choices:
            held = self._held[job.seq_id] = self._held.get(job.seq_id, [])[: job.chosen]
            held += [next(windows) for _ in range(job.num_choices)]
        for job in plan.compressions:
            survives = self._survivors(job, windows)
            before[job.seq_id] = self._compress(job, before[job.seq_id], survives)
            self._check_table(job, tables[job.seq_id], plan.copies)
        assert next(windows, None) is None
        for seq_id, entries in before.items():
            evicted_mask = (self.alive[seq_id].layout < 0)[:, None, :, :, None]
            now = kv_pairs_of(self.runner, seq_id)[..., : entries.shape[3], :]
            assert torch.equal(now.masked_fill(evicted_mask, 0), entries.masked_fill(evicted_mask, 0)), (
                f"sequence {seq_id}"
            )
        self._account(scheduled_in(plan))
        self._record_mass()
        return result

    def poison_evicted(self) -> None:
        """Write NaN where single heads have no KV pair."""
        size = self.config.block_size
        for seq_id, text in self.alive.items():
            if seq_id in self.runner.states and (text.layout < 0).any():
                table = torch.tensor(block_table_of(self.runner, seq_id))
                layers, heads, entries = (text.layout < 0).nonzero(as_tuple=True)
                self.runner.cache.data[layers, :, table[entries // size], heads, entries % size] = float("nan")

    def _start(self, start: SequenceStart) -> None:
        if text := self._resume(start):
            (table,) = start.tables
            assert text.length == text.layout.shape[-1] + table.dropped
            return
        shape, size, hit = self.runner.cache.shape, self.config.max_model_len, start.logical_length
        layout = torch.arange(hit).expand(shape.num_layers, shape.num_kv_heads, hit)
        visible = torch.zeros(shape.num_layers, shape.num_kv_heads, size, size, dtype=torch.bool)
        visible[..., :hit, :] = torch.ones(size, size, dtype=torch.bool).tril()[:hit]
        resumed = len(start.token_ids) > start.prompt_length
        self._add(start.seq_id, Text(list(start.token_ids), hit, layout, visible, resumed))

    def _windows(self) -> Iterator[tuple[list[Tensor] | None, Tensor, int]]:
        """For each window: its queries by layer, the offsets kept `[layers, kv_heads, any]`, and its seed."""
        layers = self.runner.cache.shape.num_layers
        of_layers = [each for selection in self._selections for each in split_layers(*selection)]
        for i in range(0, len(of_layers), layers):  # a pass goes through all layers
            of_pass = of_layers[i : i + layers]
            for window, seed in enumerate(of_pass[0][2]):
                queries = None if of_pass[0][0] is None else [queries[window] for queries, *_ in of_pass]
                kept = torch.nn.utils.rnn.pad_sequence(
                    [kept[window].T for _, kept, _ in of_pass], batch_first=True, padding_value=-1
                ).transpose(1, 2)
                yield queries, kept, seed

    def _survivors(self, job: CompressionJob, windows: Iterator) -> Tensor:
        """Note the events of a job -> bool `[layers, kv_heads, entries before]`, which survive it."""
        text, compression = self.alive[job.seq_id], self.config.compression
        survives, (own,) = text.layout >= 0, job.parts
        stride = own.size - compression.buffer if isinstance(compression.policy, Standalone) else own.size
        assert own.stride == stride
        held = iter(self._held.pop(job.seq_id, [])[: job.chosen])
        for i in range(job.num_windows):
            start = own.first_block * self.config.block_size + i * stride
            if job.moves:
                queries, kept, seed = next(windows if i >= job.chosen else held)
                event = Event(text, text.length, start, own.size, own.retain, text.layout, kept, True, queries, seed)
            else:
                assert job.num_windows == 1 and own.region_blocks * self.config.block_size == own.dropped
                kept = torch.arange(own.dropped, own.size).expand(*text.layout.shape[:2], -1)
                event = Event(text, text.length, start, own.size, own.retain, text.layout, kept, False)
            chosen = torch.zeros(*kept.shape[:2], own.size + 1, dtype=torch.bool).scatter(
                -1, kept % (own.size + 1), True
            )
            survives[..., start : start + own.size] &= chosen[..., :-1]
            self.events.append(event)
        text.num_events += job.num_windows
        return survives

    def _compress(self, job: CompressionJob, entries: Tensor, survives: Tensor) -> Tensor:
        """Strike what is evicted from the map -> the entries as they must lie now, anything in holes."""
        text = self.alive[job.seq_id]
        length = text.layout.shape[-1] - job.parts[0].dropped
        layout = torch.full((*survives.shape[:2], length), -1)
        moved = entries[..., :length, :].clone()
        for layer, head in torch.cartesian_prod(*map(torch.arange, survives.shape[:2])).tolist():
            (index,) = survives[layer, head].nonzero(as_tuple=True)
            layout[layer, head, : len(index)] = text.layout[layer, head, index]
            moved[layer, :, head, : len(index)] = entries[layer, :, head, index]
        text.layout = layout
        return moved

    def _check_table(self, job: CompressionJob, before: list[int], copies: list[BlockCopy]) -> None:
        """Exactly the blocks are left that the entries need, in the order they were in."""
        (own,) = job.parts
        blocks = slice(own.first_block, own.first_block + own.region_blocks)
        after = [*before[: blocks.start], *own.destinations, *before[blocks.stop :]]
        for block_copy in copies:
            if block_copy.seq_id == job.seq_id:
                after[block_copy.index] = block_copy.destination
        assert len(after) == -(-self.alive[job.seq_id].layout.shape[-1] // self.config.block_size)
        assert block_table_of(self.runner, job.seq_id)[: len(after)] == after
        self.released += len(before) - len(after)

    def _record_mass(self) -> None:
        if not self.config.adds_mass:
            return
        for seq_id, text in self.alive.items():
            mass = feature_of(self.runner, AttentionMass).mass[:, self.runner.states[seq_id].table_slot]
            entries = text.layout.shape[-1]
            assert not mass[..., entries:].any()
            self.masses.append(MassRecord(text, text.length, text.layout, mass[..., :entries].clone()))


def split_layers(
    queries: Tensor | None, kept: Tensor, options: dict[str, Any]
) -> Iterator[tuple[Tensor | None, Tensor, list[int]]]:
    """Queries, offsets kept and seeds of each layer that was selected from in one call."""
    layers = options["layers"]
    assert queries is None or len(layers) == 1
    num_windows = len(kept) // len(layers)
    assert options["seeds"] == options["seeds"][:num_windows] * len(layers)
    for of_layer in kept.split(num_windows):
        yield queries, of_layer, options["seeds"][:num_windows]


def positions_of(layout: Tensor, size: int) -> Tensor:
    """The map as a set: bool `[layers, kv_heads, size]`, which positions are cached."""
    found = torch.zeros(*layout.shape[:2], size + 1, dtype=torch.bool)
    return found.scatter(-1, layout % (size + 1), True)[..., :size]


def make_llm(path: Path, compression: CompressionConfig, **options: Any) -> tuple[LLM, Recorder]:
    by_policy = {"block_size": 1, "num_gpu_blocks_override": 1000} if isinstance(compression.policy, Standalone) else {}
    defaults = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": 120, "max_num_seqs": 8}
    settings = defaults | {"max_num_batched_tokens": 32} | by_policy | options
    llm = LLM(path, max_model_len=MAX_MODEL_LEN, compression=compression, **settings)
    llm.llm_engine.executor = Recorder(llm)
    return llm, llm.llm_engine.executor


def step(llm: LLM) -> None:
    scheduler, recorder = llm.llm_engine.scheduler, llm.llm_engine.executor
    poison(scheduler, recorder.runner.cache)
    recorder.poison_evicted()
    llm.llm_engine.step()
    scheduler.check()
    for seq in scheduler.running:
        assert seq.cached_length == recorder.alive[seq.seq_id].layout.shape[-1]
        assert seq.tables[0].blocks == block_table_of(recorder.runner, seq.seq_id)


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Complete the prompts, all added at once -> the tokens of all completions."""
    engine = llm.llm_engine
    outputs = [engine.add_request(str(i), *request) for i, request in enumerate(zip(prompts, params, strict=True))]
    while engine.has_unfinished_requests():
        step(llm)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def greedy(max_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=seed)


def completions(count: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(n=count, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, seed=5)


class Expected:
    """Dense attention over a text, with the mask that its compressions left."""

    def __init__(self, decoder: DenseDecoder | TransformersDecoder, text: Text, config: CompressionConfig) -> None:
        self.decoder = decoder
        self.text = text
        self.config = config
        self.method = METHODS[config.method]
        self.dense = assert_dense(decoder, text)
        self.length = len(self.dense.logits)
        self.masses = self._masses() if self.method.spec.reads_mass else None
        self.sums = torch.zeros(*text.layout.shape[:2], self.length, dtype=torch.float64)  # of attention, by position
        self.summed = self.covered = 0  # rows that are in the sums, positions that an event has covered

    def _masses(self) -> list[Tensor]:
        """By layer `[kv_heads, rows, positions]`: the attention that positions received up to and including a row."""
        masses = []
        for layer, visible in enumerate(self.text.visible[..., : self.length, : self.length]):
            queries, keys, softmax = self.dense.queries[layer], self.dense.keys[layer], self.decoder.softmax(layer)
            masses.append(attention_probabilities(queries, keys, visible, softmax).sum(1).cumsum(1))
        return masses

    def mass(self, layer: int, length: int, positions: Tensor) -> Tensor:
        """The mass `[kv_heads, n]` that KV pairs had received when the text had this length."""
        return self.masses[layer][:, length - 1].gather(-1, positions)

    def ages(self, event: Event) -> Tensor:
        """By position, how many queries the sums stand for before an event: float64 `[positions]`."""
        found = event.length - torch.arange(self.length, dtype=torch.float64)
        found[: self.covered] = PRIOR + event.length - self.covered
        return found

    def sum_up(self, event: Event) -> None:
        """Add the attention of the queries since the last event, among the output that is cached and scored."""
        first = max(self.summed, event.start)
        for layer, sums in enumerate(self.sums):
            visible = self.text.visible[layer, :, first : event.length, : self.length].clone()
            visible[..., : event.start] = False
            queries, keys = self.dense.queries[layer][:, first : event.length], self.dense.keys[layer]
            sums += attention_probabilities(queries, keys, visible, self.decoder.softmax(layer)).square().sum((1, 2))
        self.summed = event.length

    def cover(self, event: Event, kept: list[list[list[int]]]) -> None:
        """Let the sums of survivors stand for as many queries."""
        factor = 1 / self.ages(event)
        self.covered = int(event.region.max()) + 1
        factor *= PRIOR + event.length - self.covered
        for layer, of_heads in enumerate(kept):
            for head, offsets in enumerate(of_heads):
                survivors = event.region[layer, head, offsets]
                self.sums[layer, head, survivors] *= factor[survivors]

    def received(self, event: Event) -> list[Tensor]:
        """By layer the highest attention `[kv_heads, size]` that the KV pairs of a region receive while its text is
        repeated after what is cached. The softmax is that of the region and the repetition."""
        assert isinstance(self.decoder, DenseDecoder)
        end = int(event.region[..., -1].max()) + 1
        begin = event.start if isinstance(self.config.policy, Threshold) else int(event.region[0, 0, 0])
        cached = positions_of(event.layout, self.text.visible.shape[-1])[..., : self.length]
        found = [torch.zeros(region.shape, dtype=torch.float64) for region in event.region]
        for first, last in pieces(begin, end, MAX_MODEL_LEN - event.length):
            behind = min(event.length, MAX_MODEL_LEN - (last - first))
            positions = list(range(behind, behind + last - first))
            repeated = self.decoder.repeat(self.dense, self.text.tokens[first:last], positions, cached)
            for layer, region in enumerate(event.region):
                keys = self.dense.keys[layer].take_along_dim(region[..., None], 1)
                both = torch.cat((keys, repeated.keys[layer]), dim=1)
                visible = torch.ones(len(positions), both.shape[1], dtype=torch.bool).tril(keys.shape[1])
                queries, softmax = repeated.queries[layer], self.decoder.softmax(layer)
                of_tokens = attention_probabilities(queries, both, visible.expand(len(both), -1, -1), softmax)
                found[layer] = found[layer].maximum(of_tokens[..., : keys.shape[1]].amax((1, 2)))
        return found

    def choice(self, event: Event) -> list[list[list[int]]]:
        """The offsets that the method keeps of dense keys, by layer and head, with dense queries or dense mass."""
        queries = self._queries(event)
        received = self.received(event) if self.method.spec.repeats else []
        if self.method.spec.reselects:
            self.sum_up(event)
        kept = []
        for layer, keys in enumerate(self.dense.keys):
            region = event.region[layer]
            evicted_mask, index = region < 0, region.clamp(min=0)
            options: dict[str, Any] = {"layer": layer, "num_layers": len(self.dense.keys), "seeds": [event.seed]}
            options |= {"starts": [event.start], "last_positions": [int(region[0, -1])]}
            values = self.dense.values[layer].take_along_dim(index[..., None], 1)[None].float()
            options |= {"values": values, "value_norms": values.norm(dim=-1)}
            options |= {"frequencies": self.decoder.frequencies, "softmax": self.decoder.softmax(layer)}
            options |= self.config.options
            if "statistics" in self.method.arguments:
                of_layer = {name: found[layer : layer + 1] for name, found in self.decoder.statistics.items()}
                options["statistics"] = QueryStatistics(**of_layer)
            if self.method.spec.gated:
                options["gates"] = self.decoder.gates[self.method.spec.name].of_layers([layer])
            if self.method.spec.ragged:
                options |= {"capacity": event.retain, "evicted_mask": evicted_mask[None]}
            if self.method.spec.reads_mass:
                options["mass"] = self.mass(layer, event.length, index)[None].float()
            if self.method.spec.reselects:
                scored = index[:, : event.size - self.config.buffer]
                options["observed"] = self.sums[layer].gather(-1, scored)[None].float()
                assert (self.ages(event)[index] == self.ages(event)[index[0]]).all()
                options["ages"] = self.ages(event)[index[0]][None].float()
            if received:
                options["received"] = received[layer][None].float()
            chosen = self.method(
                None if queries is None else queries[layer][None].float(),
                keys.take_along_dim(index[..., None], 1).masked_fill(evicted_mask[..., None], torch.nan)[None].float(),
                retain=mean_retained(event, self.config),
                buffer=self.config.buffer,
                **options,
            )
            kept.append(without_padding(chosen[0]))
        if self.method.spec.reselects:
            self.cover(event, kept)
        return kept

    def _queries(self, event: Event) -> list[Tensor] | None:
        """Queries of the tokens that score, recomputed over what was cached before the event; by layer `[Hq, T, d]`."""
        if self.method.spec.queries == "none":
            return None
        positions, visible = event.scoring(self.config)
        visible = visible[..., : self.length]
        queries = self.decoder.recompute(self.dense, self.text.tokens, positions.tolist(), visible).queries
        if event.moved:
            torch.testing.assert_close(torch.stack(event.queries).double(), torch.stack(queries), rtol=0, atol=1e-4)
        return queries


def without_padding(kept: Tensor) -> list:
    """The offsets in the rows of a tensor, as lists."""
    if kept.dim() > 1:
        return [without_padding(row) for row in kept]
    return kept[kept >= 0].tolist()


def mean_retained(event: Event, config: CompressionConfig) -> int:
    """KV pairs that heads or layers keep of a region, in the mean: less than there is room for where they differ."""
    more = config.policy.held_tokens(config.spec) - config.policy.budget_tokens if config.spec.ragged else 0
    return event.retain - more


def assert_counts(event: Event, config: CompressionConfig) -> None:
    """Exact numbers of entries: `retain` in every head, or the budget in the mean of heads or layers."""
    counts = (event.kept >= 0).sum(-1)
    if config.method == "adakv":
        mean = mean_retained(event, config)
        assert (counts.sum(1) == mean * counts.shape[1]).all() and counts.max() <= event.retain
    elif config.method == "pyramidkv":
        mean = mean_retained(event, config)
        assert (counts.sum(0) == mean * counts.shape[0]).all() and counts.max() <= event.retain
        assert (counts == counts[:, :1]).all() and (counts.diff(dim=0) <= 0).all()
    else:
        assert (counts == event.retain).all()


def assert_as_expected(decoder: DenseDecoder | TransformersDecoder, llm: LLM) -> None:
    """All that a run recorded: logits, queries, survivors and mass."""
    recorder, config = llm.llm_engine.executor, llm.config.compression
    # A text without logits was preempted before it was back.
    expected = {id(text): Expected(decoder, text, config) for text in recorder.texts if text.logits}
    for event in recorder.events:
        assert_counts(event, config)
        if reference := expected.get(id(event.text)):
            assert without_padding(event.kept) == reference.choice(event)
    for record in recorder.masses:
        if reference := expected.get(id(record.text)):
            for layer, mass in enumerate(record.mass):
                right = reference.mass(layer, record.length, record.layout[layer])
                torch.testing.assert_close(mass.double(), right, rtol=1e-4, atol=1e-5)
    assert llm.llm_engine.scheduler.blocks.num_owned == 0


def assert_stats(llm: LLM) -> None:
    recorder, stats = llm.llm_engine.executor, llm.stats()
    assert stats.windows_compressed == len(recorder.events)
    assert stats.entries_evicted == sum(event.size - event.retain for event in recorder.events)
    assert stats.blocks_released == recorder.released
