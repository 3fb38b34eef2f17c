"""The choice of a replica for a request: the one that has its prefix, else the one with most free blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvllm.config import require
from kvllm.core.prefix_cache import block_hash, root_hash
from kvllm.core.sequence import ExtraKeys

FULLER = 0.25
"""A replica counts as clearly fuller than another one when its blocks in use exceed the other's by this share and by"""
HIT_WEIGHT = 4
"""this many times the blocks of the prefix that it has already."""
SEQUENCES_AHEAD = 2
"""A replica is given this many times the sequences that it runs at once, so that it never waits for the next."""
ROUTING = ("both", "load", "prefix")


def needed_blocks(num_tokens: int, num_sequences: int, block_size: int) -> int:
    """Blocks that a request is expected to take at first: those of its tokens, and one that each sequence writes."""
    return num_tokens // block_size + num_sequences


class Router:
    """Accounts for the free blocks of replicas that can serve the same requests.

    num_blocks: of the pool of each.
    lost: replicas that were lost, and have not reported since.
    room: for each replica, the blocks that were free at its last report less those promised since. It falls below zero
        when sequences are preempted. A replica without room gets nothing, so those that are done sooner get more.
    routing: "load": most free blocks, whatever has the prefix. "prefix": the replica that had the prefix last, however
        full, as long as it has room. "both": that one, unless it is clearly fuller than the one with most free blocks.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        *,
        block_size: int,
        max_num_seqs: int,
        shares_prefixes: bool,
        routing: str = "both",
    ) -> None:
        require(routing in ROUTING, "routing", routing, f"choose one of {', '.join(ROUTING)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_sequences = SEQUENCES_AHEAD * max_num_seqs
        self.shares_prefixes = shares_prefixes and routing != "load"
        self.routing = routing
        self.room = list(num_blocks)
        self.lost: set[int] = set()
        self.sequences = [0] * len(num_blocks)
        self._replica_of: OrderedDict[bytes, int] = OrderedDict()  # by the hash of a block, oldest first

    def open_replicas(self) -> list[int]:
        """The replicas that have room."""
        return [i for i, room in enumerate(self.room) if room > 0 and self.sequences[i] < self.max_sequences]

    def place(
        self,
        token_ids: Sequence[int],
        num_sequences: int,
        extra_keys: ExtraKeys = (None, None),
        replicas: list[int] | None = None,
    ) -> int | None:
        """Choose the replica for a request, and promise it the blocks. None: there is nothing to choose from.

        token_ids: the prompt and any output. num_sequences: completions that branch off from these.
        extra_keys: see Sequence. replicas: to choose from. Default: those that have room.
        """
        replicas = self.open_replicas() if replicas is None else replicas
        if not replicas:
            return None
        chosen = max(replicas, key=lambda i: (self.room[i], -self.sequences[i]))
        hashes = self._hashes(token_ids, extra_keys)
        home, hits = self._find(hashes)
        if home in replicas and (self.routing == "prefix" or not self._clearly_fuller(home, chosen, hits)):
            chosen = home
        self._remember(hashes, chosen)
        self.promise(chosen, len(token_ids), num_sequences)
        self.sequences[chosen] += num_sequences
        return chosen

    def promise(self, replica: int, num_tokens: int, num_sequences: int) -> None:
        """Account for a request that is on its way to a replica."""
        self.room[replica] -= needed_blocks(num_tokens, num_sequences, self.block_size)

    def report(self, replica: int, room: int) -> None:
        """Account for a replica's report of its free blocks, less those for what waits there."""
        self.room[replica] = room
        self.lost.discard(replica)

    def finish(self, replica: int, num_sequences: int) -> None:
        """Sequences of a replica have ended."""
        self.sequences[replica] -= num_sequences

    def lose(self, replica: int) -> None:
        """All that a replica had is lost. It gets nothing until it reports."""
        self.room[replica] = self.sequences[replica] = 0
        self.lost.add(replica)
        self._replica_of = OrderedDict((digest, i) for digest, i in self._replica_of.items() if i != replica)

    def _clearly_fuller(self, replica: int, other: int, hits: int) -> bool:
        used, used_by_other = (self.num_blocks[i] - self.room[i] for i in (replica, other))
        return used > used_by_other * (1 + FULLER) + HIT_WEIGHT * hits

    def _hashes(self, token_ids: Sequence[int], extra_keys: ExtraKeys) -> list[bytes]:
        """The hashes of the full blocks."""
        hashes: list[bytes] = []
        if self.shares_prefixes:
            (salt, adapter), size = extra_keys, self.block_size
            root = root_hash(salt, adapter=adapter)
            for end in range(size, len(token_ids) + 1, size):
                hashes.append(block_hash(hashes[-1] if hashes else root, token_ids[end - size : end]))
        return hashes

    def _find(self, hashes: list[bytes]) -> tuple[int | None, int]:
        """Where the longest known prefix went last, and its length in blocks."""
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._replica_of:
                return self._replica_of[hashes[index]], index + 1
        return None, 0

    def _remember(self, hashes: list[bytes], replica: int) -> None:
        for digest in reversed(hashes):  # the end of a prefix is forgotten first
            self._replica_of[digest] = replica
            self._replica_of.move_to_end(digest)
        while len(self._replica_of) > sum(self.num_blocks):
            self._replica_of.popitem(last=False)
