"""A worker whose model is exact arithmetic: a token follows from all KV pairs that it attends, and from nothing else.

A KV pair is a digest of the text up to it. The sum over the pairs that a table leads to decides about the next token,
so a wrong block, a wrong position or a lost pair shows at once, in the tokens and in a comparison: beside the cache,
each sequence keeps the positions that its own history of compressions has left, and the sum over these must be the
same. The state of recurrent layers is such a digest, too, which goes from token to token. It shares no code with the
real worker; grammars are followed by those that the worker uses.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvllm.config import EngineConfig
from kvllm.core.executor import Executor
from kvllm.core.policies import Standalone
from kvllm.core.protocol import (
    NOWHERE,
    BlockTransfer,
    CompressionJob,
    DraftOrder,
    Fork,
    Load,
    MissingMass,
    PartJob,
    PromptLogprobs,
    SampledToken,
    StepPlan,
    StepResult,
    TransferReport,
    decode_plan,
    decode_result,
    encode,
)
from kvllm.core.sequence import PENDING
from kvllm.distributed.faults import RestartBudget
from kvllm.errors import RequestError
from kvllm.sampling_params import SamplingParams
from kvllm.structured.compile import Grammars
from kvllm.structured.matcher import Matcher
from kvllm.structured.token_sets import unpack
from tests.helpers.plans import Scheduled, scheduled_in

BITS = 48
"""Of a digest: sums of some thousand are added up fast, as they fit into a machine's word."""
MASK = 2**BITS - 1
GARBAGE = 0x5DEECE66D
VOCAB = 24
END = 2
"""The token that ends a text."""


def mix(value: int) -> int:
    """A permutation of 48 bits in which each bit of the input moves half of the output's."""
    value = (value ^ (value >> 25)) * 0x476D1CE4E5B9 & MASK
    value = (value ^ (value >> 23)) * 0x49BB133111EB & MASK
    return value ^ (value >> 24)


def factor(part: int) -> int:
    """By which the pairs of a part of the layers differ from those of others. It is odd, so nothing is lost."""
    return mix(part + 1) | 1


RECURRENT = factor(1000)
"""What the state of recurrent layers counts beside the pairs."""


def next_token(
    attended: int, length: int, last: int, sampling: SamplingParams, seed: int, allowed: Sequence[int] | None = None
) -> int:
    """The token after `length` tokens, of which `last` is the last one. One in two continues a fixed series, so that
    texts repeat themselves and drafts are right at times.

    attended: the sum of all pairs that it attends, and of the recurrent state. allowed: tokens, where not all are.
    """
    lot = mix(attended ^ length)
    if sampling.temperature:
        lot = mix(lot ^ (seed & MASK))
    if lot >> 32 & 1 and (allowed is None or following(last) in allowed):
        return following(last)
    return lot % VOCAB if allowed is None else allowed[lot % len(allowed)]


def prompt_logprob(attended: int, length: int, token: int) -> float:
    """Of a prompt's token after `length` tokens. attended: the sum of all pairs that it attends."""
    return -(mix(attended ^ length ^ (token << 20)) % 4096) / 64


def following(token: int) -> int:
    """The next token of a fixed series."""
    return (token * 5 + 3) % VOCAB


def likeliest(token: int, count: int) -> list[tuple[int, float]]:
    """The tokens that are said to be the likeliest, the sampled one first, and their log probabilities."""
    return [((token + i) % VOCAB, -0.5 * i) for i in range(count)]


def listed(words: np.ndarray) -> list[int]:
    """The tokens of a set."""
    return unpack(words).nonzero()[0].tolist()


class Text:
    """A text, and digests of its beginnings with the adapter. sums: of the digests before each position."""

    BASE = 7
    """The root of a text without an adapter."""

    def __init__(self, tokens: list[int], adapter: str = "") -> None:
        self.root = int.from_bytes(adapter.encode()) + self.BASE
        self.tokens: list[int] = []
        self.digests: list[int] = []
        self.sums = [0]
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        digest, total = self.digests[-1] if self.digests else self.root, self.sums[-1]
        for token in tokens:
            digest = mix(digest ^ (token + 1))
            total += digest
            self.digests.append(digest)
            self.sums.append(total)
        self.tokens += tokens

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.digests[length:], self.sums[length + 1 :]

    def fork(self) -> Text:
        other = Text([])
        other.root = self.root
        other.tokens, other.digests, other.sums = self.tokens[:], self.digests[:], self.sums[:]
        return other


