"""Logits of rows whose sequences follow a grammar, or have a list of allowed tokens: others become impossible."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from kvllm.structured.token_sets import all_tokens, pack, unpack
from kvllm.worker.draws import reads_in_place
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.transfer import to_device, to_device_early


def restrict(logits: Tensor, rows: list[SampleRow]) -> None:
    """Keep the tokens that the rows' masks allow, in logits [R, V], in place. Rows without a mask stay unchanged.

    It comes last of what changes logits, because a penalty would make -inf finite. Raises RequestError.
    """
    restricted = [i for i, row in enumerate(rows) if row.is_masked]
    if restricted:
        _apply(logits, restricted, np.stack([_allowed(rows[i], logits.shape[-1]) for i in restricted]))


def _apply(logits: Tensor, restricted: list[int], words: np.ndarray) -> None:
    """words: the tokens that each of the restricted rows may have, uint32 `[r, ceil(V / 32)]`."""
    if reads_in_place(logits):
        from kvllm.kernels.token_masks import forbid_others

        of_rows = to_device_early(words.view(np.int32), logits.device)  # while the pass is still under way
        forbid_others(logits, to_device(restricted, logits.device), of_rows)
        return
    for i, of_row in zip(restricted, words, strict=True):
        forbidden = to_device(~unpack(of_row)[: logits.shape[-1]], logits.device)
        logits[i].masked_fill_(forbidden, -math.inf)


def _allowed(row: SampleRow, vocab: int) -> np.ndarray:
    """The set of tokens that may be the row's next. A grammar comes first, then `allowed_token_ids`, then what is
    forbidden: nothing of this may leave the row without any token."""
    params, matcher, allowed = row.params, row.matcher, all_tokens(vocab)
    if matcher is not None:
        allowed = allowed & matcher.allowed(row.output_token_ids)[: len(allowed)]
    if params.allowed_token_ids is not None:
        allowed = _narrowed(allowed, allowed & pack(params.allowed_token_ids, vocab))
    for token_ids in row.forbidden() if row.forbids else ():
        forbidden = pack([token_id for token_id in token_ids if 0 <= token_id < vocab], vocab)
        allowed = _narrowed(allowed, allowed & ~forbidden)
    return allowed


def _narrowed(allowed: np.ndarray, narrower: np.ndarray) -> np.ndarray:
    return narrower if narrower.any() else allowed
