"""Every compression method under every policy that it allows, in the engine, against dense attention in float64.

A `Recorder` keeps a map of each sequence's cache: for every layer and head, which position's entry lies where, or that
there is none. Memory that holds no entry is NaN between steps, the holes of single heads included.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.queries import query_offsets
from kvllm.compression.registry import METHODS
from kvllm.config import RAGGED_METHODS, WINDOW_METHODS
from kvllm.core.executor import Executor
from kvllm.core.protocol import BlockCopy, CompressionJob, ScheduledSequence, SequenceStart, StepPlan, StepResult
from kvllm.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.dense_decoder import DenseDecoder
from tests.worker.test_compression import assert_dense, poison, random_prompts

MAX_MODEL_LEN = 200
BLOCK_SIZE = 8
THRESHOLD_METHODS = [name for name in METHODS if name not in WINDOW_METHODS]
WINDOWED_METHODS = [name for name in METHODS if name not in RAGGED_METHODS]
CASES = [(name, "threshold") for name in THRESHOLD_METHODS]
CASES += [(name, policy) for policy in ("periodic", "pressure", "standalone") for name in WINDOWED_METHODS]
EVERY_CASE = pytest.mark.parametrize(("method", "policy"), CASES)


def compression_config(method: str, policy: str, **options: Any) -> CompressionConfig:
    """Small, with odd numbers: most events move entries behind the region, or end within a block."""
    sizes = {
        "threshold": {"threshold_tokens": 44, "budget_tokens": 25},
        "periodic": {"period": 4, "window_blocks": 2, "retain_tokens": 9},
        "pressure": {"period": 6, "window_blocks": 2, "retain_tokens": 8},
        "standalone": {"window_blocks": 18, "retain_tokens": 9},
    }[policy]
    common = {"buffer": 4, "chunk_budget": 3, "max_chunk": 5, "query_window": 6}
    return CompressionConfig(method=method, policy=policy, **(common | sizes | options))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: waking a second thread takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path, "qwen3", head_dim=16)
    return path


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> DenseDecoder:
    return DenseDecoder(checkpoint)


# Keeping the map


@dataclass
class Text:
    """What a sequence computed, from its start to its end or preemption.

    layout: int64 `[layers, kv_heads, entries]`, the position whose entry lies there, -1 in a hole.
    visible: bool `[layers, kv_heads, rows, positions]`, what was cached when a row was computed.
    logits: by position. resumed: whether some of its output was known when it started.
    """

    tokens: list[int]
    length: int
    layout: Tensor
    visible: Tensor
    resumed: bool
    logits: dict[int, Tensor] = field(default_factory=dict)
    num_events: int = 0


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
        match METHODS[config.method].queries:
            case "window":
                return torch.from_numpy(query_offsets(self.size, config.buffer, config.query_stride))
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
    """H2O's mass `[layers, kv_heads, entries]` in the worker, behind a step."""

    text: Text
    length: int
    layout: Tensor
    mass: Tensor


