"""A worker that executes plans literally, entry by entry, on a cache that stores what each entry stands for.

It shares no code with the real worker. An entry is (position, digest of all tokens up to it), so a wrong prefix hit, a
lost copy on write, a slot written twice or a misplaced survivor shows at once. Entries of sliding KV groups also say
whose part they are of.
"""

from __future__ import annotations

import copy
import random
from itertools import pairwise

from kvllm.config import EngineConfig
from kvllm.core.protocol import BlockCopy, SampledToken, StepPlan, StepResult, decode_plan, encode
from kvllm.core.sequence import Sequence
from kvllm.core.spans import Span, kept_spans
from kvllm.sampling_params import SamplingParams

Entry = tuple[int, ...]


class LiteralTable:
    """Blocks of a sequence in a part of a sliding group, from block `first` of the text on."""

    def __init__(self) -> None:
        self.first = 0
        self.blocks: list[int] = []

    def slide(self, first: int) -> None:
        assert first >= self.first
        self.blocks = self.blocks[first - self.first :]
        self.first = first


class LiteralSequence:
    def __init__(self, tokens: list[int], prompt_length: int, cached: int, sampling: SamplingParams) -> None:
        self.tokens = tokens
        self.sampling = sampling
        self.prompt_length = prompt_length
        self.table: list[int] = []
        self.sliding: dict[int, LiteralTable] = {}
        self.logical = cached
        self.cached = cached
        self.first_scored: int | None = None  # a position; none before it has a score

    def entry(self, position: int) -> Entry:
        digest = 0
        for token in self.tokens[: position + 1]:
            digest = hash((digest, token))
        return position, digest


