"""What the scheduler asks of every policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from kvllm.config import CompressionConfig, EngineConfig
from kvllm.config.policies import POLICIES, PolicyOptions
from kvllm.core.protocol import CompressionJob
from kvllm.core.regions import NothingDropped, Region, Regions
from kvllm.core.sequence import Sequence
from kvllm.kvcache.groups import UNIFORM, KVGroup, full_groups
from kvllm.sampling_params import SamplingParams

Candidate = tuple[Sequence, Region]
Own = TypeVar("Own", bound=PolicyOptions)


@dataclass(slots=True)
class EngineLoad:
    """The state of the engine that a policy sees.

    decode_steps: of the engine so far. available_blocks: that can be allocated now. missing_blocks: how many more the
    first waiting sequence would have needed to be admitted in the last step. tokens: of the step's budget, what
    compression may take.
    """

    decode_steps: int
    available_blocks: int
    missing_blocks: int
    tokens: int


class CompressionPolicy(ABC, Generic[Own]):
    """Names the regions that are compressed now.

    Called once per step with the decoding sequences, none of them finished or prefilling, in order of age.
    """

    options_type: ClassVar[type[PolicyOptions]]
    """Its options. Their tag is its name."""
    at_once: ClassVar[bool] = False
    """Whether a named sequence decodes no more until it is compressed. Then `select` does not look at the tokens."""

    def __init__(self, config: CompressionConfig, block_size: int, groups: Sequences[KVGroup] = UNIFORM) -> None:
        """groups: the KV groups of the model, of which those without a window are compressed."""
        self.config = config
        self.options: Own = config.policy
        self.groups = full_groups(groups)
        self.full_parts = sum(len(group.parts) for group in self.groups)
        self.group_regions = group_regions(config, block_size, self.groups)
        self.reselects = config.spec.reselects
        self.regions = self.group_regions[0]
        self.uncompressed = NothingDropped(block_size)

    def check(self, prompt_length: int, sampling: SamplingParams) -> None:
        """Raises RequestError if what a request asks of compression does not go with its prompt or the engine."""

    @abstractmethod
    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        """The jobs to run before the next step."""

    def regions_of(self, seq: Sequence) -> Regions:
        """The arithmetic that holds for one sequence, in the first KV group. Others differ in what they keep."""
        return self.regions if seq.sampling.compress else self.uncompressed

    def regions_by_group(self, seq: Sequence) -> list[Regions]:
        """The arithmetic of each KV group that attends all tokens."""
        first = self.regions_of(seq)
        if not seq.sampling.compress or seq.sampling.retain_blocks is not None:
            return [first] * len(self.groups)  # all layers keep what the request says
        return [first, *self.group_regions[1:]]

    def retained(self, seq: Sequence, region: Region) -> list[int]:
        """KV pairs that each part of these groups keeps of a window of a region of the first."""
        if self.full_parts == 1:
            return [region.retain]
        by_group = zip(self.groups, self.regions_by_group(seq), strict=True)
        return [regions.retain for group, regions in by_group for _ in group.parts]

    def released(self, seq: Sequence, region: Region) -> int:
        """KV pairs by which all tables of a sequence together shrink for each window of a region."""
        return sum(region.size - retained for retained in self.retained(seq, region))

    def selected_from(self, seq: Sequence, region: Region) -> Region:
        """A region together with what is left of the windows before it, if the method chooses from both."""
        if not self.reselects:
            return region
        assert seq.scored_from is not None
        return region.from_start(seq.scored_from)

    def dropped(self, job: CompressionJob) -> int:
        """KV pairs that a sequence loses by a job, in the mean over the layers, rounded down."""
        if self.full_parts == 1:
            return job.parts[0].dropped
        layers = [len(part) for group in self.groups for part in group.parts]
        return sum(count * part.dropped for count, part in zip(layers, job.parts, strict=True)) // sum(layers)

    def unscored(self, sequences: Sequences[Sequence]) -> list[Sequence]:
        """Those that cannot be compressed as long as their scores are not added up."""
        if not self.reselects:
            return []
        return [seq for seq in sequences if not seq.is_scored and seq.sampling.compress]

    def foresees_compression(self, running: Sequences[Sequence], load: EngineLoad) -> bool:
        """Whether running sequences may be compressed before they end, so that their scores are needed."""
        return True

    def eligible(self, decoding: Sequences[Sequence]) -> list[Candidate]:
        """All sequences with something to compress, in the order given."""
        regions = [(seq, self._region_of(seq)) for seq in decoding]
        return [(seq, region) for seq, region in regions if region is not None]

    def _region_of(self, seq: Sequence) -> Region | None:
        """The part of a sequence that the policy compresses next."""
        return self.regions_of(seq).trailing(seq.cached_length, seq.uncompressed_tail)


def group_regions(config: CompressionConfig, block_size: int, groups: Sequences[KVGroup]) -> list[Regions]:
    """The arithmetic of each of some KV groups that attend all tokens, for sequences without a budget of their own.
    Groups differ in what they keep of a window alone."""
    found = []
    for group in groups:
        kept = group.retain_blocks
        found.append(config.regions(block_size, None if kept is None else kept * block_size))
    return found or [config.regions(block_size)]


def make_policy(config: EngineConfig) -> CompressionPolicy[Any] | None:
    """The policy of an engine; None if nothing is ever dropped."""
    active = config.active_compression
    return POLICIES[active.policy.name](active, config.block_size, config.kv_groups) if active else None
