"""One running text: its tokens, its block tables, and three lengths that compression pulls apart."""

from __future__ import annotations

from msgspec import Struct

from kvllm.core.regions import Region
from kvllm.core.tables import BlockTable, TableStart
from kvllm.lora.request import Adapter
from kvllm.outputs import RequestMetrics
from kvllm.sampling_params import SamplingParams

PENDING = -1
"""In place of a token that a step in flight samples."""
ExtraKeys = tuple[str | None, str | None]
"""What parts a text's cache from that of another one with the same tokens: its salt, and its adapter's digest."""


def fork_seed(seed: int, index: int) -> int:
    """The seed of a request's completion `index`. It differs in its upper half, so that requests with neighbouring
    seeds stay apart."""
    return seed ^ (index << 32)


class ServiceClass(Struct, array_like=True, frozen=True):
    """Whom a request belongs to, when it gets its turn, and with whom it shares cached prefixes.

    priority: a request of lower priority number runs first.
    tenant: the name of whom the request belongs to. Requests of one tenant share a quota.
    cache_salt: requests share cached prefixes only with those of an equal salt, so that no other can find out by timing
        what they hold.
    adapter: that it is computed with, and shares cached prefixes within; None for the model as it is.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    adapter: Adapter | None = None


ANONYMOUS = ServiceClass()


class Sequence:
    """State of one sequence in the scheduler.

    logical_length: tokens computed so far, and so the position of the next one, whatever was evicted.
    tables: its block tables, one for each part of the KV groups; none while it has no blocks in the pool.
    room_end: the tables are known to have room for so many tokens, in blocks of their own. settles_at: the length at
        which they next have a full block to offer to later sequences, or one to let go of.
    cached_length: KV pairs in the first part, if it attends all tokens; less than `logical_length` once a window was
        compressed.
    missing: KV pairs that compressions have dropped, in the mean over the layers that attend all tokens.
    uncompressed_tail: KV pairs at the end of the cache that no compression has ever covered and that one may cover.
    carried_tail: how many of those were there already at the last compression.
    scored_from: the index of the first KV pair whose scores the workers add up; None: they add up none.
    compressions: the regions of the cache that were compressed, oldest first, each as it was before.
    choosing: the windows whose survivors are chosen, but have not moved, because later windows move with them.
    host_tables: its tables while their content is in host blocks. None: its cache is in the pool, or nowhere.
    has_ended: whether its request takes no more tokens of it. has_left: whether the scheduler has let it go.
    """

    __slots__ = (
        "block_hashes",
        "cache_hits",
        "cached_length",
        "carried_tail",
        "choosing",
        "compressions",
        "evicted",
        "forks_pending",
        "has_ended",
        "has_left",
        "hashed_blocks",
        "host_tables",
        "index",
        "known_tokens",
        "last_token_time",
        "logical_length",
        "max_length",
        "metrics",
        "missing",
        "preempted_length",
        "preemptions",
        "prompt_length",
        "refill_length",
        "request_id",
        "room_end",
        "sampling",
        "scored_from",
        "seed",
        "seq_id",
        "service_class",
        "settles_at",
        "tables",
        "tail_start",
        "token_ids",
        "uncompressed_tail",
        "windows_compressed",
    )  # fmt: skip

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        seed: int = 0,
        max_length: int,
        index: int = 0,
        forks: int = 0,
        tail_start: int | None = None,
        service_class: ServiceClass = ANONYMOUS,
        metrics: RequestMetrics | None = None,
    ) -> None:
        """
        index: which of the request's `n` completions this is.
        max_length: tokens (prompt included) at which the sequence ends at the latest.
        forks: completions that branch off when the prompt is computed.
        tail_start: first position that counts towards the uncompressed tail (default: the prompt is protected).
        metrics: of the request, which all its sequences write to.
        """
        self.seq_id = seq_id
        self.request_id = request_id
        self.index = index
        self.token_ids = token_ids
        self.prompt_length = len(token_ids)
        self.max_length = max_length
        self.sampling = sampling
        self.seed = seed
        self.service_class = service_class
        self.metrics = metrics or RequestMetrics()
        self.forks_pending = forks
        self.tail_start = self.prompt_length if tail_start is None else tail_start
        self.has_ended = self.has_left = False
        self.block_hashes: list[bytes] = []
        self.refill_length = 0
        self.preemptions = 0
        self.preempted_length = 0  # tokens when it was preempted last
        self.windows_compressed = 0
        self.evicted = 0
        self.cache_hits = 0  # tokens found in the prefix cache when the sequence was first admitted
        self.missing = 0
        self.reset()

    def reset(self) -> None:
        """Drop all state of the cache; the blocks must have been released."""
        self.metrics.missing_entries -= self.missing
        self.missing = 0
        self.tables: list[BlockTable] = []
        self.room_end = self.settles_at = 0
        self.logical_length = 0
        self.cached_length = 0
        self.uncompressed_tail = 0
        self.carried_tail = 0
        self.compressions: list[Region] = []
        if self.index == 0:
            self.metrics.regions, self.metrics.kept_pairs = self.compressions, []
        self.choosing: Region | None = None
        self.scored_from: int | None = None
        self.hashed_blocks = 0
        self.host_tables: list[TableStart] | None = None
        self.known_tokens = 0  # tokens that the workers have
        self.last_token_time: float | None = None  # of the token sampled last, if it is running since

    @property
    def priority(self) -> int:
        return self.service_class.priority

    @property
    def tenant(self) -> str:
        return self.service_class.tenant

    @property
    def cache_salt(self) -> str | None:
        return self.service_class.cache_salt

    @property
    def adapter(self) -> Adapter | None:
        return self.service_class.adapter

    @property
    def extra_keys(self) -> ExtraKeys:
        return self.cache_salt, self.adapter.digest if self.adapter else None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def num_uncomputed(self) -> int:
        """1 while decoding: the token sampled last."""
        return len(self.token_ids) - self.logical_length

    @property
    def is_longest(self) -> bool:
        """Whether it ends with the token that it has last, whatever that is."""
        return len(self.token_ids) >= self.max_length

    @property
    def is_decoding(self) -> bool:
        """Whether a token was sampled for it that the workers may not have."""
        return self.known_tokens < len(self.token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Computing its prompt, or after a preemption its prompt and earlier output."""
        return self.logical_length < self.prompt_length or self.logical_length < self.refill_length

    @property
    def is_new(self) -> bool:
        """Whether it runs for the first time: it was not preempted, and brings no output."""
        return not self.refill_length and not self.preemptions

    @property
    def num_blocks(self) -> int:
        """Blocks that its tables name."""
        return sum(len(table.blocks) for table in self.tables)

    @property
    def was_compacted(self) -> bool:
        return self.cached_length != self.logical_length

    def admitted(self, now: float, cache_hits: int) -> None:
        """The sequence runs for the first time, and has found `cache_hits` tokens in the prefix cache."""
        self.cache_hits = cache_hits
        if self.metrics.scheduled_time is None:
            self.metrics.scheduled_time = now
        self.metrics.num_cached_tokens = max(self.metrics.num_cached_tokens, cache_hits)

    def preempted(self) -> None:
        """The sequence has lost its blocks, and waits to be computed again."""
        self._count_preemption()
        self.forgotten()

    def suspended(self, host_tables: list[TableStart]) -> None:
        """The sequence has lost its blocks, whose content is in host blocks now, and waits until it comes back."""
        self._count_preemption()
        self.host_tables = host_tables
        self.choosing = None
        self.hashed_blocks = self.settles_at = 0
        self.known_tokens = 0
        self.last_token_time = None

    def forgotten(self) -> None:
        """Nothing of the cache is left anywhere: all is computed again."""
        self.refill_length = self.num_tokens
        self.reset()

    def _count_preemption(self) -> None:
        self.preemptions += 1
        self.preempted_length = self.num_tokens
        self.metrics.preemptions += 1

    def extend(self, token_ids: list[int]) -> None:
        """Output from an earlier run, which is computed again as after a preemption."""
        self.token_ids += token_ids
        self.refill_length = self.num_tokens if self.num_generated else 0

    def advance(self, num_tokens: int) -> None:
        """`num_tokens` more tokens are computed and their KV pairs stored."""
        self.logical_length += num_tokens
        self.cached_length += num_tokens
        in_tail = self.logical_length - self.tail_start
        if in_tail > 0:
            self.uncompressed_tail += in_tail if in_tail < num_tokens else num_tokens

    @property
    def is_scored(self) -> bool:
        return self.scored_from is not None

    def scored(self, kv_index: int) -> None:
        """Scores are added up from now on. KV pairs in front of `kv_index` have none, and stay as a prompt's do."""
        self.scored_from = kv_index
        self.uncompressed_tail = 0

    def compacted(self, region: Region, uncompressed_tail: int, dropped: int) -> None:
        """A region of the cache was compressed; `uncompressed_tail` KV pairs were after its last window.

        dropped: KV pairs, in the mean over the layers that attend all tokens.
        """
        self.cached_length -= region.dropped
        self.room_end = 0
        self.missing += dropped
        self.metrics.missing_entries += dropped
        self.compressions.append(region)
        self.choosing = None
        self.uncompressed_tail = uncompressed_tail
        self.carried_tail = uncompressed_tail

    def count_compression(self, num_windows: int, dropped: int) -> None:
        """Windows are compressed that lose `dropped` KV pairs, by a plan that nothing is taken out of any more."""
        self.windows_compressed += num_windows
        self.evicted += dropped
        self.metrics.windows_compressed += num_windows
        self.metrics.evicted_entries += dropped

    def fork(self, seq_id: int, index: int, seed: int) -> Sequence:
        """A sequence that shares the cached KV pairs, and their blocks."""
        child = Sequence(
            seq_id,
            self.request_id,
            self.token_ids[: self.prompt_length],
            self.sampling,
            seed=seed,
            max_length=self.max_length,
            index=index,
            tail_start=self.tail_start,
            service_class=self.service_class,
            metrics=self.metrics,
        )
        child.tables = [table.fork() for table in self.tables]
        child.settles_at = self.settles_at
        self.room_end = 0
        child.block_hashes = list(self.block_hashes)
        child.hashed_blocks = self.hashed_blocks
        child.logical_length = self.logical_length
        child.cached_length = self.cached_length
        child.missing = self.missing
        self.metrics.missing_entries += self.missing
        child.uncompressed_tail = self.uncompressed_tail
        child.carried_tail = self.carried_tail
        child.scored_from = self.scored_from
        child.compressions = list(self.compressions)
        child.known_tokens = self.known_tokens
        child.cache_hits = self.cache_hits
        return child
