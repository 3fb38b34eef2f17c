"""A worker that executes plans literally, entry by entry, on a cache that stores what each entry stands for.

It shares no code with the real worker. An entry is (position, digest of all tokens up to it), so a wrong prefix hit, a
lost copy on write, a slot written twice or a misplaced survivor shows at once. Entries of sliding KV groups also say
whose part they are of.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from itertools import pairwise

from kvllm.config import EngineConfig
from kvllm.core.executor import BlockingExecutor
from kvllm.core.policies import Standalone, Threshold
from kvllm.core.protocol import (
    NOWHERE,
    BlockCopy,
    CompressionJob,
    DraftOrder,
    Load,
    PartJob,
    SampledToken,
    StepPlan,
    StepResult,
    TransferReport,
    decode_plan,
    encode,
)
from kvllm.core.sequence import Sequence
from kvllm.core.spans import Span, kept_spans
from kvllm.sampling_params import SamplingParams
from tests.helpers.plans import scheduled_in

Entry = tuple[int, ...]


@dataclass
class LiteralTable:
    """Blocks of a sequence in a part, and the entries of the text that it lacks."""

    dropped: int
    blocks: list[int]


class LiteralSequence:
    def __init__(self, tokens: list[int], prompt_length: int, logical: int, sampling: SamplingParams) -> None:
        self.tokens = tokens
        self.sampling = sampling
        self.prompt_length = prompt_length
        self.tables: list[LiteralTable] = []
        self.logical = logical
        self.first_scored: int | None = None  # a position; none before it has a score
        self.choice: CompressionJob | None = None  # of windows that are compressed later
        self.state = 0  # a digest of all tokens that are computed

    def compute(self) -> None:
        """Take one token more."""
        self.state = hash((self.state, self.tokens[self.logical]))
        self.logical += 1

    def state_of_text(self) -> int:
        digest = 0
        for token in self.tokens[: self.logical]:
            digest = hash((digest, token))
        return digest

    def check_state(self) -> None:
        assert self.state == self.state_of_text(), "the recurrent state is that of another text"

    @property
    def cached(self) -> int:
        """Entries in the first part."""
        return self.logical - self.tables[0].dropped

    def entry(self, position: int) -> Entry:
        digest = 0
        for token in self.tokens[: position + 1]:
            digest = hash((digest, token))
        return position, digest


class LiteralHost:
    """What host blocks hold, and loads that take any time. A share of what is stored gets lost."""

    def __init__(self, block_size: int, rng: random.Random, loss: float) -> None:
        self.block_size = block_size
        self.random = rng
        self.loss = loss
        self.slowness = 0.75  # the share of loads under way that do not end in a step
        self.blocks: dict[int, list[Entry | None]] = {}
        self.loads: dict[int, tuple[list[int], list[list[Entry | None]] | None]] = {}
        self.cancelled: list[int] = []
        self.first_scored: dict[int, int | None] = {}
        self.states: dict[int, int] = {}
        self.disk: dict[bytes, list[Entry | None]] = {}
        self.has_told = False  # what is on the disk

    def restart(self) -> None:
        """All but the disk is empty."""
        self.blocks.clear()
        self.loads.clear()
        self.cancelled.clear()
        self.first_scored.clear()
        self.states.clear()
        self.has_told = False

    def slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def store(self, plan: StepPlan, cache: dict[int, Entry]) -> None:
        for number in plan.cancelled:
            if self.loads.pop(number, None):
                self.cancelled.append(number)
        for transfer in plan.stores:
            digests = transfer.digests or [b""] * len(transfer.blocks)
            for block, host_block, digest in zip(transfer.blocks, transfer.host_blocks, digests, strict=True):
                content = [cache.get(slot) for slot in self.slots(block)]
                self._keep(self.blocks, host_block, content, host_block != NOWHERE)
                self._keep(self.disk, digest, content, digest != b"")

    def _keep(self, tier: dict, key: int | bytes, content: list[Entry | None], is_asked: bool) -> None:
        if is_asked:
            tier[key] = content
            if self.random.random() < self.loss:
                del tier[key]

    def load(self, load: Load, cache: dict[int, Entry], in_use: set[int]) -> None:
        blocks, host_blocks = load.transfer.blocks, load.transfer.host_blocks
        assert len(set(blocks)) == len(blocks) == len(host_blocks) and not in_use & set(blocks)
        for block in blocks:
            for slot in self.slots(block):
                cache[slot] = (-1, -1)  # whatever
        digests = load.transfer.digests or [b""] * len(blocks)
        found = [
            self.disk.get(digest) if host_block == NOWHERE else self.blocks.get(host_block)
            for host_block, digest in zip(host_blocks, digests, strict=True)
        ]
        content = [entries[:] for entries in found if entries is not None]
        self.loads[load.number] = blocks, content if len(content) == len(found) else None

    def report(self, cache: dict[int, Entry], wait: bool) -> TransferReport:
        loaded, lost, self.cancelled = [], self.cancelled, []
        for number, (blocks, content) in list(self.loads.items()):
            if not wait and self.random.random() < self.slowness:
                continue
            del self.loads[number]
            (lost if content is None else loaded).append(number)
            for block, entries in zip(blocks, content or [], strict=False):
                for slot, entry in zip(self.slots(block), entries, strict=True):
                    cache.pop(slot, None)
                    if entry is not None:
                        cache[slot] = entry
        on_disk = [] if self.has_told else list(self.disk)
        self.has_told = True
        return TransferReport(loaded, lost, self.random.randrange(3), self.random.random(), on_disk)


class LiteralWorker(BlockingExecutor):
    """vocab: sampled tokens are below it; few of them make equal prefixes likely. loss: the share of blocks stored on
    the host that get lost."""

    def __init__(self, config: EngineConfig, vocab: int = 2, seed: int = 0, loss: float = 0.0) -> None:
        self.config = config
        self.vocab = vocab
        self.compression = config.active_compression
        parts = [group for group in config.kv_groups for _ in group.parts]
        self.windows = [group.window for group in parts]
        self.retained = [group.retain_blocks for group in parts]
        self.cache: dict[int, Entry] = {}
        self.sequences: dict[int, LiteralSequence] = {}
        self.random = random.Random(seed)
        self.host = LiteralHost(config.block_size, random.Random(seed), loss)
        self.states: dict[int, int] = {}  # by rows
        self.verified: dict[int, list[int]] = {}  # sequences with drafts in the last step, and the right tokens

    def slot(self, table: LiteralTable, position: int) -> int:
        """Of a token after all that the table lacks."""
        assert position >= table.dropped, "this block is released"
        block, offset = divmod(position - table.dropped, self.config.block_size)
        return table.blocks[block] * self.config.block_size + offset

    @property
    def full_parts(self) -> list[int]:
        """Those that attend all tokens."""
        return [part for part, window in enumerate(self.windows) if window is None]

    def entry(self, seq: LiteralSequence, part: int, position: int) -> Entry:
        """What a part holds of a token."""
        return (part, *seq.entry(position)) if part or self.windows[0] is not None else seq.entry(position)

    def entries(self, blocks: list[int], begin: int, end: int) -> list[Entry]:
        size = self.config.block_size
        return [self.cache[blocks[index // size] * size + index % size] for index in range(begin, end)]

    def close(self) -> None:
        """Nothing to release."""

    def execute(self, plan: StepPlan) -> StepResult:
        plan = decode_plan(encode(plan))
        if plan.reset:
            self.sequences.clear()
            self.host.restart()
        self._accept(plan)
        for each in plan.state_copies:
            assert 0 <= each.row < self.config.num_state_snapshots
            self.states[each.row] = self.sequences[each.seq_id].state
        self.host.store(plan, self.cache)
        for seq_id in plan.suspended:
            if seq_id in self.sequences:
                self.host.first_scored[seq_id] = self.sequences[seq_id].first_scored
                self.host.states[seq_id] = self.sequences[seq_id].state
        for seq_id in plan.forgotten:
            self.host.first_scored.pop(seq_id, None)
            self.host.states.pop(seq_id, None)
        for seq_id in plan.dropped_seq_ids:
            del self.sequences[seq_id]
        for start in plan.new_seqs:
            assert start.seq_id not in self.sequences
            self.sequences[start.seq_id] = seq = LiteralSequence(
                start.token_ids, start.prompt_length, start.logical_length, start.sampling
            )
            seq.tables = [LiteralTable(table.dropped, table.blocks) for table in start.tables]
            assert len(seq.tables) == len(self.windows)
            seq.first_scored = self.host.first_scored.pop(start.seq_id, None)
            seq.state = 0 if start.state_row is None else self.states[start.state_row]
            seq.state = self.host.states.pop(start.seq_id, seq.state)
        for start in plan.scored:
            seq = self.sequences[start.seq_id]
            assert start.kv_index % self.config.block_size == 0 and start.kv_index >= seq.cached == seq.logical
            assert seq.first_scored is None and self.compression.spec.reselects
            seq.first_scored = start.kv_index
        assert len({job.seq_id for job in plan.compressions}) == len(plan.compressions)
        for job in plan.choices:
            assert not any(part.region_blocks or part.destinations for part in job.parts)
            self._choose(self.sequences[job.seq_id], job)
        for job in plan.compressions:
            self._choose(self.sequences[job.seq_id], job)
            self._compress(self.sequences[job.seq_id], job)
        for block_copy in plan.copies:
            self._copy(self.sequences[block_copy.seq_id], block_copy)
        for load in plan.loads:
            self.host.load(load, self.cache, self._in_use(plan))
        result = self._forward(plan)
        result.transfers = self.host.report(self.cache, wait=not plan.num_seqs)
        return result

    def _accept(self, plan: StepPlan) -> None:
        """Every sequence with a draft gets to know how much of it was right, unless it has ended."""
        told = {each.seq_id: each.token_ids for each in plan.accepted}
        assert self.verified.keys() >= told.keys() and len(told) == len(plan.accepted)
        for seq_id, right in self.verified.items():
            if seq_id in told:
                assert told[seq_id] == right
                seq = self.sequences[seq_id]
                seq.tokens += right
                for _ in right:
                    seq.compute()
                self._slide(seq)
            else:
                assert plan.reset or seq_id in plan.dropped_seq_ids
        self.verified = {}

    def _in_use(self, plan: StepPlan) -> set[int]:
        """Blocks that the step reads or writes after its loads."""
        used = {block for item in scheduled_in(plan) for of_part in item.new_blocks for block in of_part}
        return used.union(*(table.blocks for seq in self.sequences.values() for table in seq.tables))

    @staticmethod
    def _choose(seq: LiteralSequence, job: CompressionJob) -> None:
        """What was chosen before are the first windows of this very job, and no compression came between."""
        if job.chosen:
            before = seq.choice
            assert before is not None and before.num_windows == job.chosen < job.num_windows
            for earlier, part in zip(before.parts, job.parts, strict=True):
                same = [(each.first_block, each.size, each.retain) for each in (earlier, part)]
                assert same[0] == same[1]
        seq.choice = job

    def _compress(self, seq: LiteralSequence, job: CompressionJob) -> None:
        seq.choice = None
        config = self.compression
        overlap = config.buffer if isinstance(config.policy, Standalone) else 0
        first = job.parts[0]
        assert first.stride == first.size - overlap
        assert seq.sampling.compress, "this request keeps all"
        own = seq.sampling.retain_blocks
        if own is not None or (not isinstance(config.policy, Threshold) and not config.named_groups):
            retained = config.retained(self.config.block_size) if own is None else own * self.config.block_size
            assert self._keeps(first, retained) and first.retain < first.size
        parts = zip(self.full_parts, job.parts, strict=True)
        positions = {self._compact(seq, own, part) for part, own in parts}
        assert len(positions - {None}) == 1, "parts compress other windows"

    def _keeps(self, job: PartJob, retained: int) -> bool:
        """Whether a window keeps `retained` entries; of what is chosen from again, each new window drops as many."""
        if not self.compression.spec.reselects:
            return job.retain == retained
        window = self.compression.policy.window_blocks * self.config.block_size
        return (job.size - job.retain) % (window - retained) == 0

    def _compact(self, seq: LiteralSequence, job: PartJob, part: int) -> int | None:
        """Execute a job in one part. Returns the position of an entry of its region, the same in all parts, if it does
        anything."""
        config, size = self.compression, self.config.block_size
        overlap = config.buffer if isinstance(config.policy, Standalone) else 0
        table = seq.tables[part]
        blocks, cached = table.blocks, seq.logical - table.dropped
        if seq.sampling.retain_blocks is None and self.retained[part] is not None:
            kept = self.retained[part]
            assert self._keeps(job, kept * size) if job.dropped else kept == config.policy.window_blocks
        if not job.dropped:
            assert not job.region_blocks and not job.destinations
            return None
        start = job.first_block * size
        region_end = min(cached, (job.first_block + job.region_blocks) * size)
        survivors: list[int] = []
        end = start
        for i in range(job.num_windows if job.destinations else 0):
            first = start + i * (job.size - overlap)
            end = first + job.size
            buffer = list(range(end - config.buffer, end))
            chosen = sorted(self.random.sample(range(first, end - len(buffer)), job.retain - len(buffer)))
            survivors += chosen if i < job.num_windows - 1 and overlap else chosen + buffer
        survivors += range(end, region_end) if job.destinations else ()
        before = seq.logical - cached
        kept = [self.entries(blocks, index, index + 1)[0] for index in survivors]
        region = [position for *_, position, _ in self.entries(blocks, start, region_end)]
        if not isinstance(config.policy, Threshold):
            if config.spec.reselects:
                assert start == seq.first_scored, "it leaves out what could be chosen from again"
                assert region[0] >= seq.first_scored, "it has no scores"
            else:
                whole = list(range(start + before, region_end + before))
                assert region == whole, "a window holds an entry that was compressed before"
            if not config.compress_prompt:
                assert region[0] >= seq.prompt_length, "the prompt is protected"
        sources = blocks[job.first_block : job.first_block + job.region_blocks]
        in_place = job.destinations == sources[: len(job.destinations)]
        assert in_place or not set(sources) & set(job.destinations)
        blocks[job.first_block : job.first_block + job.region_blocks] = job.destinations
        for j, entry in enumerate(kept, start):
            self.cache[blocks[j // size] * size + j % size] = entry
        table.dropped += len(region) - len(survivors)
        return region[job.size - 1 if config.spec.reselects else 0]  # what is left of windows may differ in parts

    def _copy(self, seq: LiteralSequence, plan: BlockCopy) -> None:
        size, destination = self.config.block_size, plan.destination
        index, table = plan.index, seq.tables[plan.part].blocks
        source, table[index] = table[index], destination
        for offset in range(size):
            if source * size + offset in self.cache:
                self.cache[destination * size + offset] = self.cache[source * size + offset]

    def _forward(self, plan: StepPlan) -> StepResult:
        result = StepResult([])
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        for item in scheduled_in(plan):
            seq = self.sequences[item.seq_id]
            seq.tokens += [*item.new_tokens, *item.draft]
            for table, blocks in zip(seq.tables, item.new_blocks, strict=bool(item.new_blocks)):
                table.blocks += blocks
            policy = self.compression.policy if self.compression and seq.sampling.compress else None
            if isinstance(policy, Threshold) and seq.logical >= seq.prompt_length:
                assert seq.cached < policy.threshold_tokens, "it runs on without the compression that is due"
            for _ in range(item.num_tokens):
                for part, table in enumerate(seq.tables):
                    self.cache[self.slot(table, seq.logical)] = self.entry(seq, part, seq.logical)
                seq.compute()
        for item in scheduled_in(plan):  # every write of the step is done: nobody wrote over somebody else's entries
            seq = self.sequences[item.seq_id]
            for part in self.full_parts:
                table = seq.tables[part]
                self._check_entries(seq, part, self.entries(table.blocks, 0, seq.logical - table.dropped))
            self._check_windows(seq, item.num_tokens)
            if self.config.has_recurrent_layers:
                seq.check_state()
            assert item.samples == (seq.logical == len(seq.tokens))
            if item.draft:
                result.verified.append(self._verify(item.seq_id, seq, item.draft))
            self._slide(seq)
            if item.draft or not item.samples:
                continue
            tokens = result.tokens
            tokens.append(self._sample(item.seq_id, seq))
            for fork in item.forks:
                child = LiteralSequence(list(seq.tokens), seq.prompt_length, seq.logical, seq.sampling)
                child.first_scored, child.state = seq.first_scored, seq.state
                child.tables = copy.deepcopy(seq.tables)
                assert fork.seq_id not in self.sequences
                self.sequences[fork.seq_id] = child
                tokens.append(self._sample(fork.seq_id, child))
        sampling = {item.seq_id for item in scheduled_in(plan) if item.samples}
        assert {order.seq_id for order in plan.drafts} <= sampling and len(plan.drafts) <= len(sampling)
        result.drafts = [self._draft(order) for order in plan.drafts]
        return result

    def _draft(self, order: DraftOrder) -> list[int]:
        """Of the tokens that come next, the first ones; after these there may be wrong ones, or nothing at all."""
        assert 1 <= order.num_tokens <= self.config.speculation.num_speculative_tokens
        seq, count = self.sequences[order.seq_id], len(self.sequences[order.seq_id].tokens)
        if self.random.random() < 0.2:
            return []
        seq.tokens += self.verified.get(order.seq_id, [])
        begin = len(seq.tokens) + 1
        while len(seq.tokens) < begin + order.num_tokens:
            seq.tokens.append(self._sample(order.seq_id, seq).token_id)
        draft = [token if self.random.random() < 0.7 else 0 for token in seq.tokens[begin:]]
        del seq.tokens[count:]
        return draft

    def _verify(self, seq_id: int, seq: LiteralSequence, draft: list[int]) -> list[SampledToken]:
        """Take the draft back, and sample for as long as it is right."""
        before = len(seq.tokens) - len(draft)
        del seq.tokens[before:]
        seq.logical -= len(draft)
        seq.state = seq.state_of_text()
        sampled = [self._sample(seq_id, seq)]
        while len(sampled) <= len(draft) and sampled[-1].token_id == draft[len(sampled) - 1]:
            seq.tokens.append(sampled[-1].token_id)
            sampled.append(self._sample(seq_id, seq))
        self.verified[seq_id] = [token.token_id for token in sampled[:-1]]
        del seq.tokens[before:]
        return sampled

    def _sample(self, seq_id: int, seq: LiteralSequence) -> SampledToken:
        return SampledToken(hash((seq_id, tuple(seq.tokens))) % self.vocab)

    def _check_entries(self, seq: LiteralSequence, part: int, entries: list[Entry]) -> None:
        positions = [position for *_, position, _ in entries]
        assert positions == sorted(set(positions)), "survivors are not in ascending order"
        assert positions[-1] == seq.logical - 1
        expected = [self.entry(seq, part, position) for position in positions]
        assert entries == expected, "an entry belongs to another text"
        if self.compression is None or not seq.sampling.compress:
            assert positions == list(range(seq.logical))
        elif not self.compression.compress_prompt and not isinstance(self.compression.policy, Threshold):
            assert positions[: seq.prompt_length] == list(range(min(seq.prompt_length, seq.logical)))

    def _check_windows(self, seq: LiteralSequence, num_tokens: int) -> None:
        """All that the step's query tokens attend is there, in as few blocks as the chunk allows."""
        size = self.config.block_size
        for part, window in enumerate(self.windows):
            if window is None:
                continue
            for position in range(max(0, seq.logical - num_tokens + 1 - window), seq.logical):
                assert self.cache[self.slot(seq.tables[part], position)] == self.entry(seq, part, position)
            drafted = self.config.speculation.num_speculative_tokens if self.config.speculation else 0
            chunk = max(num_tokens, 1 + drafted)  # room for drafts stays, right or wrong
            assert len(seq.tables[part].blocks) <= -(-(window - 1 + chunk) // size) + 1

    def _slide(self, seq: LiteralSequence) -> None:
        """Let go of the blocks that no later token attends."""
        size = self.config.block_size
        for table, window in zip(seq.tables, self.windows, strict=True):
            while window is not None and table.dropped + size <= seq.logical + 1 - window:
                table.dropped += size
                del table.blocks[0]

    def check_agrees(self, seq: Sequence) -> None:
        """The scheduler's idea of a running sequence is the worker's."""
        mine, right = self.sequences[seq.seq_id], self.verified.get(seq.seq_id, [])
        assert mine.logical + len(right) == seq.logical_length
        if right:
            return  # until the next plan says so
        assert mine.tables == [LiteralTable(table.dropped, table.blocks) for table in seq.tables]
        if None not in self.windows:
            return
        self._check_spans(mine, kept_spans(seq.compressions, seq.logical_length))

    def _check_spans(self, seq: LiteralSequence, spans: list[Span]) -> None:
        """The spans follow each other, and of each as many entries are left as it says."""
        assert (spans[0].start, spans[-1].end) == (0, seq.logical)
        assert all(span.end == after.start for span, after in pairwise(spans))
        positions = [position for position, _ in self.entries(seq.tables[0].blocks, 0, seq.cached)]
        for span in spans:
            assert sum(span.start <= position < span.end for position in positions) == span.kept
