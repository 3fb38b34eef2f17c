"""StepPlan and StepResult: all that the core and its workers exchange.

A plan holds what has changed since the last one, so its size follows the batch and not the context. Every rank receives
the same bytes and executes the parts in this order: `reset`, `accepted`, `state_copies`, `cancelled`, `stores`,
`suspended`, `forgotten`, `dropped_seq_ids`, `new_seqs`, `scored`, `choices` and `compressions`, `copies`, `loads`, then
`decodes`, `verifications` and `chunks` in one forward pass. After the pass each table lets go of the blocks after the
window of its layers. Compressions come before the forward pass, so the blocks that they empty may already be used by
it, and be loaded to. Stores come before all that writes to blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field, msgpack

from kvllm.core.sequence import ServiceClass
from kvllm.core.tables import TableStart
from kvllm.lora.request import Adapter
from kvllm.sampling_params import SamplingParams

NOWHERE = -1
"""In place of a host block."""


class SequenceStart(Struct, array_like=True, frozen=True):
    """A sequence that the workers do not have: it is new, or was preempted and is resumed now.

    token_ids: all tokens so far; the first `prompt_length` of them are the prompt.
    logical_length: of these, the tokens that are computed (prefix cache hit, or what came back from the host).
    service_class: for the scheduler of a replica; ranks do not need it.
    tables: for each part of the KV groups, with blocks for tokens that this plan computes.
    state_row: where the recurrent state after these is (`StateCopy`); None: there are none, or it was suspended.
    adapter: that it is computed with, for ranks, which read it when they do not hold it.
    """

    seq_id: int
    token_ids: list[int]
    prompt_length: int
    logical_length: int
    sampling: SamplingParams
    seed: int
    service_class: ServiceClass = ServiceClass()
    tables: list[TableStart] = []
    state_row: int | None = None
    adapter: Adapter | None = None


class Fork(Struct, array_like=True, frozen=True):
    """A new sequence that shares all blocks of the one it is attached to, and samples its own first token."""

    seq_id: int
    seed: int


class Decodes(Struct, array_like=True, frozen=True):
    """The sequences that compute the token sampled for them last, and sample the next one. Most steps have hundreds of
    them and nothing else, so they are columns instead of a record each.

    token_ids: of each sequence, the token that it computes, which workers may not have. It may be PENDING: what the
        step before samples for the sequence.
    grown: for each part of the KV groups, the indices of the sequences that get one block more, appended to the table
        before the pass. new_blocks: these blocks. Both are empty where no table grows.
    """

    seq_ids: list[int] = []
    token_ids: list[int] = []
    grown: list[list[int]] = []
    new_blocks: list[list[int]] = []

    def grow(self, new_blocks: list[list[int]]) -> None:
        """The sequence that is appended next gets a block or none in each part."""
        if not self.grown:
            self.grown.extend([] for _ in new_blocks)
            self.new_blocks.extend([] for _ in new_blocks)
        for grown, of_part, blocks in zip(self.grown, self.new_blocks, new_blocks, strict=True):
            if blocks:
                grown.append(len(self.seq_ids))
                of_part += blocks


class Verification(Struct, array_like=True, frozen=True, gc=False):
    """A sequence that decodes, and a draft of its next tokens, which are computed in the same pass. How many of them
    are right is in the result; until the next plan says so (`Accepted`), a worker counts the first token alone.

    token_ids: the token that was sampled last, which is not PENDING, and the draft.
    new_blocks: for each part of the KV groups, block ids appended to its table before the pass. Empty: none at all.
    """

    seq_id: int
    token_ids: list[int]
    new_blocks: list[list[int]]


class Accepted(Struct, array_like=True, frozen=True, gc=False):
    """The right tokens of a sequence's draft in the step before, whose KV pairs stay. Those after them are overwritten:
    they enter no table, window or sum of scores."""

    seq_id: int
    token_ids: list[int]


class DraftOrder(Struct, array_like=True, frozen=True, gc=False):
    """A sequence that gets a token in this step, and how many tokens the draft model shall say may follow it."""

    seq_id: int
    num_tokens: int


class PrefillChunk(Struct, array_like=True, frozen=True, gc=False):
    """Tokens of one sequence that the workers have, but have not computed: of its prompt, and of its earlier output
    if it was preempted.

    num_tokens: query tokens, from the first token on that is not computed yet.
    new_blocks: for each part of the KV groups, block ids appended to its table before the pass. Empty: none at all.
    samples: whether the last query token's logits are sampled.
    """

    seq_id: int
    num_tokens: int
    new_blocks: list[list[int]]
    samples: bool
    forks: list[Fork] = []


class PartJob(Struct, array_like=True, frozen=True):
    """Compress `num_windows` windows of `size` KV pairs to `retain` KV pairs each, in one part of the KV groups. The
    first begins at block `first_block` of a sequence's table, every other one `stride` KV pairs after the one before.
    Where windows overlap (`stride < size`), what they share is kept or dropped as a part of the later one.

    The `region_blocks` blocks from there on (the windows and, in exact mode, the tail after them) are replaced in the
    table by `destinations`. In place when `destinations` is a prefix of the region, else copied and the sources kept.
    Without destinations nothing survives in the region's blocks, and nothing moves.
    """

    first_block: int
    num_windows: int
    size: int
    retain: int
    stride: int
    region_blocks: int
    destinations: list[int]

    @property
    def span(self) -> int:
        """KV pairs from the beginning of the first window to the end of the last."""
        return self.size + (self.num_windows - 1) * self.stride

    @property
    def dropped(self) -> int:
        """KV pairs that the windows lose. 0: all survives in this part."""
        return self.num_windows * (self.size - self.retain)


class CompressionJob(Struct, array_like=True, frozen=True):
    """Compress windows of one sequence.

    parts: for each part of the KV groups that attends all tokens, which differ in what they keep of the same windows.
    chosen: of the windows, the first ones, whose survivors were chosen in steps before.
    """

    seq_id: int
    parts: list[PartJob]
    chosen: int = 0

    @property
    def num_windows(self) -> int:
        return self.parts[0].num_windows

    @property
    def num_choices(self) -> int:
        """Windows whose survivors are chosen in this step."""
        return self.num_windows - self.chosen

    @property
    def moves(self) -> bool:
        """Whether survivors move, and have to be chosen before."""
        return bool(self.parts[0].destinations)

    @property
    def released_blocks(self) -> int:
        """Blocks by which all tables of the sequence shrink."""
        return sum(part.region_blocks - len(part.destinations) for part in self.parts)


class ScoringStart(Struct, array_like=True, frozen=True):
    """Scores of a sequence's KV pairs are added up from this step on, in windows of which the first begins at the KV
    pair `kv_index`. Until then nothing of the sequence is scored."""

    seq_id: int
    kv_index: int


class BlockCopy(Struct, array_like=True, frozen=True):
    """Copy on write: block `index` of a sequence's table in a part becomes `destination`, a copy of what it was."""

    seq_id: int
    index: int
    destination: int
    part: int


