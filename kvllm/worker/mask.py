"""Logits of rows whose sequences follow a grammar, or have a list of allowed tokens: others become impossible."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from kvllm.worker.sample_row import SampleRow
from kvllm.worker.transfer import to_device


def restrict(logits: Tensor, rows: list[SampleRow]) -> None:
    """Keep the tokens that the rows' masks allow, in logits [R, V], in place. Rows without a mask stay unchanged.

    It comes last of what changes logits, because a penalty would make -inf finite. Raises RequestError.
    """
    restricted = [i for i, row in enumerate(rows) if row.is_masked]
    if restricted:
        allowed = np.stack([_allowed(rows[i], logits.shape[-1]) for i in restricted])
        index = to_device(restricted, logits.device)
        logits[index] = logits[index].masked_fill_(to_device(~allowed, logits.device), -math.inf)


def _allowed(row: SampleRow, vocab: int) -> np.ndarray:
    """Whether a token may be the row's next: bool [V]. A grammar comes first, then `allowed_token_ids`, then what is
    forbidden: nothing of this may leave the row without any token."""
    params, matcher = row.params, row.matcher
    allowed = np.ones(vocab, dtype=bool) if matcher is None else matcher.allowed(row.output_token_ids)[:vocab]
    if params.allowed_token_ids is not None:
        listed = np.zeros(vocab, dtype=bool)
        listed[params.allowed_token_ids] = True
        allowed = _narrowed(allowed, allowed & listed)
    for token_ids in row.forbidden() if row.forbids else ():
        others = allowed.copy()
        others[[token_id for token_id in token_ids if 0 <= token_id < vocab]] = False
        allowed = _narrowed(allowed, others)
    return allowed


def _narrowed(allowed: np.ndarray, narrower: np.ndarray) -> np.ndarray:
    return narrower if narrower.any() else allowed
