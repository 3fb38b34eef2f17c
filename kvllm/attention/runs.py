"""Query tokens as attention libraries take them: in runs that end with the newest KV pair they attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from kvllm.attention.base import AttentionBatch
from kvllm.errors import ConfigError


@dataclass(frozen=True)
class Runs:
    """Query tokens that follow each other in a sequence and in its cache. On the host.

    starts: `[runs + 1]`, query tokens of run r are `starts[r] : starts[r + 1]`. sequences: `[runs]`. lengths: `[runs]`,
    KV pairs that the last token of a run attends; the token before it attends one less, and so on.
    """

    starts: np.ndarray
    sequences: np.ndarray
    lengths: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.starts)


def runs_of(batch: AttentionBatch) -> Runs:
    """The fewest runs that hold all query tokens in their order: one for each chunk of a prompt, several where a
    recomputation leaves tokens out. Waits for the device if nothing of the batch is on the host."""
    starts, index = batch.on_host or (batch.query_start_loc.cpu().numpy(), batch.last_kv_index.cpu().numpy())
    sequence = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    follows = (np.diff(index) == 1) & (np.diff(sequence) == 0)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    ends = np.append(first[1:], len(index))
    return Runs(np.append(first, len(index)), sequence[first], index[ends - 1] + 1)


def refuse_evicted_mask(name: str, batch: AttentionBatch) -> None:
    """Raise ConfigError for the backend `name`, which takes one length for all heads of a sequence."""
    if batch.packed_len is not None:
        raise ConfigError(f"the attention backend {name!r} cannot leave out KV pairs of single heads: use 'triton'")


@dataclass(frozen=True)
class RunGroup:
    """Runs of a batch that go to one kernel: those with one query token, or the longer ones.

    starts: `[R + 1]`, where each run begins among the tokens of the group. sequences, lengths: as in Runs.
    tokens: of the batch, those of the group: a slice where they follow each other, else int64 on the device.
    """

    starts: np.ndarray
    sequences: np.ndarray
    lengths: np.ndarray
    tokens: slice | torch.Tensor

    @property
    def is_decode(self) -> bool:
        """Whether each run has one query token."""
        return self.starts[-1] == len(self.sequences)


def groups_of(runs: Runs, device: torch.device) -> list[RunGroup]:
    """The runs with one query token and the longer ones apart, as far as there are any: a kernel for chunks gives a
    decode a whole tile of query tokens."""
    alone = runs.sizes == 1
    return [_group(runs, np.flatnonzero(chosen), device) for chosen in (alone, ~alone) if chosen.any()]


def _group(runs: Runs, chosen: np.ndarray, device: torch.device) -> RunGroup:
    starts = np.append(0, runs.sizes[chosen].cumsum())
    tokens = np.repeat(runs.starts[chosen] - starts[:-1], runs.sizes[chosen]) + np.arange(starts[-1])
    follow = tokens[-1] - tokens[0] + 1 == len(tokens)
    place = slice(int(tokens[0]), int(tokens[-1]) + 1) if follow else upload(tokens, device)
    return RunGroup(starts, runs.sequences[chosen], runs.lengths[chosen], place)


def pinned(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor in the host's memory from which a device of this type can copy while the host goes on."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on a device, for which nobody waits."""
    return pinned(values, device).to(device, non_blocking=True)


class Part(Protocol):
    """The plan for some of a batch's tokens, as in RunGroup."""

    @property
    def tokens(self) -> slice | torch.Tensor: ...


P = TypeVar("P", bound=Part)


def attend_parts(
    queries: torch.Tensor, plan: Sequence[P], attend: Callable[[torch.Tensor, P], torch.Tensor]
) -> torch.Tensor:
    """Attention of `queries` `[T, query_heads, head_dim]`, from that of each part's."""
    if len(plan) == 1:
        return attend(queries, plan[0])
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for part in plan:
        output[part.tokens] = attend(queries[part.tokens], part)
    return output


def with_sinks(output: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with learned scores that have no value, from attention without them.

    output: `[T, query_heads, head_dim]`. log_sums: float32 `[T, query_heads]`, natural logarithms of the sums that the
    softmax was divided by. sinks: float32 `[query_heads]`.
    """
    return (output * (log_sums - sinks).sigmoid().unsqueeze(-1)).to(output.dtype)