class Left:
    """What compressions have left of a table. positions: of its pairs, in the order of the cache. total: of their
    digests. may_go: whether each may change places with a dropped one. dropped: pairs that may come back."""

    def __init__(self, positions: list[int], total: int) -> None:
        self.positions = positions
        self.total = total
        self.may_go = [False] * len(positions)
        self.dropped: dict[int, int] = {}

    def add(self, digest: int, position: int) -> None:
        self.positions.append(position)
        self.may_go.append(False)
        self.total += digest

    def cut(self, count: int, text: Text) -> None:
        """Without the last pairs."""
        size = len(self.positions) - count
        self.total -= sum(text.digests[position] for position in self.positions[size:])
        del self.positions[size:], self.may_go[size:]


class Table:
    """Where a part's pairs of a sequence are, and which they are.

    dropped, blocks: what plans say. slots: of the pairs in the cache. left: None for all.
    """

    def __init__(self, dropped: int, blocks: list[int], block_size: int, window: int | None) -> None:
        self.dropped = dropped
        self.block_size = block_size
        self.window = window
        self.left: Left | None = None
        self.blocks: list[int] = []
        self.slots: list[int] = []
        self.replace(0, blocks)

    def replace(self, index: int, blocks: list[int]) -> None:
        """Let other blocks follow on the first `index` ones."""
        size = self.block_size
        self.blocks[index:] = blocks
        del self.slots[index * size :]
        for block in blocks:
            self.slots += range(block * size, (block + 1) * size)

    def slide(self, length: int) -> None:
        """Let go of the blocks that no token after `length` attends."""
        while self.window is not None and self.dropped + self.block_size <= length + 1 - self.window:
            self.dropped += self.block_size
            del self.blocks[0], self.slots[: self.block_size]

    def add(self, digest: int, position: int) -> None:
        if self.left is not None:
            self.left.add(digest, position)

    def expected(self, text: Text, length: int) -> int:
        """The sum over the pairs that the token after `length` tokens attends, by the history of the sequence."""
        if self.window is not None:
            return text.sums[length] - text.sums[max(0, length - self.window)]
        return text.sums[length] if self.left is None else self.left.total

    def fork(self) -> Table:
        assert self.left is None, "a sequence branches after it was compressed"
        return Table(self.dropped, self.blocks, self.block_size, self.window)


class ModelSequence:
    """state: of the recurrent layers, after `logical` tokens. matcher: of its grammar, if it has one."""

    def __init__(self, text: Text, prompt_length: int, logical: int, sampling: SamplingParams, seed: int) -> None:
        self.text = text
        self.prompt_length = prompt_length
        self.logical = logical
        self.sampling = sampling
        self.seed = seed
        self.tables: list[Table] = []
        self.state = text.root
        self.matcher: Matcher | None = None

    def fork(self, seed: int) -> ModelSequence:
        other = ModelSequence(self.text.fork(), self.prompt_length, self.logical, self.sampling, seed)
        other.tables = [table.fork() for table in self.tables]
        other.state, other.matcher = self.state, self.matcher and self.matcher.branch()
        return other

    def pass_state(self, begin: int, end: int) -> None:
        """Let its recurrent state be that after more tokens."""
        for token in self.text.tokens[begin:end]:
            self.state = mix(self.state ^ (token + 1))


class Suspended(NamedTuple):
    """What the worker keeps of a sequence beside the pool: of each table, what compressions have left; the recurrent
    state."""

    left: list[Left | None]
    state: int


