"""Query tokens as attention libraries take them: in runs that end with the newest KV pair they attend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    recomputation leaves tokens out. Waits for the device."""
    starts, index = batch.query_start_loc.cpu().numpy(), batch.last_kv_index.cpu().numpy()
    sequence = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    follows = (np.diff(index) == 1) & (np.diff(sequence) == 0)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    ends = np.append(first[1:], len(index))
    return Runs(np.append(first, len(index)), sequence[first], index[ends - 1] + 1)


def refuse_evicted_mask(name: str, batch: AttentionBatch) -> None:
    """Raise ConfigError for the backend `name`, which takes one length for all heads of a sequence."""
    if batch.packed_len is not None:
        raise ConfigError(f"the attention backend {name!r} cannot leave out KV pairs of single heads: use 'triton'")