class Recorder(Executor):
    """Runs plans on the real worker, and checks that a compression moves survivors bit for bit, and nothing else."""

    def __init__(self, llm: LLM) -> None:
        self.inline = llm.llm_engine.executor
        self.runner = self.inline.runner
        self.config = llm.config
        self.alive: dict[int, Text] = {}
        self.texts: list[Text] = []
        self.events: list[Event] = []
        self.masses: list[MassRecord] = []
        self.released = 0
        self._selections: list[tuple[Tensor | None, Tensor, dict[str, Any]]] = []
        self._logits: list[Tensor] = []
        self._compute_logits, self.runner.model.logits = self.runner.model.logits, self._record_logits
        self._select, self.runner.compressor.select = self.runner.compressor.select, self._record_selection

    def _record_logits(self, hidden: Tensor) -> Tensor:
        logits = self._compute_logits(hidden)
        self._logits += logits
        return logits

    def _record_selection(self, queries: Tensor | None, keys: Tensor, **options: Any) -> Tensor:
        kept = self._select(queries, keys, **options)
        self._selections.append((queries, kept, options))
        return kept

    def close(self) -> None:
        self.inline.close()

    def execute(self, plan: StepPlan) -> StepResult:
        self._logits, self._selections = [], []
        for seq_id in plan.dropped_seq_ids:
            self.alive.pop(seq_id, None)  # unknown if the step that would have started it failed
        before = {seq_id: self.entries(seq_id) for seq_id in self.alive} if plan.compressions else {}
        tables = {job.seq_id: self.table(job.seq_id) for job in plan.compressions}
        result = self.inline.execute(plan)
        for start in plan.new_seqs:
            self._start(start)
        windows = self._windows()
        for job in plan.compressions:
            survives = self._survivors(job, windows)
            before[job.seq_id] = self._compress(job, before[job.seq_id], survives)
            self._check_table(job, tables[job.seq_id], plan.copies)
        assert next(windows, None) is None
        for seq_id, entries in before.items():
            evicted_mask = (self.alive[seq_id].layout < 0)[:, None, :, :, None]
            now = self.entries(seq_id)[..., : entries.shape[3], :]
            assert torch.equal(now.masked_fill(evicted_mask, 0), entries.masked_fill(evicted_mask, 0)), (
                f"sequence {seq_id}"
            )
        self._account(plan.scheduled)
        self._record_mass()
        return result

    def table(self, seq_id: int) -> list[int]:
        """The block table of a sequence, as the worker has it."""
        state = self.runner.states[seq_id]
        return self.runner.tables.table[state.row, : state.num_blocks].tolist()

    def entries(self, seq_id: int) -> Tensor:
        """The cache of a sequence: `[layers, 2, kv_heads, entries, head_dim]`, a copy."""
        index = torch.arange(self.runner.states[seq_id].cached_length)
        blocks = torch.tensor(self.table(seq_id))[index // self.config.block_size]
        return self.runner.cache.data[:, :, blocks, :, index % self.config.block_size].permute(1, 2, 3, 0, 4)

    def poison_holes(self) -> None:
        """Write NaN where single heads have no entry."""
        size = self.config.block_size
        for seq_id, text in self.alive.items():
            if seq_id in self.runner.states and (text.layout < 0).any():
                table = torch.tensor(self.table(seq_id))
                layers, heads, entries = (text.layout < 0).nonzero(as_tuple=True)
                self.runner.cache.data[layers, :, table[entries // size], heads, entries % size] = float("nan")

    def _start(self, start: SequenceStart) -> None:
        shape, size, hit = self.runner.cache.shape, self.config.max_model_len, start.cached_length
        layout = torch.arange(hit).expand(shape.num_layers, shape.num_kv_heads, hit)
        visible = torch.zeros(shape.num_layers, shape.num_kv_heads, size, size, dtype=torch.bool)
        visible[..., :hit, :] = torch.ones(size, size, dtype=torch.bool).tril()[:hit]
        resumed = len(start.token_ids) > start.prompt_length
        self._add(start.seq_id, Text(list(start.token_ids), hit, layout, visible, resumed))

    def _add(self, seq_id: int, text: Text) -> None:
        assert seq_id not in self.alive
        self.alive[seq_id] = text
        self.texts.append(text)

    def _windows(self) -> Iterator[tuple[list[Tensor] | None, Tensor, int]]:
        """Of each window: its queries by layer, the offsets kept `[layers, kv_heads, any]`, and its seed."""
        layers = self.runner.cache.shape.num_layers
        for i in range(0, len(self._selections), layers):  # a pass goes through all layers
            of_pass = self._selections[i : i + layers]
            for window, seed in enumerate(of_pass[0][2]["seeds"]):
                queries = None if of_pass[0][0] is None else [queries[window] for queries, _, _ in of_pass]
                kept = torch.nn.utils.rnn.pad_sequence(
                    [kept[window].T for _, kept, _ in of_pass], batch_first=True, padding_value=-1
                ).transpose(1, 2)
                yield queries, kept, seed

    def _survivors(self, job: CompressionJob, windows: Iterator) -> Tensor:
        """Note the events of a job -> bool `[layers, kv_heads, entries before]`, which survive it."""
        text, compression = self.alive[job.seq_id], self.config.compression
        survives = text.layout >= 0
        stride = job.size - compression.buffer if compression.policy == "standalone" else job.size
        for i in range(job.num_windows):
            start = job.first_block * self.config.block_size + i * stride
            if job.destinations:
                queries, kept, seed = next(windows)
                event = Event(text, text.length, start, job.size, job.retain, text.layout, kept, True, queries, seed)
            else:
                assert job.num_windows == 1 and job.region_blocks * self.config.block_size == job.dropped
                kept = torch.arange(job.dropped, job.size).expand(*text.layout.shape[:2], -1)
                event = Event(text, text.length, start, job.size, job.retain, text.layout, kept, False)
            chosen = torch.zeros(*kept.shape[:2], job.size + 1, dtype=torch.bool).scatter(
                -1, kept % (job.size + 1), True
            )
            survives[..., start : start + job.size] &= chosen[..., :-1]
            self.events.append(event)
        text.num_events += job.num_windows
        return survives

    def _compress(self, job: CompressionJob, entries: Tensor, survives: Tensor) -> Tensor:
        """Strike what is evicted from the map -> the entries as they must lie now, anything in holes."""
        text = self.alive[job.seq_id]
        length = text.layout.shape[-1] - job.dropped
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
        blocks = slice(job.first_block, job.first_block + job.region_blocks)
        after = [*before[: blocks.start], *job.destinations, *before[blocks.stop :]]
        for block_copy in copies:
            if block_copy.seq_id == job.seq_id:
                after[block_copy.index] = block_copy.destination
        assert len(after) == -(-self.alive[job.seq_id].layout.shape[-1] // self.config.block_size)
        assert self.table(job.seq_id)[: len(after)] == after
        self.released += len(before) - len(after)

    def _account(self, scheduled: list[ScheduledSequence]) -> None:
        """Note what each row of the step saw, and the logits of those that were sampled."""
        logits = iter(self._logits)
        for item in scheduled:
            text = self.alive[item.seq_id]
            text.tokens += item.new_tokens
            for position in range(text.length, text.length + item.num_tokens):
                own = torch.full((*text.layout.shape[:2], 1), position)
                text.layout = torch.cat((text.layout, own), dim=-1)
                text.visible[..., position, :] = positions_of(text.layout, text.visible.shape[-1])
            text.length += item.num_tokens
            if item.samples:
                text.logits[text.length - 1] = next(logits)
            for fork in item.forks:
                child = copy.deepcopy(text)
                child.logits = {text.length - 1: next(logits)}
                self._add(fork.seq_id, child)

    def _record_mass(self) -> None:
        if self.runner.mass is None:
            return
        for seq_id, text in self.alive.items():
            mass = self.runner.mass.mass[:, self.runner.states[seq_id].row]
            entries = text.layout.shape[-1]
            assert not mass[..., entries:].any()
            self.masses.append(MassRecord(text, text.length, text.layout, mass[..., :entries].clone()))


def positions_of(layout: Tensor, size: int) -> Tensor:
    """The map as a set: bool `[layers, kv_heads, size]`, which positions are cached."""
    found = torch.zeros(*layout.shape[:2], size + 1, dtype=torch.bool)
    return found.scatter(-1, layout % (size + 1), True)[..., :size]


# Running it


def make_llm(path: Path, compression: CompressionConfig, **options: Any) -> tuple[LLM, Recorder]:
    by_policy = {"block_size": 1, "num_gpu_blocks_override": 1000} if compression.policy == "standalone" else {}
    defaults = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": 120, "max_num_seqs": 8}
    settings = defaults | {"max_num_batched_tokens": 32} | by_policy | options
    llm = LLM(path, max_model_len=MAX_MODEL_LEN, compression=compression, **settings)
    llm.llm_engine.executor = Recorder(llm)
    return llm, llm.llm_engine.executor


def step(llm: LLM) -> None:
    scheduler, recorder = llm.llm_engine.scheduler, llm.llm_engine.executor
    poison(scheduler, recorder.runner.cache)
    recorder.poison_holes()
    llm.llm_engine.step()
    scheduler.check()
    for seq in scheduler.running:
        assert seq.cached_length == recorder.alive[seq.seq_id].layout.shape[-1]
        assert seq.block_table == recorder.table(seq.seq_id)


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


# What has to come out


class Expected:
    """Dense attention over a text, with the mask that its compressions left."""

    def __init__(self, decoder: DenseDecoder, text: Text, config: CompressionConfig) -> None:
        self.decoder = decoder
        self.text = text
        self.config = config
        self.method = METHODS[config.method]
        self.dense = assert_dense(decoder, text)
        self.length = len(self.dense.logits)
        self.masses = self._masses() if self.method.observes else None

    def _masses(self) -> list[Tensor]:
        """By layer `[kv_heads, rows, positions]`: the attention that positions received up to and including a row."""
        masses = []
        for queries, keys, visible in zip(self.dense.queries, self.dense.keys, self.text.visible, strict=True):
            scores = queries.unflatten(0, (len(keys), -1)) @ keys[:, None].mT * keys.shape[-1] ** -0.5
            hidden = ~visible[:, None, : self.length, : self.length]
            masses.append(scores.masked_fill(hidden, -torch.inf).softmax(-1).sum(1).cumsum(1))
        return masses

    def mass(self, layer: int, length: int, positions: Tensor) -> Tensor:
        """What entries `[kv_heads, entries]` had received when the text had this length."""
        return self.masses[layer][:, length - 1].gather(-1, positions)

    def choice(self, event: Event) -> list[list[list[int]]]:
        """What the method keeps of dense keys, by layer and head, with dense queries or dense mass."""
        queries = self._queries(event)
        kept = []
        for layer, keys in enumerate(self.dense.keys):
            region = event.region[layer]
            evicted_mask, index = region < 0, region.clamp(min=0)
            options: dict[str, Any] = {"layer": layer, "num_layers": len(self.dense.keys), "seeds": [event.seed]}
            if self.method.ragged:
                options |= {"capacity": event.retain, "evicted_mask": evicted_mask[None]}
            if self.method.observes:
                options["mass"] = self.mass(layer, event.length, index)[None].float()
            chosen = self.method(
                None if queries is None else queries[layer][None].float(),
                keys.take_along_dim(index[..., None], 1).masked_fill(evicted_mask[..., None], torch.nan)[None].float(),
                retain=mean_retained(event, self.config),
                buffer=self.config.buffer,
                chunk_budget=self.config.chunk_budget,
                max_chunk=self.config.max_chunk,
                query_offsets=event.query_offsets(self.config),
                **options,
            )
            kept.append(without_padding(chosen[0]))
        return kept

    def _queries(self, event: Event) -> list[Tensor] | None:
        """Of the tokens that score, recomputed over what was cached before the event; by layer `[Hq, rows, d]`."""
        if self.method.queries == "none":
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
    """What heads or layers keep of a region in the mean: less than there is room for where they differ."""
    return event.retain - (config.held_tokens - config.budget_tokens if METHODS[config.method].ragged else 0)


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


def assert_as_expected(decoder: DenseDecoder, llm: LLM) -> None:
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


# The battery


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts shorter and longer than what is compressed, a common beginning, two completions of one prompt."""
    common, *tails = random_prompts(24, 50, 10, 3, 30)
    prompts = [common + tails[0], common + tails[1], tails[2], tails[3]]
    return prompts, [greedy(60, 0), greedy(60, 1), greedy(90, 2), completions(2, 60)]


def pool(policy: str) -> dict[str, int]:
    """Blocks that make a policy work: pressure needs a shortage."""
    return {"num_gpu_blocks_override": 26} if policy == "pressure" else {}


@EVERY_CASE
def test_decoding_and_survivors_are_those_of_dense_attention(
    checkpoint: Path, decoder: DenseDecoder, method: str, policy: str
) -> None:
    llm, recorder = make_llm(checkpoint, compression_config(method, policy), **pool(policy))
    run(llm, *mixed_requests())
    assert len(recorder.events) >= 10 and len({id(event.text) for event in recorder.events}) >= 4
    assert_as_expected(decoder, llm)
    assert_stats(llm)


@pytest.mark.parametrize("method", THRESHOLD_METHODS)
def test_requests_with_budgets_of_their_own_and_a_protected_prompt(
    checkpoint: Path, decoder: DenseDecoder, method: str
) -> None:
    """A budget moves the threshold along; the blocks of the prompt stay whole and count."""
    llm, recorder = make_llm(checkpoint, compression_config(method, "threshold", protect_prompt=True))
    prompts, budgets = random_prompts(9, 20, 3), [37, 45, None]  # 20 tokens: 3 blocks of 8, of which 4 are output
    params = [structs.replace(greedy(70, i), budget_tokens=budget) for i, budget in enumerate(budgets)]
    run(llm, prompts, params)
    assert_as_expected(decoder, llm)
    for prompt, budget in zip(prompts, [37, 45, 25], strict=True):
        protected = -(-len(prompt) // BLOCK_SIZE) * BLOCK_SIZE
        events = [event for event in recorder.events if event.text.tokens[: len(prompt)] == prompt]
        assert [event.start for event in events] == [protected] * len(events) and len(events) >= 2
        assert {event.layout.shape[-1] for event in events} == {budget + 44 - 25}
        assert {protected + mean_retained(event, llm.config.compression) for event in events} == {budget}


@pytest.mark.parametrize("policy", ["periodic", "standalone"])
@pytest.mark.parametrize("method", WINDOWED_METHODS)
def test_windows_of_a_prompt(checkpoint: Path, decoder: DenseDecoder, method: str, policy: str) -> None:
    """Several windows of a sequence in one event; here they drop whole blocks."""
    config = compression_config(method, policy, retain_tokens=8, compress_prompt=True)
    llm, recorder = make_llm(checkpoint, config)
    run(llm, random_prompts(75, 50, 3), [completions(2, 30), greedy(30, 1), greedy(30, 2)])
    assert sum(event.length == 75 for event in recorder.events) >= 8
    assert_as_expected(decoder, llm)
    assert_stats(llm)


@pytest.mark.parametrize("method", ["snapkv", "pyramidkv", "adakv", "h2o", "sliding_window"])
def test_the_reference_backend_does_the_same(checkpoint: Path, decoder: DenseDecoder, method: str) -> None:
    config = compression_config(method, "threshold")
    outputs, kept = [], []
    for backend in ("reference", "cpu"):
        llm, recorder = make_llm(checkpoint, config, attention_backend=backend)
        outputs.append(run(llm, *mixed_requests()))
        kept.append([without_padding(event.kept) for event in recorder.events])
        assert_as_expected(decoder, llm)
    assert outputs[0] == outputs[1] and kept[0] == kept[1]


@pytest.mark.parametrize("method", [name for name in THRESHOLD_METHODS if METHODS[name].queries != "none"])
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
        ("h2o", (40, 24)),
        ("adakv", (44, 24)),
        ("pyramidkv", (41, 20)),
        ("sliding_window", (44, 25)),
        ("sliding_window", (48, 24)),
    ],
)
def test_blocks_come_back_to_the_pool(
    checkpoint: Path, decoder: DenseDecoder, method: str, sizes: tuple[int, int]
) -> None:
    threshold, budget = sizes
    held = (threshold + budget) // 2 if method in RAGGED_METHODS else budget
    config = compression_config(method, "threshold", threshold_tokens=threshold, budget_tokens=budget)
    llm, recorder = make_llm(checkpoint, config)
    (prompt,), blocks = random_prompts(60), llm.llm_engine.scheduler.blocks
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
    common, *tails = random_prompts(16, 16, 12, 21)
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


@pytest.mark.parametrize(("method", "policy"), [case for case in CASES if case[1] != "pressure"])
def test_survivors_depend_on_their_sequence_alone(checkpoint: Path, method: str, policy: str) -> None:
    """Not on the batch, its order, the rows that are recomputed at a time, nor the run."""
    prompts = random_prompts(2, 2, 2)
    lengths = random_prompts(2, 30, 57) if policy != "periodic" else prompts  # its clock is the engine's
    together = {}

    def check(requests: list[tuple[int, list[int]]], rows_per_pass: int = 64, **options: Any) -> None:
        llm, recorder = make_llm(checkpoint, compression_config(method, policy), **options)
        recorder.runner.compressor.max_num_batched_tokens = rows_per_pass
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
    check(requests, **all_in_a_step)
    check(requests[::-1], rows_per_pass=8, **(one_in_a_step if policy != "periodic" else all_in_a_step))
    for request in requests[:2]:
        check([request], **all_in_a_step)


# Preemption


def many_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = random_prompts(3, 20, 60, 35, 50, 45)
    return prompts, [*[greedy(80, seed) for seed in range(5)], completions(3, 70)]


@pytest.mark.parametrize(("method", "policy"), [case for case in CASES if case[1] != "standalone"])
def test_a_preempted_sequence_has_a_consistent_cache(
    checkpoint: Path, decoder: DenseDecoder, method: str, policy: str
) -> None:
    num_blocks = 14 if policy == "threshold" else 24
    llm, recorder = make_llm(checkpoint, compression_config(method, policy), num_gpu_blocks_override=num_blocks)
    tokens = run(llm, *many_requests())
    assert [len(each) for each in tokens] == [80] * 5 + [70] * 3
    assert llm.stats().preemptions >= 2
    assert sum(text.num_events for text in recorder.texts if text.resumed) >= 2
    assert_as_expected(decoder, llm)
    assert_stats(llm)


@pytest.mark.parametrize("method", THRESHOLD_METHODS)
def test_preemption_changes_no_token_under_a_threshold(checkpoint: Path, method: str) -> None:
    """Computed again, a text is compressed at the same lengths, from the same queries."""
    tokens, preemptions = [], []
    for num_blocks in (100, 22):
        llm, _ = make_llm(checkpoint, compression_config(method, "threshold"), num_gpu_blocks_override=num_blocks)
        prompts, params = many_requests()
        tokens.append(run(llm, prompts[:5], params[:5]))
        preemptions.append(llm.stats().preemptions)
    assert preemptions[0] == 0 < preemptions[1]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("method", ["h2o", "adakv", "pyramidkv", "random"])
def test_a_failed_step_leaves_no_trace(
    checkpoint: Path, decoder: DenseDecoder, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises in the model, behind the compressions; everything is computed again from the tokens."""
    prompts, params = random_prompts(50, 20, 30), [greedy(60, 0), greedy(60, 1), greedy(60, 2)]

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
    """A prompt in chunks, forks behind its last one, and a second life of those that are preempted."""
    llm, recorder = make_llm(
        checkpoint, compression_config("h2o", "threshold"), max_num_batched_tokens=8, num_gpu_blocks_override=16
    )
    run(llm, random_prompts(30, 60), [completions(3, 60), completions(2, 60)])
    assert llm.stats().preemptions >= 1
    assert {record.length for record in recorder.masses} >= {8, 16, 24, 30, 31}
    assert any(record.text.resumed for record in recorder.masses)
    assert_as_expected(decoder, llm)


def test_mass_belongs_to_a_sequence_so_prefixes_are_not_shared(checkpoint: Path) -> None:
    (prompt,) = random_prompts(40)
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
    assert runner.mass.mass.numel() * 4 == mass
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


@pytest.mark.parametrize("method", THRESHOLD_METHODS)
def test_a_budget_of_everything_changes_no_token(checkpoint: Path, uncompressed: list, method: str) -> None:
    config = compression_config(method, "threshold", threshold_tokens=40, budget_tokens=40)
    assert complete_without_recorder(checkpoint, config) == uncompressed