class ModelHost:
    """Host blocks and a disk: transfers take any time, and some of what is stored gets lost.

    lot: draws the next number below 1. loss: the share of blocks that get lost.
    """

    def __init__(self, block_size: int, lot: Callable[[], float], loss: float) -> None:
        self.size = block_size
        self.lot = lot
        self.loss = loss
        self.disk: dict[bytes, list[int]] = {}
        self.restart()

    def restart(self) -> None:
        """All but the disk is empty."""
        self.blocks: dict[int, list[int]] = {}
        self.loads: dict[int, tuple[list[int], list[list[int] | None]]] = {}
        self.cancelled: list[int] = []
        self.suspended: dict[int, Suspended] = {}
        self.has_told = False

    def store(self, transfer: BlockTransfer, cache: list[int]) -> None:
        digests = transfer.digests or [b""] * len(transfer.blocks)
        for block, host_block, digest in zip(transfer.blocks, transfer.host_blocks, digests, strict=True):
            for tier, key, is_asked in ((self.blocks, host_block, host_block != NOWHERE), (self.disk, digest, digest)):
                if is_asked:
                    tier.pop(key, None)  # type: ignore[call-overload]
                    if self.lot() >= self.loss:
                        tier[key] = cache[block * self.size : (block + 1) * self.size]  # type: ignore[index]

    def _write(self, cache: list[int], block: int, content: list[int] | None) -> None:
        cache[block * self.size : (block + 1) * self.size] = content or [GARBAGE] * self.size

    def cancel(self, number: int) -> None:
        if self.loads.pop(number, None):
            self.cancelled.append(number)

    def load(self, load: Load, cache: list[int]) -> None:
        blocks, host_blocks = load.transfer.blocks, load.transfer.host_blocks
        digests = load.transfer.digests or [b""] * len(blocks)
        for block in blocks:
            self._write(cache, block, None)
        pairs = zip(host_blocks, digests, strict=True)
        found = [self.disk.get(digest) if host == NOWHERE else self.blocks.get(host) for host, digest in pairs]
        self.loads[load.number] = blocks, found

    def report(self, cache: list[int], wait: bool) -> TransferReport:
        loaded, lost, self.cancelled = [], self.cancelled, []
        for number, (blocks, found) in list(self.loads.items()):
            if not wait and self.lot() < 0.6:
                continue
            del self.loads[number]
            is_lost = any(each is None for each in found)
            (lost if is_lost else loaded).append(number)
            for block, each in zip(blocks, found, strict=True):
                self._write(cache, block, each)
        on_disk = [] if self.has_told else list(self.disk)
        self.has_told = True
        return TransferReport(loaded, lost, 1, 1e-3, on_disk)


