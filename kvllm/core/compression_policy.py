"""Which sequences compress, and when. Knows lengths, never tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace

from msgspec import structs

from kvllm.compression.queries import window_tokens, windows_beside
from kvllm.config import CompressionConfig, EngineConfig, require
from kvllm.core.protocol import CompressionJob
from kvllm.core.regions import NothingDropped, Region, Regions, WholeCache, make_group_regions, make_regions
from kvllm.core.sequence import Sequence
from kvllm.errors import RequestError
from kvllm.kvcache.groups import UNIFORM, KVGroup, full_groups, sliding_blocks
from kvllm.sampling_params import SamplingParams

Candidate = tuple[Sequence, Region]


@dataclass(slots=True)
class EngineLoad:
    """The state of the engine that a policy sees.

    decode_steps: of the engine so far. available_blocks: that can be allocated now. missing_blocks: how many more the
    first waiting sequence would have needed to be admitted in the last step. tokens: of the step's budget, what
    compression may take. learns: whether the first compression of the step is learned from.
    """

    decode_steps: int
    available_blocks: int
    missing_blocks: int
    tokens: int
    learns: bool = False


class CompressionPolicy(ABC):
    """Names the regions that are compressed now.

    Called once per step with the decoding sequences, none of them finished or prefilling, in order of age. Unless
    `max_sequences` is set, a step compresses as many windows as its decodes allow (`windows_beside`), and the next
    steps go on, so that no event keeps all sequences from decoding for long.
    """

    at_once: bool = False
    """Whether a named sequence decodes no more until it is compressed. Then `select` does not look at the tokens."""

    def __init__(self, config: CompressionConfig, block_size: int, groups: Sequences[KVGroup] = UNIFORM) -> None:
        """groups: the KV groups of the model, of which those without a window are compressed."""
        self.config = config
        self.groups = full_groups(groups)
        self.full_parts = sum(len(group.parts) for group in self.groups)
        self.group_regions = make_group_regions(config, block_size, self.groups)
        self.observes_scores = config.observes_scores
        self.regions = self.group_regions[0]
        self._uncompressed = NothingDropped(block_size)
        self._of_retained: dict[int, Regions] = {}  # by KV pairs kept of a window

    def check(self, prompt_length: int, sampling: SamplingParams) -> None:
        """Raises RequestError if what a request asks of compression does not go with its prompt or the engine."""
        retained, config, block_size = sampling.retain_blocks, self.config, self.regions.block_size
        if retained is None:
            return
        least = max(1, -(-config.buffer // block_size))
        if not least <= retained <= config.window_blocks:
            raise RequestError(
                f"retain_blocks={retained} is not allowed: between {least}, which hold buffer={config.buffer} in "
                f"blocks of {block_size} tokens, and window_blocks={config.window_blocks}, which drop nothing"
            )

    def regions_of(self, seq: Sequence) -> Regions:
        """The arithmetic that holds for one sequence, in the first KV group. Others differ in what they keep."""
        retained = seq.sampling.retain_blocks
        if not seq.sampling.compress or retained == self.config.window_blocks:
            return self._uncompressed
        return self.regions if retained is None else self._retaining(retained * self.regions.block_size)

    def regions_by_group(self, seq: Sequence) -> list[Regions]:
        """The arithmetic of each KV group that attends all tokens."""
        first = self.regions_of(seq)
        if not seq.sampling.compress or seq.sampling.retain_blocks is not None:
            return [first] * len(self.groups)  # all layers keep what the request says
        return [first, *self.group_regions[1:]]

    def retained(self, seq: Sequence, region: Region) -> list[int]:
        """KV pairs that the layers of each of these groups keep of a window of a region of the first."""
        if len(self.groups) == 1:
            return [region.retain]
        return [regions.retain for regions in self.regions_by_group(seq)]

    def released(self, seq: Sequence, region: Region) -> int:
        """KV pairs by which all tables of a sequence together shrink for each window of a region."""
        kept = zip(self.groups, self.retained(seq, region), strict=True)
        return sum(len(group.parts) * (region.size - retained) for group, retained in kept)

    def selected_from(self, seq: Sequence, region: Region) -> Region:
        """A region together with what is left of the windows before it, if the method chooses from both."""
        if not self.config.spec.reselects:
            return region
        assert seq.scored_from is not None
        return region.from_start(seq.scored_from)

    def dropped(self, job: CompressionJob) -> int:
        """KV pairs that a sequence loses by a job, in the mean over the layers, rounded down."""
        if len(self.groups) == 1:
            return job.dropped
        layers = [len(part) for group in self.groups for part in group.parts]
        lost = layers[0] * job.dropped
        lost += sum(layers[other.part] * job.num_windows * (other.size - other.retain) for other in job.others)
        return lost // sum(layers)

    def _retaining(self, tokens: int) -> Regions:
        if tokens not in self._of_retained:
            config = structs.replace(self.config, retain_tokens=tokens, layer_groups=())
            self._of_retained[tokens] = make_regions(config, self.regions.block_size)
        return self._of_retained[tokens]

    def unscored(self, sequences: Sequences[Sequence]) -> list[Sequence]:
        """Those that cannot be compressed as long as their scores are not added up."""
        if not self.observes_scores:
            return []
        return [seq for seq in sequences if not seq.is_scored and seq.sampling.compress]

    def foresees_compression(self, running: Sequences[Sequence], load: EngineLoad) -> bool:
        """Whether running sequences may be compressed before they end, so that their scores are needed."""
        return True

    @abstractmethod
    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        """The jobs to run before the next step."""

    def eligible(self, decoding: Sequences[Sequence]) -> list[Candidate]:
        """All sequences with something to compress, in the order given."""
        regions = [(seq, self._region_of(seq)) for seq in decoding]
        return [(seq, region) for seq, region in regions if region is not None]

    def _region_of(self, seq: Sequence) -> Region | None:
        """The part of a sequence that the policy compresses next."""
        return self.regions_of(seq).trailing(seq.cached_length, seq.uncompressed_tail)

    def _windows_now(self, decoding: Sequences[Sequence], load: EngineLoad, least: int = 1) -> int:
        """Windows that a step may compress if they may wait: at least one, and `least` if the tokens suffice."""
        size = self.config.window_blocks * self.regions.block_size
        affordable = max(1, load.tokens // window_tokens(self.config, size, learns=load.learns))
        if self.config.max_sequences is not None:  # an event of that size is asked for
            return affordable
        return min(affordable, max(least, windows_beside(self.config, size, len(decoding))))


class PeriodicPolicy(CompressionPolicy):
    """Kara's schedule (paper, section 4.3 and Alg. 1): every `period` decode steps at most `max_sequences` sequences.

    The first event is not before more than a window's length of steps. It takes a sequence's trailing window, as in the
    paper; where scores are observed it takes the earliest one, since these belong to windows that follow each other. Of
    the eligible sequences those that stored most since they were last served go first, so none starves. An event with
    more windows than a step may compress goes on in the following steps, so fast that it ends before the next one.
    """

    def __init__(self, config: CompressionConfig, block_size: int, groups: Sequences[KVGroup] = UNIFORM) -> None:
        super().__init__(config, block_size, groups)
        self._last_event = 0
        self._left = 0  # sequences that the present event may still serve
        self._pace = 1  # windows in a step with which it ends before the next one

    def _region_of(self, seq: Sequence) -> Region | None:
        if not self.observes_scores:
            return super()._region_of(seq)
        return self.regions_of(seq).first(seq.cached_length, seq.uncompressed_tail)

    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        steps = load.decode_steps
        due = steps > self.config.window_blocks * self.regions.block_size and steps % self.config.period == 0
        begins = due and steps != self._last_event  # steps without a decode do not move the clock
        if begins:
            self._last_event = steps
            self._left = self.config.event_sequences
        if not self._left:
            return []
        jobs = self.eligible(decoding)
        jobs.sort(key=lambda job: (job[0].carried_tail - job[0].uncompressed_tail, job[0].seq_id))
        jobs = jobs[: self._left]
        if begins:
            self._pace = -(-len(jobs) // self.config.period)
        most = self._windows_now(decoding, load, self._pace)
        self._left = self._left - most if most < len(jobs) else 0
        return jobs[:most]


class StandalonePolicy(CompressionPolicy):
    """Kara without a serving clock (paper, section 4.1): a sequence compresses whenever its tail fills a window.

    The buffer of a window is the beginning of the next, so windows advance by `window - buffer` tokens.
    """

    at_once = True

    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        return self.eligible(decoding)


class ThresholdPolicy(CompressionPolicy):
    """A sequence's whole cache is cut to `budget_tokens` KV pairs when it has `threshold_tokens` (paper, Eq. 2-3)."""

    at_once = True

    def check(self, prompt_length: int, sampling: SamplingParams) -> None:
        if not sampling.compress:
            return
        config, block_size = self.config, self.regions.block_size
        budget = config.budget_tokens if sampling.budget_tokens is None else sampling.budget_tokens
        assert budget is not None
        blocks = -(-prompt_length // block_size) if config.protect_prompt else 0
        least = blocks * block_size + config.buffer + 1
        if budget < least and (config.protect_prompt or sampling.budget_tokens is not None):
            protected = f"the {prompt_length} tokens of the protected prompt in whole blocks, " if blocks else ""
            raise RequestError(
                f"budget_tokens={budget} leaves no room: {protected}buffer={config.buffer} and one KV pair more make "
                f"{least}: raise budget_tokens, lower buffer" + (" or shorten the prompt" if blocks else "")
            )

    def regions_of(self, seq: Sequence) -> Regions:
        """A budget of the request's own moves the threshold along with what is kept."""
        if not seq.sampling.compress:
            return self._uncompressed
        config = self.config
        budget = seq.sampling.budget_tokens
        if budget is None and not config.protect_prompt:
            return self.regions
        assert config.threshold_tokens is not None and config.budget_tokens is not None
        more = 0 if budget is None else budget - config.budget_tokens
        protected = seq.prompt_length if config.protect_prompt else 0
        return WholeCache(self.regions.block_size, config.threshold_tokens + more, config.held_tokens + more, protected)

    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        return self.eligible(decoding)


class PressurePolicy(CompressionPolicy):
    """Compress windows only while blocks are short, and only as many as it takes (our own).

    Blocks are short when a waiting sequence lacked some, or when the running ones would use up the pool within `period`
    steps. Sequences go first whose released blocks serve longest for the query tokens that are recomputed; one that
    ends within `period` steps is left alone, unless the next step would have to preempt. The need is looked at once in
    a period, or when a preemption is near, so that windows are scored together; and in the steps after, until it is
    met. A step compresses more windows than it should only for blocks that are missing now.

    Where scores are added up while sequences decode, that costs nothing while there is room for all: it begins when the
    running sequences could outgrow the pool. What they have stored until then stays, unless they are preempted.
    """

    def __init__(self, config: CompressionConfig, block_size: int, groups: Sequences[KVGroup] = UNIFORM) -> None:
        super().__init__(config, block_size, groups)
        self._last_look = 0
        self._unmet = False

    def foresees_compression(self, running: Sequences[Sequence], load: EngineLoad) -> bool:
        return load.missing_blocks > 0 or sum(map(self._growth_to_end, running)) > load.available_blocks

    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        urgent = self.full_parts * sum(map(self._fills_block, decoding)) - load.available_blocks
        looks = load.decode_steps % self.config.period == 0 and load.decode_steps != self._last_look
        if not (urgent > 0 or looks or self._unmet):
            return []
        self._last_look = load.decode_steps
        needed = max(load.missing_blocks, sum(map(self._growth, decoding)) - load.available_blocks)
        self._unmet = False
        if needed <= 0:
            return []
        jobs = self.eligible(decoding)
        jobs = [job for job in jobs if urgent > 0 or self._remaining(job[0]) > self.config.period]
        jobs.sort(key=self._order)
        return self._enough(jobs[: self.config.event_sequences], needed, urgent, self._windows_now(decoding, load))

    def _region_of(self, seq: Sequence) -> Region | None:
        """All that is complete: while blocks lasted, more than one window of a sequence may have filled up."""
        return self.regions_of(seq).complete(seq.cached_length, seq.uncompressed_tail)

    def eligible(self, decoding: Sequences[Sequence]) -> list[Candidate]:
        return super().eligible([seq for seq in decoding if seq.is_scored] if self.observes_scores else decoding)

    def _enough(self, jobs: list[Candidate], needed: int, urgent: int, most: int) -> list[Candidate]:
        """The first windows that release `needed` blocks together, `most` of them at most; but at least those that
        release `urgent` blocks."""
        released = 0
        chosen: list[Candidate] = []
        for seq, region in jobs:
            missing, missing_now = (number * self.regions.block_size - released for number in (needed, urgent))
            if missing <= 0:
                break
            each = self.released(seq, region)
            wanted = min(region.count, -(-missing // each))
            beside = (region.start - self.selected_from(seq, region).start) // region.size
            count = min(wanted, max(most - beside, -(-missing_now // each), not chosen))
            self._unmet = count < wanted
            if count <= 0:
                break
            most -= count + beside
            released += count * each
            chosen.append((seq, replace(region, count=count)))
        return chosen

    def _order(self, job: Candidate) -> tuple[float, int, int]:
        """Released KV pairs times the steps they are of use, for each KV pair scored; then who waited longest."""
        seq, region = job
        worth = region.dropped * self._remaining(seq) / (region.count * region.size)
        return -worth, seq.carried_tail - seq.uncompressed_tail, seq.seq_id

    def _growth(self, seq: Sequence) -> int:
        """Blocks that a sequence adds within `period` steps."""
        pairs = seq.cached_length + min(self.config.period, self._remaining(seq))
        return self.full_parts * max(0, -(-pairs // self.regions.block_size) - len(seq.block_table))

    def _growth_to_end(self, seq: Sequence) -> int:
        """Blocks that a sequence and its completions add if all of them get as long as they may."""
        pairs = seq.cached_length + seq.max_length - 1 - seq.logical_length  # the last token is never stored
        blocks = (1 + seq.forks_pending) * -(-pairs // self.regions.block_size) - len(seq.block_table)
        return self.full_parts * blocks

    def _fills_block(self, seq: Sequence) -> bool:
        return seq.cached_length == len(seq.block_table) * self.regions.block_size

    @staticmethod
    def _remaining(seq: Sequence) -> int:
        """Tokens until a sequence ends at the latest."""
        return seq.max_length - seq.num_tokens


POLICIES: dict[str, type[CompressionPolicy]] = {
    "periodic": PeriodicPolicy,
    "pressure": PressurePolicy,
    "standalone": StandalonePolicy,
    "threshold": ThresholdPolicy,
}


def make_policy(config: EngineConfig) -> CompressionPolicy | None:
    """The policy of an engine; None if nothing is ever dropped."""
    active = config.active_compression
    return POLICIES[active.policy](active, config.block_size, config.kv_groups) if active else None


def peak_blocks(config: EngineConfig, regions: Sequences[Regions] | None, prompt: int, total: int) -> int:
    """Most blocks that a sequence alone needs in the layers that attend all tokens, to reach `total` tokens, `prompt`
    of them its prompt, if everything is compressed when complete.

    regions: of each KV group of such layers. None if nothing is ever dropped.
    """
    groups, block_size = full_groups(config.kv_groups), config.block_size
    if regions is None:
        return sum(len(group.parts) for group in groups) * -(-total // block_size)
    # Windows are compressed in all groups at once.
    by_group = [each.cached_lengths(prompt, total, tail_start(config, prompt)) for each in regions]
    return max(
        sum(len(group.parts) * -(-length // block_size) for group, length in zip(groups, lengths, strict=True))
        for lengths in zip(*by_group, strict=True)
    )


def tail_start(config: EngineConfig, prompt: int) -> int:
    """The first KV pair of a sequence that compression may touch, after `prompt` tokens of its prompt or at 0."""
    return 0 if config.compression is not None and config.compression.compress_prompt else prompt


def blocks_alone(config: EngineConfig, regions: Sequences[Regions] | None, prompt: int, total: int) -> int:
    """Most blocks that a sequence alone needs in all KV groups; arguments as for `peak_blocks`."""
    full = peak_blocks(config, regions, prompt, total)
    return full + sliding_blocks(config.kv_groups, total, config.block_size, config.max_num_batched_tokens)


def longest_blocks(config: EngineConfig) -> int:
    """Blocks that a sequence of `max_model_len` needs, compressed if that is on."""
    policy = make_policy(config)
    return blocks_alone(config, policy and policy.group_regions, 1, config.max_model_len - 1)


def check_pool(config: EngineConfig) -> None:
    """Raises ConfigError unless a sequence of `max_model_len` fits into the pool."""
    blocks = longest_blocks(config)
    require(
        blocks <= config.num_blocks,
        "max_model_len",
        config.max_model_len,
        f"a sequence of that length needs {blocks} KV blocks of {config.block_size} tokens and the pool has "
        f"{config.num_blocks}: lower max_model_len, or raise kv_cache_memory_bytes or num_gpu_blocks_override",
    )


def longest_alone(config: EngineConfig, policy: CompressionPolicy | None, seq: Sequence) -> int:
    """The length at which a sequence ends at the latest: its `max_length`, or what it reaches with the whole pool to
    itself, if its request leaves that open (`max_tokens=None`).

    Raises:
        RequestError: it cannot become as long as it has to, or its budget is too small.
    """
    if policy:
        policy.check(seq.prompt_length, seq.sampling)
    regions = policy and policy.regions_by_group(seq)

    def blocks(length: int) -> int:
        return blocks_alone(config, regions, seq.prompt_length, length - 1)  # the last token is never stored

    needed = blocks(seq.max_length)
    if needed <= config.num_blocks:
        return seq.max_length
    shortest = seq.prompt_length + max(1, seq.sampling.min_tokens)
    if seq.sampling.max_tokens is not None or blocks(shortest) > config.num_blocks:
        raise RequestError(
            f"a prompt of {seq.prompt_length} tokens with output up to {seq.max_length} tokens in all needs "
            f"{needed} KV blocks of {config.block_size} tokens, the pool has {config.num_blocks}: "
            f"shorten the prompt, lower max_tokens, or give the pool more memory"
        )
    return bisect_right(range(seq.max_length), config.num_blocks, shortest, key=blocks) - 1
