"""Logits of rows whose sequences follow a grammar: tokens that it does not allow become impossible."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from kvllm.worker.transfer import to_device

if TYPE_CHECKING:
    from kvllm.worker.sampler import SampleRow


def restrict(logits: Tensor, rows: list[SampleRow]) -> None:
    """Keep the tokens that the rows' grammars allow, in logits [R, V], in place. Rows without a grammar stay unchanged.

    It comes last of what changes logits, because a penalty would make -inf finite. Raises RequestError.
    """
    restricted = [i for i, row in enumerate(rows) if row.matcher is not None]
    if restricted:
        allowed = np.stack([_allowed(rows[i], logits.shape[-1]) for i in restricted])
        index = to_device(restricted, logits.device)
        logits[index] = logits[index].masked_fill_(to_device(~allowed, logits.device), -math.inf)


def _allowed(row: SampleRow, vocab: int) -> np.ndarray:
    """Whether a token may be the row's next: bool [V]. Before `min_tokens`, the text ends only where it must."""
    assert row.matcher is not None
    allowed = row.matcher.allowed(row.output_token_ids)[:vocab]
    if row.must_go_on:
        stopping = [token_id for token_id in row.stopping() if 0 <= token_id < vocab]
        going_on = allowed.copy()
        going_on[stopping] = False
        if going_on.any():
            return going_on
    return allowed
