"""Make tokens impossible that are not in a row's set."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096


@triton.jit(do_not_specialize=["row_stride", "vocab", "num_words"])
def _forbid_tile(logits, rows, words, row_stride, vocab, num_words, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.load(words + index * num_words + token // 32, mask=token < vocab, other=-1)
    is_allowed = (word >> (token % 32)) & 1
    of_row = logits + tl.load(rows + index) * row_stride
    tl.store(of_row + token, float("-inf"), mask=(token < vocab) & (is_allowed == 0))


def forbid_others(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Give -inf to the tokens that are not in a row's set, in place.

    logits: `[R, V]`, a row contiguous. rows: int64 `[r]`, each at most once.
    words: contiguous int32 `[r, ceil(V / 32)]`; token t is bit t % 32 of word t // 32.
    """
    vocab = logits.shape[1]
    _forbid_tile[(len(rows), triton.cdiv(vocab, _TILE))](
        logits, rows, words, logits.stride(0), vocab, words.shape[1], TILE=_TILE, num_warps=4
    )