class StateCopy(Struct, array_like=True, frozen=True):
    """Copy the recurrent state that a sequence has after the last pass to a row, where later ones may find it."""

    seq_id: int
    row: int


class BlockTransfer(Struct, array_like=True, frozen=True):
    """Copy `blocks` of the pool to as many `host_blocks`, or back.

    digests: of the blocks' content, if the disk has a part in it: blocks with one go to the disk, too, and what is in
        no host block (NOWHERE) comes from there.
    """

    blocks: list[int]
    host_blocks: list[int]
    digests: list[bytes] = []


class Load(Struct, array_like=True, frozen=True):
    """Copy host blocks to blocks of the pool, which nobody uses until StepResult reports it by its number."""

    number: int
    transfer: BlockTransfer


class StepPlan(Struct, array_like=True):
    """reset: drop all sequences, because the step before failed, and it is uncertain how much of it was executed.

    stores: blocks that go to the host. loads: blocks that come back. cancelled: numbers of loads that are to write no
        more.
    suspended: sequences that are about to be dropped, and come back with their blocks: what workers hold of them beside
        the pool is kept, until they start again or are among those `forgotten`.
    choices: compressions that go on in a later step. The survivors of their windows are chosen and held, and nothing
        moves, so windows that are left to later steps are chosen from the same cache.
    drafts: what the draft model does after the pass.
    """

    dropped_seq_ids: list[int] = []
    new_seqs: list[SequenceStart] = []
    scored: list[ScoringStart] = []
    compressions: list[CompressionJob] = []
    copies: list[BlockCopy] = []
    decodes: Decodes = field(default_factory=Decodes)
    chunks: list[PrefillChunk] = []
    reset: bool = False
    stores: list[BlockTransfer] = []
    loads: list[Load] = []
    cancelled: list[int] = []
    suspended: list[int] = []
    forgotten: list[int] = []
    choices: list[CompressionJob] = []
    accepted: list[Accepted] = []
    verifications: list[Verification] = []
    state_copies: list[StateCopy] = []
    drafts: list[DraftOrder] = []

    @property
    def num_seqs(self) -> int:
        """Sequences in the forward pass."""
        return len(self.decodes.seq_ids) + len(self.verifications) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the forward pass."""
        drafted = sum(len(each.token_ids) for each in self.verifications)
        return len(self.decodes.seq_ids) + drafted + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def only_decodes(self) -> bool:
        """Whether nothing comes before a pass of decodes alone that takes workers any time."""
        before = (
            self.accepted,
            self.state_copies,
            self.new_seqs,
            self.choices,
            self.compressions,
            self.copies,
            self.stores,
            self.loads,
        )
        beside = (self.verifications, self.chunks)
        return bool(self.decodes.seq_ids) and not self.reset and not any((*before, *beside))

    def query_tokens(self) -> Iterator[tuple[int, int]]:
        """The id of each sequence in the forward pass, in its order, and the number of its query tokens."""
        yield from ((seq_id, 1) for seq_id in self.decodes.seq_ids)
        yield from ((each.seq_id, len(each.token_ids)) for each in self.verifications)
        yield from ((chunk.seq_id, chunk.num_tokens) for chunk in self.chunks)

    @property
    def has_prefill(self) -> bool:
        """Whether a sequence has several query tokens that it is known to have."""
        return any(chunk.num_tokens > 1 for chunk in self.chunks)


class SampledToken(Struct, array_like=True, frozen=True):
    """logprob, rank (1 = most likely) and top_logprobs are filled when the request asked for logprobs.

    error: why this sequence has no token, and its request cannot go on. `token_id` has no meaning then.
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    error: str | None = None