class ExactModel(Executor):
    """Executes plans. grammars: of structured outputs. before_result: is called before each result is given out, and
    may raise in its place."""

    def __init__(
        self,
        config: EngineConfig,
        rng: random.Random,
        *,
        loss: float = 0.0,
        grammars: Grammars | None = None,
        before_result: Callable[[bytes], None] = lambda plan: None,
    ) -> None:
        self.config = config
        self.fills_pending = config.async_scheduling
        self.grammars = grammars
        self.before_result = before_result
        self.broken: str | None = None  # for the next token that is sampled
        self.is_running = False
        self.restarts = RestartBudget(2)
        self._rng = rng
        self._plans: deque[bytes] = deque()
        windows = [group.window for group in config.kv_groups for _ in group.parts]
        self.windows = windows
        self.full_parts = [part for part, window in enumerate(windows) if window is None]
        self.factors = [factor(part) for part in range(len(windows))]
        self.host = ModelHost(config.block_size, rng.random, loss)
        self.restart()

    def restart(self) -> None:
        """As new workers are: they know no sequence, and their cache holds anything."""
        self.sequences: dict[int, ModelSequence] = {}
        self.sampled: dict[int, int] = {}  # the last token of each sequence
        self.verified: dict[int, list[int]] = {}
        self.reported: set[int] = set()  # sequences whose prompts' log probabilities are wanted
        self.rows: dict[int, int] = {}  # copies of recurrent states
        self.cache = [GARBAGE] * (self.config.num_blocks * self.config.block_size)
        self.host.restart()

    def launch(self, plan: StepPlan) -> None:
        if plan.reset:
            self._plans.clear()
        self._plans.append(encode(plan))

    def collect(self) -> StepResult:
        encoded = self._plans.popleft()
        self.is_running = True
        try:
            self.before_result(encoded)
            result = decode_result(encode(self.run(decode_plan(encoded))))
            self.restarts.count(1)
            return result
        finally:
            self.is_running = False

    def close(self) -> None:
        """Nothing to release."""

    def run(self, plan: StepPlan) -> StepResult:
        if plan.reset:
            self.restart()
        self._accept(plan)
        for copied in plan.state_copies:
            self.rows[copied.row] = self.sequences[copied.seq_id].state
        for number in plan.cancelled:
            self.host.cancel(number)
        for transfer in plan.stores:
            self.host.store(transfer, self.cache)
        for seq_id in plan.suspended:
            if seq := self.sequences.get(seq_id):
                self.host.suspended[seq_id] = Suspended([table.left for table in seq.tables], seq.state)
        for seq_id in plan.forgotten:
            self.host.suspended.pop(seq_id, None)
        for seq_id in plan.dropped_seq_ids:
            del self.sequences[seq_id]
            self.sampled.pop(seq_id, None)
            self.reported.discard(seq_id)
        self._begin(plan)
        for job in plan.compressions:
            self._compress(self.sequences[job.seq_id], job)
        for each in plan.copies:
            table, size = self.sequences[each.seq_id].tables[each.part], self.config.block_size
            content = self.cache[table.blocks[each.index] * size :][:size]
            self.cache[each.destination * size : (each.destination + 1) * size] = content
            table.replace(each.index, [each.destination, *table.blocks[each.index + 1 :]])
        for load in plan.loads:
            self.host.load(load, self.cache)
        result = self._forward(plan)
        result.transfers = self.host.report(self.cache, wait=not plan.num_seqs)
        return result

    def _begin(self, plan: StepPlan) -> None:
        for start in plan.new_seqs:
            assert start.seq_id not in self.sequences, "a sequence starts twice"
            text = Text(start.token_ids, start.adapter.digest if start.adapter else "")
            seq = ModelSequence(text, start.prompt_length, start.logical_length, start.sampling, start.seed)
            size = self.config.block_size
            pairs = zip(start.tables, self.windows, strict=True)
            seq.tables = [Table(table.dropped, table.blocks, size, window) for table, window in pairs]
            if start.state_row is not None:
                seq.state = self.rows[start.state_row]
            if found := self.host.suspended.pop(start.seq_id, None):
                seq.state = found.state
                for table, left in zip(seq.tables, found.left, strict=True):
                    table.left = left
            if (rule := start.sampling.structured_outputs) is not None:
                assert self.grammars
                seq.matcher = self.grammars.matcher(rule)
            if start.sampling.prompt_logprobs is not None and len(start.token_ids) == start.prompt_length:
                self.reported.add(start.seq_id)
            self.sequences[start.seq_id] = seq
        adapters = {seq.text.root for seq in self.sequences.values()} - {Text.BASE}
        assert len(adapters) <= self.config.max_loras, "more adapters are in use than fit"

    def _accept(self, plan: StepPlan) -> None:
        """Count the tokens of drafts that were right."""
        for each in plan.accepted:
            assert self.verified[each.seq_id] == each.token_ids, "other tokens are accepted than those that were right"
            seq = self.sequences[each.seq_id]
            seq.text.extend(each.token_ids)
            seq.pass_state(seq.logical, len(seq.text.tokens))
            self._count(seq, len(each.token_ids))
            self._slide(seq)
        self.verified = {}

    # The forward pass

    def _forward(self, plan: StepPlan) -> StepResult:
        result = StepResult([])
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        scheduled = scheduled_in(plan)
        for item in scheduled:
            self._store(item)
        for item in scheduled:  # all writes are done: nobody wrote over somebody else's pairs
            seq = self.sequences[item.seq_id]
            if self._recalls(item, seq) and (mass := self._recall(item.seq_id, seq)):
                result.missing_masses.append(mass)
            attended = self._check(seq, seq.logical - len(item.draft))
            assert item.samples == (seq.logical == len(seq.text.tokens))
            if item.seq_id in self.reported:
                result.prompts += self._report(item, seq)
            if item.draft:
                result.verified.append(self._verify(item, seq))
            elif item.samples:
                result.tokens.append(self._sample(item.seq_id, seq, attended))
                result.tokens += [self._fork(seq, fork, attended) for fork in item.forks]
            self._slide(seq)
            for fork in item.forks:
                self._slide(self.sequences[fork.seq_id])
        result.drafts = [self._draft(order) for order in plan.drafts]
        assert len(self.sequences) <= self.config.max_num_seqs, "there is no table slot for a sequence"
        return result

    def _report(self, item: Scheduled, seq: ModelSequence) -> list[PromptLogprobs]:
        """The log probabilities of the tokens that follow those of the step in a prompt."""
        first = seq.logical - item.num_tokens + 1
        following = seq.text.tokens[first : min(seq.logical + 1, seq.prompt_length)]
        if len(following) < item.num_tokens:
            self.reported.discard(item.seq_id)
        found = [
            SampledToken(token, (value := prompt_logprob(self._pairs(seq, i), i, token)), 1, [(token, value)])
            for i, token in enumerate(following, first)
        ]
        return [PromptLogprobs(item.seq_id, first, found)] if found else []

    def _draft(self, order: DraftOrder) -> list[int]:
        """What continues the fixed series, which is right for one token in two."""
        draft = [self.sampled[order.seq_id]]
        while len(draft) <= order.num_tokens:
            draft.append(following(draft[-1]))
        return draft[1:]

    def _store(self, item: Scheduled) -> None:
        """Compute the KV pairs of a sequence's query tokens."""
        seq = self.sequences[item.seq_id]
        new = [self.sampled[item.seq_id] if token == PENDING else token for token in item.new_tokens]
        seq.text.extend([*new, *item.draft])
        begin, end = seq.logical, seq.logical + item.num_tokens
        seq.pass_state(begin, end - len(item.draft))
        content = seq.text.digests[begin:end]
        for part, table in enumerate(seq.tables):
            if item.new_blocks:
                table.replace(len(table.blocks), item.new_blocks[part])
            assert begin >= table.dropped and end - table.dropped <= len(table.slots), "there is no block for a pair"
            scale = self.factors[part]
            for digest, slot in zip(content, table.slots[begin - table.dropped :], strict=False):
                self.cache[slot] = digest * scale & MASK
        self._count(seq, item.num_tokens)

    def _count(self, seq: ModelSequence, number: int) -> None:
        for position in range(seq.logical, seq.logical + number):
            for table in seq.tables:
                table.add(seq.text.digests[position], position)
        seq.logical += number

    def _attended(self, seq: ModelSequence, length: int) -> int:
        """What decides about the token after `length` tokens."""
        return self._pairs(seq, length) + RECURRENT * seq.state * self.config.has_recurrent_layers & MASK

    def _pairs(self, seq: ModelSequence, length: int) -> int:
        """The sum over all pairs that the tables lead the token after `length` tokens to."""
        total = 0
        for table in seq.tables:
            first = table.dropped if table.window is None else max(0, length - table.window)
            total += sum(map(self.cache.__getitem__, table.slots[first - table.dropped : length - table.dropped]))
        return total & MASK

    def _expected(self, seq: ModelSequence, length: int) -> int:
        pairs = zip(self.factors, seq.tables, strict=True)
        return sum(scale * table.expected(seq.text, length) for scale, table in pairs) & MASK

    def _check(self, seq: ModelSequence, length: int) -> int:
        """What decides about its next token, if that is what it should. length: of what its recurrent state is of."""
        state = seq.text.digests[length - 1]
        assert seq.state == state or not self.config.has_recurrent_layers, "a recurrent state is not that of its tokens"
        for table in seq.tables:
            if table.window is None:
                kept = seq.logical if table.left is None else len(table.left.positions)
                assert kept == seq.logical - table.dropped, "the table holds another number of pairs than are left"
        found, expected = self._pairs(seq, seq.logical), self._expected(seq, seq.logical)
        assert found == expected, "a token attends other pairs than its own history leaves it"
        return self._attended(seq, seq.logical)

    def _sample(self, seq_id: int, seq: ModelSequence, attended: int) -> SampledToken:
        length = len(seq.text.tokens)
        error, self.broken = self.broken, None
        try:
            allowed = seq.matcher and listed(seq.matcher.allowed(seq.text.tokens[seq.prompt_length :]))
        except RequestError as failure:
            allowed, error = None, str(failure)
        token = next_token(attended, length, seq.text.tokens[-1], seq.sampling, seq.seed, allowed)
        self.sampled[seq_id] = token
        if seq.sampling.logprobs is None:
            return SampledToken(token, error=error)
        top = likeliest(token, seq.sampling.logprobs)
        return SampledToken(token, logprob=0.0, rank=1, top_logprobs=top, error=error)

    def _fork(self, seq: ModelSequence, fork: Fork, attended: int) -> SampledToken:
        assert fork.seq_id not in self.sequences
        child = self.sequences[fork.seq_id] = seq.fork(fork.seed)
        return self._sample(fork.seq_id, child, attended)

    def _verify(self, item: Scheduled, seq: ModelSequence) -> list[SampledToken]:
        """Take the draft back, and sample for as long as it is right."""
        before = len(seq.text.tokens) - len(item.draft)
        seq.logical -= len(item.draft)
        for table in seq.tables:
            if table.left is not None:
                table.left.cut(len(item.draft), seq.text)
        drafted, state = seq.text.digests[before:], seq.state
        seq.text.cut(before)
        sampled = [self._sample(item.seq_id, seq, self._attended(seq, seq.logical))]
        for token_id, digest in zip(item.draft, drafted, strict=True):
            if sampled[-1].error or sampled[-1].token_id != token_id:
                break
            seq.text.extend([token_id])
            assert seq.text.digests[-1] == digest
            seq.pass_state(seq.logical, seq.logical + 1)
            seq.logical += 1
            sampled.append(self._sample(item.seq_id, seq, self._attended(seq, seq.logical)))
        right = [token.token_id for token in sampled[:-1]]
        seq.text.cut(before)
        seq.logical, seq.state = seq.logical - len(right), state
        self.verified[item.seq_id] = right
        return sampled

    def _slide(self, seq: ModelSequence) -> None:
        for table in seq.tables:
            table.slide(seq.logical)

    # Compression

    def _compress(self, seq: ModelSequence, job: CompressionJob) -> None:
        assert seq.sampling.compress, "this request keeps all"
        for part, of_part in zip(self.full_parts, job.parts, strict=True):
            if of_part.dropped:
                self._compact(seq, part, of_part)

    def _compact(self, seq: ModelSequence, part: int, job: PartJob) -> None:
        """Keep the pairs of a part's windows that score best, where the tables say, and in the positions that the
        sequence keeps for itself. Scores are a permutation of what pairs hold."""
        size, table, text = self.config.block_size, seq.tables[part], seq.text
        cached = seq.logical - table.dropped
        start = job.first_block * size
        region_end = min(cached, start + job.region_blocks * size)
        left = table.left or Left(list(range(seq.logical)), text.sums[seq.logical])
        region = left.positions[start:region_end]
        content = [self.cache[slot] for slot in table.slots[start:region_end]]
        inverse = pow(self.factors[part], -1, 2**BITS)
        chosen = self._survivors(job, [each * inverse & MASK for each in content])
        expected = self._survivors(job, [text.digests[position] for position in region])
        blocks = table.blocks[job.first_block + job.region_blocks :]
        table.replace(job.first_block, [*job.destinations, *blocks])
        for index, slot in zip(chosen, table.slots[start:], strict=False):
            self.cache[slot] = content[index]
        table.dropped += region_end - start - len(chosen)
        left.positions[start:region_end] = [region[index] for index in expected]
        left.may_go[start:region_end] = [index < job.span - job.size + job.stride for index in expected]
        gone = set(range(len(region))).difference(expected)
        left.dropped |= {region[index]: content[index] for index in gone}
        left.total -= sum(text.digests[region[index]] for index in gone)
        table.left = left

    def _recalls(self, item: Scheduled, seq: ModelSequence) -> bool:
        compression, before = self.config.active_compression, seq.logical - item.num_tokens
        return compression is not None and compression.recalls and compression.recalls_in(before, item.num_tokens)

    def _recall(self, seq_id: int, seq: ModelSequence) -> MissingMass | None:
        """Let dropped pairs change places with some that are left. Which ones is another question at each length."""
        table, compression = seq.tables[0], self.config.active_compression
        assert compression
        if not (left := table.left) or not left.dropped:
            return None

        def score(position: int) -> int:
            return mix(seq.text.digests[position] ^ seq.logical)

        could_go = (index for index, may_go in enumerate(left.may_go) if may_go)
        go = sorted(could_go, key=lambda index: score(left.positions[index]))
        come = sorted(left.dropped, key=score, reverse=True)[: compression.recall_chunks]
        for index, position in zip(go, come, strict=False):
            old, slot = left.positions[index], table.slots[index]
            if score(old) < score(position):
                left.dropped[old], self.cache[slot] = self.cache[slot], left.dropped.pop(position)
                left.positions[index] = position
                left.total += seq.text.digests[position] - seq.text.digests[old]
        return MissingMass(seq_id, len(left.dropped) / seq.logical)

    def _survivors(self, job: PartJob, content: list[int]) -> list[int]:
        """Offsets in the region. The last `buffer` pairs of a window stay, and what is after the windows."""
        if not job.destinations:
            return []
        compression = self.config.active_compression
        assert compression
        overlap = compression.buffer if isinstance(compression.policy, Standalone) else 0
        scores = [each * (mix(99) | 1) & MASK for each in content]
        kept: list[int] = []
        for i in range(job.num_windows):
            first = i * job.stride
            end = first + job.size - compression.buffer
            kept += sorted(sorted(range(first, end), key=scores.__getitem__)[: job.retain - compression.buffer])
            if not overlap or i == job.num_windows - 1:
                kept += range(end, first + job.size)
        return [*kept, *range(job.span, len(content))]
