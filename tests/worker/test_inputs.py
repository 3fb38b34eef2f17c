"""Inputs of a step: what was prepared before never shows, and is in nobody's way."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm.attention.registry import make_backend
from kvllm.core.protocol import PartJob
from kvllm.core.tables import TableStart
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.sampling_params import SamplingParams
from kvllm.worker.features.attention_mass import AttentionMass
from kvllm.worker.features.observed_scores import NEVER, ObservedScores
from kvllm.worker.features.ragged_lengths import RaggedLengths
from kvllm.worker.inputs import InputPreparer, read_batch
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.state import PartTables, SequenceState
from kvllm.worker.step_inputs import InputShape, StepInputs
from tests.helpers.examples import examples

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_SEQS, MAX_BLOCKS = 4, 5, 16


class Worker:
    """Sequences, and two that prepare inputs of all their steps: one ahead, too."""

    def __init__(self) -> None:
        self.parts = PartTables(MAX_SEQS, [MAX_BLOCKS, MAX_BLOCKS], BLOCK_SIZE)
        self.tables, self.sliding = self.parts.parts
        shape = CacheShape(2, 3, 8, BLOCK_SIZE, torch.float32)
        self.ragged, self.mass = RaggedLengths(shape, MAX_SEQS, CPU), AttentionMass(shape, MAX_SEQS, 1, CPU)
        scored = PagedKVCache(CacheShape(2, 3, 8, BLOCK_SIZE, torch.float32, scored=True), 1)
        backend = make_backend("reference", scored, 3, 1.0)
        self.scores = ObservedScores(
            make_operations(scored), backend, [self.tables], 1, MAX_SEQS, [0] * scored.shape.num_layers
        )
        self.ahead, self.usual = self.preparer(), self.preparer()
        self.states: list[SequenceState] = []
        self.next_block = 0

    def preparer(self) -> InputPreparer:
        """One that has prepared nothing yet, and so writes all anew."""
        return InputPreparer(self.parts, CPU, [self.ragged, self.mass, self.scores])

    def start(self, length: int) -> None:
        tokens = list(range(100 * len(self.states), 100 * len(self.states) + length))
        row = SampleRow(SamplingParams(), 0, tokens, [])
        table_slot = len(self.states)
        self.parts.start(table_slot, length - 1, [])
        self.states.append(SequenceState(tokens, table_slot, self.parts, row))

    def grow(self, state: SequenceState, num_tokens: int) -> None:
        """Blocks for so many more pairs."""
        slot = state.table_slot
        for tables in self.parts.parts:
            length = int(tables.kv_lengths([slot])[0]) + num_tokens
            tables.append(slot, self.new_blocks(-(-length // BLOCK_SIZE) - tables.num_blocks[slot]))

    def slide(self, state: SequenceState) -> None:
        """Only the block of the next token is left."""
        count = int(self.sliding.kv_lengths([state.table_slot])[0]) // BLOCK_SIZE
        self.sliding.slide(state.table_slot, count)

    def new_blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def compress(self, state: SequenceState) -> None:
        """Two blocks of pairs become one, of which heads keep different numbers."""
        job = PartJob(0, 1, 2 * BLOCK_SIZE, BLOCK_SIZE, 2 * BLOCK_SIZE, 2, self.new_blocks(1))
        self.tables.compact(state.table_slot, job)
        self.ragged.set([state.table_slot], [0], torch.randint(5, (2, 1, 3)), [BLOCK_SIZE])

    def shape(self, states: list[SequenceState], num_tokens: list[int], spare: int) -> InputShape:
        return self.ahead.shape(sum(num_tokens) + spare, len(states) + spare, MAX_BLOCKS, MAX_BLOCKS)


def fields(inputs: StepInputs) -> dict[str, list]:
    return {name: inputs.by_name[name].tolist() for name, *_ in inputs.shape.layout()}


EVENTS = (
    "another batch", "a chunk", "more room", "other blocks", "a longer cache", "a compression", "scores are added up",
    "a slide",
)  # fmt: skip


@settings(max_examples=examples(600))
@given(st.lists(st.tuples(st.sampled_from(("nothing", *EVENTS)), st.integers(0, 2)), min_size=1, max_size=8))
def test_what_was_prepared_before_never_shows(events: list[tuple[str, int]]) -> None:
    """Whatever happens between two steps, and whether tables grow: the inputs of earlier steps, which stay in place
    where they are right, and those that were prepared ahead."""
    worker = Worker()
    for length in (12, 12, 12):
        worker.start(length)
    for state in worker.states:
        worker.grow(state, 1)
    batch, num_tokens, spare = worker.states, [1, 1, 1], 1
    for event, number in [("nothing", 0), *events]:
        state, num_tokens = worker.states[number], [1, 1, 1]
        match event:
            case "another batch":
                batch = [*batch[1:], batch[0]]
            case "a chunk":
                num_tokens = [1 + 2 * (i == number) for i in range(3)]
            case "more room":
                spare = 1 + number
            case "other blocks":
                worker.tables.replace(state.table_slot, 1, 1, worker.new_blocks(1))
            case "a longer cache":
                worker.grow(state, 2)
                worker.parts.logical[state.table_slot] += 1
            case "scores are added up":
                worker.scores.observe(state.table_slot, state.cached_length)
            case "a compression" if state.cached_length > 2 * BLOCK_SIZE:
                worker.compress(state)
            case "a slide":
                worker.slide(state)
        for each, count in zip(batch, num_tokens, strict=True):
            worker.grow(each, count)
        token_ids = np.array([number + 7 * i for i in range(sum(num_tokens))])
        shape = worker.shape(batch, num_tokens, spare)
        preparers = (worker.ahead, worker.preparer(), worker.usual)
        found, anew, usual = (preparer.prepare(batch, num_tokens, shape) for preparer in preparers)
        for inputs in (found, anew, usual):
            inputs.write_tokens(token_ids)
        assert fields(found) == fields(anew) == fields(usual)
        worker.parts.advance(np.array([each.table_slot for each in batch]), np.array(num_tokens))
        before = found.memory.clone()
        worker.ahead.prepare_ahead(batch, num_tokens, shape)
        assert torch.equal(found.memory, before)  # which may be on its way to the device


def test_inputs_written_out() -> None:
    """A chunk of a prompt and a decode of a compressed sequence, and room for one more."""
    worker = Worker()
    worker.start(9)
    worker.start(3)
    first, second = worker.states
    # Four pairs are gone from either table.
    worker.parts.start(first.table_slot, 9, [TableStart(4, [7, 4, 9]), TableStart(BLOCK_SIZE, [8, 3])])
    worker.ragged.set([first.table_slot], [1], torch.tensor([[[3, 0, 1]], [[2, 2, 3]]]), [3])
    worker.scores.observe(first.table_slot, 4)
    worker.parts.start(second.table_slot, 0, [TableStart(0, [2]), TableStart(0, [1])])
    inputs = worker.ahead.prepare([second, first], [3, 1], worker.ahead.shape(5, 3, 4, 2))
    inputs.write_tokens(np.array([*second.token_ids, 50]))
    assert fields(inputs) == {
        "token_ids": [*second.token_ids, 50, 0],
        "positions": [0, 1, 2, 9, 0],
        "slot_mapping": [[8, 9, 10, 17, -1], [4, 5, 6, 13, -1]],
        "query_start_loc": [0, 3, 4, 5],
        "last_kv_index": [[0, 1, 2, 5, 0], [0, 1, 2, 5, 0]],
        "block_tables_0": [[2, 0, 0, 0], [7, 4, 9, 0], [0, 0, 0, 0]],
        "packed_len": [0, 4, 0],
        "head_lengths": [[[0, 0, 0], [4, 1, 2], [0, 0, 0]], [[0, 0, 0], [3, 3, 4], [0, 0, 0]]],
        "table_slots": [second.table_slot, first.table_slot, MAX_SEQS],
        "scored_from": [[NEVER, 4, NEVER]],
        "block_tables_1": [[1, 0], [8, 3], [0, 0]],
    }
    assert inputs.memory.numel() == inputs.shape.num_bytes
    assert all(begin % 64 == 0 for *_, begin, _ in inputs.shape.layout())


def test_a_device_does_not_hide_the_rows_that_the_host_wrote() -> None:
    """Each part of the KV groups has rows of its own; nothing can be read from the copies."""
    worker = Worker()
    worker.start(9)
    [state] = worker.states
    worker.parts.start(state.table_slot, 6, [TableStart(5, [0]), TableStart(BLOCK_SIZE, [1, 2])])
    inputs = worker.ahead.prepare([state], [3], worker.ahead.shape(3, 1, 4, 2)).to(torch.device("meta"))
    batches = inputs.batches()
    rows = [[part.tolist() for part in batch.on_host or ()] for batch in batches]
    assert rows == [[[0, 3], [1, 2, 3]], [[0, 3], [2, 3, 4]]]
    assert all(batch.last_kv_index.is_meta and batch.of_window.on_host is batch.on_host for batch in batches)


def test_rows_of_cached_tokens_are_on_the_host() -> None:
    worker = Worker()
    worker.tables.append(0, [7, 4])
    worker.tables.append(1, [2, 9])
    index = np.array([[1, 2, 5], [0, 3, 4]])
    batch = read_batch(worker.tables, [1, 0], index, torch.device("meta"))
    assert [part.tolist() for part in batch.on_host or ()] == [[0, 3, 6], [1, 2, 5, 0, 3, 4]]
    batch = read_batch(worker.tables, [1, 0], index, CPU)
    assert batch.on_host and batch.query_start_loc.tolist() == batch.on_host.query_start_loc.tolist()
    assert batch.last_kv_index.tolist() == batch.on_host.last_kv_index.tolist()
    assert batch.block_tables.tolist() == [[2, 9], [7, 4]]
    assert batch.query_start_loc.dtype == batch.last_kv_index.dtype == batch.block_tables.dtype == torch.int32