class LiteralWorker:
    """vocab: sampled tokens are below it; few of them make equal prefixes likely."""

    def __init__(self, config: EngineConfig, vocab: int = 2, seed: int = 0) -> None:
        self.config = config
        self.vocab = vocab
        self.compression = config.active_compression
        self.windows = [group.window for group in config.kv_groups for _ in group.parts]
        self.cache: dict[int, Entry] = {}
        self.sequences: dict[int, LiteralSequence] = {}
        self.random = random.Random(seed)
        self.divergences: list[float] = []  # of the step

    def slot(self, seq: LiteralSequence, index: int) -> int:
        block, offset = divmod(index, self.config.block_size)
        return seq.table[block] * self.config.block_size + offset

    def sliding_slot(self, seq: LiteralSequence, part: int, position: int) -> int:
        block, offset = divmod(position, self.config.block_size)
        table = seq.sliding[part]
        assert block >= table.first, "this block is released"
        return table.blocks[block - table.first] * self.config.block_size + offset

    def entries(self, seq: LiteralSequence) -> list[Entry]:
        return [self.cache[self.slot(seq, index)] for index in range(seq.cached)]

    def execute(self, plan: StepPlan) -> StepResult:
        plan = decode_plan(encode(plan))
        if plan.reset:
            self.sequences.clear()
        for seq_id in plan.dropped_seq_ids:
            del self.sequences[seq_id]
        for start in plan.new_seqs:
            assert start.seq_id not in self.sequences
            self.sequences[start.seq_id] = LiteralSequence(
                start.token_ids, start.prompt_length, start.cached_length, start.sampling
            )
        for start in plan.scored:
            seq = self.sequences[start.seq_id]
            assert start.kv_index % self.config.block_size == 0 and start.kv_index >= seq.cached == seq.logical
            assert seq.first_scored is None and self.compression.observes_scores
            seq.first_scored = start.kv_index
        assert len({job.seq_id for job in plan.compressions}) == len(plan.compressions)
        self.divergences = []
        for job in plan.compressions:
            self._compress(self.sequences[job.seq_id], job)
        for block_copy in plan.copies:
            self._copy(self.sequences[block_copy.seq_id], block_copy)
        for change in plan.sliding:
            table = self.sequences[change.seq_id].sliding.setdefault(change.part, LiteralTable())
            table.slide(change.first)
            table.blocks += change.new_blocks
        return self._forward(plan)

    def _compress(self, seq: LiteralSequence, job) -> None:
        config = self.compression
        overlap = config.buffer if config.policy == "standalone" else 0
        assert job.stride == job.size - overlap
        assert seq.sampling.compress, "this request keeps all"
        own = seq.sampling.retain_blocks
        assert own is None or job.retain == own * self.config.block_size < job.size
        size = self.config.block_size
        self._judge(seq, job)
        start = job.first_block * size
        region_end = min(seq.cached, (job.first_block + job.region_blocks) * size)
        survivors: list[int] = []
        end = start
        for i in range(job.num_windows if job.destinations else 0):
            first = start + i * (job.size - overlap)
            end = first + job.size
            buffer = list(range(end - config.buffer, end))
            chosen = sorted(self.random.sample(range(first, end - len(buffer)), job.retain - len(buffer)))
            survivors += chosen if i < job.num_windows - 1 and overlap else chosen + buffer
        survivors += range(end, region_end) if job.destinations else ()
        before = seq.logical - seq.cached
        kept = [self.cache[self.slot(seq, index)] for index in survivors]
        region = [self.cache[self.slot(seq, index)] for index in range(start, region_end)]
        if config.policy != "threshold":
            assert [position for position, _ in region] == list(range(start + before, region_end + before)), (
                "a window holds an entry that was compressed before"
            )
            if config.observes_scores:
                assert seq.first_scored is not None and region[0][0] >= seq.first_scored, "it has no scores"
            if not config.compress_prompt:
                assert region[0][0] >= seq.prompt_length, "the prompt is protected"
        sources = seq.table[job.first_block : job.first_block + job.region_blocks]
        in_place = job.destinations == sources[: len(job.destinations)]
        assert in_place or not set(sources) & set(job.destinations)
        seq.table[job.first_block : job.first_block + job.region_blocks] = job.destinations
        for j, entry in enumerate(kept):
            self.cache[self.slot(seq, start + j)] = entry
        seq.cached -= job.dropped

    def _judge(self, seq: LiteralSequence, job) -> None:
        """A guard lets windows keep whole blocks more, but never all. It is told numbers of any size."""
        config = self.compression
        if seq.sampling.retain_blocks is None and config.policy != "threshold":
            added = job.retain - config.retained(self.config.block_size)
            assert added >= 0 and added % self.config.block_size == 0 and job.retain < job.size
            assert added == 0 or config.guard_kl
        if job.judged:
            assert config.guard_kl and seq.sampling.retain_blocks is None and job.num_windows == 1
            assert seq.cached - job.first_block * self.config.block_size - job.size >= config.buffer
            self.divergences.append(self.random.choice([0.0, 0.0, 0.0, 1e-9, 0.01, 5.0, float("nan"), float("inf")]))

    def _copy(self, seq: LiteralSequence, plan: BlockCopy) -> None:
        size, destination = self.config.block_size, plan.destination
        index, table = plan.index, seq.table
        if self.windows[plan.part] is not None:
            index, table = index - seq.sliding[plan.part].first, seq.sliding[plan.part].blocks
        source, table[index] = table[index], destination
        for offset in range(size):
            if source * size + offset in self.cache:
                self.cache[destination * size + offset] = self.cache[source * size + offset]

    def _forward(self, plan: StepPlan) -> StepResult:
        tokens = []
        assert sum(item.num_tokens for item in plan.scheduled) <= self.config.max_num_batched_tokens
        for item in plan.scheduled:
            seq = self.sequences[item.seq_id]
            seq.tokens += item.new_tokens
            seq.table += item.new_blocks
            threshold = self.compression.threshold_tokens if self.compression and seq.sampling.compress else None
            if threshold is not None and seq.logical >= seq.prompt_length:
                assert seq.cached < threshold, "it runs on without the compression that is due"
            for _ in range(item.num_tokens):
                if None in self.windows:
                    self.cache[self.slot(seq, seq.cached)] = seq.entry(seq.logical)
                for part in seq.sliding:
                    self.cache[self.sliding_slot(seq, part, seq.logical)] = (part, *seq.entry(seq.logical))
                seq.cached += 1
                seq.logical += 1
        for item in plan.scheduled:  # every write of the step is done: nobody wrote over somebody else's entries
            seq = self.sequences[item.seq_id]
            if None in self.windows:
                self._check_entries(seq)
            self._check_windows(seq, item.num_tokens)
            assert item.samples == (seq.logical == len(seq.tokens))
            if not item.samples:
                continue
            tokens.append(self._sample(item.seq_id, seq))
            for fork in item.forks:
                child = LiteralSequence(list(seq.tokens), seq.prompt_length, seq.cached, seq.sampling)
                child.logical = seq.logical
                child.table = list(seq.table)
                child.first_scored = seq.first_scored
                child.sliding = copy.deepcopy(seq.sliding)
                assert fork.seq_id not in self.sequences
                self.sequences[fork.seq_id] = child
                tokens.append(self._sample(fork.seq_id, child))
        return StepResult(tokens, divergences=self.divergences)

    def _sample(self, seq_id: int, seq: LiteralSequence) -> SampledToken:
        return SampledToken(hash((seq_id, tuple(seq.tokens))) % self.vocab)

    def _check_entries(self, seq: LiteralSequence) -> None:
        entries = self.entries(seq)
        positions = [position for position, _ in entries]
        assert positions == sorted(set(positions)), "survivors are not in ascending order"
        assert positions[-1] == seq.logical - 1
        assert entries == [seq.entry(position) for position in positions], "an entry belongs to another text"
        if self.compression is None or not seq.sampling.compress:
            assert positions == list(range(seq.logical))
        elif not self.compression.compress_prompt and self.compression.policy != "threshold":
            assert positions[: seq.prompt_length] == list(range(min(seq.prompt_length, seq.logical)))

    def _check_windows(self, seq: LiteralSequence, num_tokens: int) -> None:
        """All that the step's query tokens attend is there, in as few blocks as the chunk allows."""
        size = self.config.block_size
        for part, window in enumerate(self.windows):
            if window is None:
                continue
            for position in range(max(0, seq.logical - num_tokens + 1 - window), seq.logical):
                assert self.cache[self.sliding_slot(seq, part, position)] == (part, *seq.entry(position))
            assert len(seq.sliding[part].blocks) <= -(-(window - 1 + num_tokens) // size) + 1

    def check_agrees(self, seq: Sequence) -> None:
        """The scheduler's idea of a running sequence is the worker's, but for what it releases in the next step."""
        mine = self.sequences[seq.seq_id]
        assert (mine.logical, mine.cached) == (seq.logical_length, seq.cached_length)
        for table in seq.sliding:
            for i, part in enumerate(table.parts):
                of_part = mine.sliding[part]
                assert of_part.blocks[table.first - of_part.first :] == table.blocks[i :: len(table.parts)]
        if None not in self.windows:
            return
        self._check_spans(mine, kept_spans(seq.compressions, seq.logical_length))

    def _check_spans(self, seq: LiteralSequence, spans: list[Span]) -> None:
        """The spans follow each other, and of each as many entries are left as it says."""
        assert (spans[0].start, spans[-1].end) == (0, seq.logical)
        assert all(span.end == after.start for span, after in pairwise(spans))
        positions = [position for position, _ in self.entries(seq)]
        for span in spans:
            assert sum(span.start <= position < span.end for position in positions) == span.kept
