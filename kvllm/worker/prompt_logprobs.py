"""Log probabilities of a prompt's own tokens, chunk by chunk as it is computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvllm.core.protocol import PromptLogprobs
from kvllm.worker.sampler import LOGITS_AT_ONCE, read_report, report
from kvllm.worker.transfer import Download, to_device


class PromptReport:
    """The log probabilities of a chunk of a prompt, on their way to the host.

    Logits are computed for so many positions at a time that their memory does not follow the length of the chunk.
    """

    def __init__(
        self,
        seq_id: int,
        first: int,
        token_ids: list[int],
        count: int,
        hidden: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        vocab_size: int,
    ) -> None:
        """
        token_ids: those at positions `first`, `first + 1`, ... of the prompt.
        count: how many of the most likely tokens to report at each position.
        hidden: [len(token_ids), hidden_size], of the position before each of them.
        logits_of: hidden states [r, hidden_size] -> logits [r, vocab_size], of which every rank computes a part.
        """
        self._seq_id, self._first, self._token_ids, self._count = seq_id, first, token_ids, count
        chosen = to_device(token_ids, hidden.device)
        rows_at_once = max(1, LOGITS_AT_ONCE // vocab_size)
        parts = zip(hidden.split(rows_at_once), chosen.split(rows_at_once), strict=True)
        self._download = Download(torch.cat([report(logits_of(rows), ids, count).flatten() for rows, ids in parts]))

    def wait(self) -> PromptLogprobs:
        """Waits for the copy."""
        values = iter(self._download.wait().tolist())
        tokens = [read_report(token_id, self._count, values) for token_id in self._token_ids]
        return PromptLogprobs(self._seq_id, self._first, tokens)