class PromptLogprobs(Struct, array_like=True, frozen=True):
    """Log probabilities of some of a prompt's tokens, from the one at position `first` on."""

    seq_id: int
    first: int
    tokens: list[SampledToken]


class PhaseSeconds(Struct, array_like=True, frozen=True):
    """A step's time: that of the model with sampling, and that of the phases of a compression event."""

    model: float = 0.0
    recompute: float = 0.0
    score: float = 0.0
    compact: float = 0.0


class TransferReport(Struct, array_like=True, frozen=True):
    """What has ended of the transfers between pool and host.

    loaded, lost: numbers of loads. Each is reported once; nothing of a lost one may be used.
    num_blocks, seconds: of transfers between pool and host, both ways, that succeeded.
    on_disk: digests of all blocks that the disk has, in the first report after a start or a reset.
    """

    loaded: list[int] = []
    lost: list[int] = []
    num_blocks: int = 0
    seconds: float = 0.0
    on_disk: list[bytes] = []


class MissingMass(Struct, array_like=True, frozen=True):
    """A sequence's bound on the share of attention that lies in what it has dropped: the largest of a step's query
    tokens, layers and heads."""

    seq_id: int
    bound: float


class KeptPairs(Struct, array_like=True, frozen=True):
    """Which KV pairs of the positions `first .. end - 1` of a sequence are left after a compression.

    layers: those that attend all tokens. bits: of each of them and each of its KV heads, a bit for each position, the
        first one in the lowest bit of the first byte.
    """

    seq_id: int
    first: int
    end: int
    layers: list[int]
    bits: list[list[bytes]]


class StepResult(Struct, array_like=True):
    """tokens: one for each decode, then one for each chunk that samples, in plan order, followed by those of its forks.

    verified: for each verification, the tokens of its draft that are right, and the one that the model chose then.
    event_bytes: the most that compressing held at once beside the activations of its pass, which are those of a prefill
        chunk of as many query tokens: the queries of a layer, the gathered keys and values of as many layers as are
        selected from at once, and the offsets kept so far.
    prompts: of the sequences that asked for it, what the step has found.
    transfers: those that have ended on all ranks. A step that schedules nothing waits for its loads.
    missing_masses: of the scheduled sequences whose dropped pairs were scored.
    recalled_bytes: that pairs took which changed places with dropped ones, both ways.
    drafts: for each order of one, its tokens; none where the draft model has no room, or has yet to read the text.
    kept_pairs: of compressions of the sequences that ask for it (`SamplingParams.report_kept_pairs`).
    """

    tokens: list[SampledToken] = []
    seconds: PhaseSeconds = PhaseSeconds()
    event_bytes: int = 0
    prompts: list[PromptLogprobs] = []
    transfers: TransferReport = TransferReport()
    missing_masses: list[MissingMass] = []
    recalled_bytes: int = 0
    verified: list[list[SampledToken]] = []
    drafts: list[list[int]] = []
    kept_pairs: list[KeptPairs] = []


encode = msgpack.Encoder().encode
decode_plan = msgpack.Decoder(StepPlan).decode
decode_result = msgpack.Decoder(StepResult).decode
