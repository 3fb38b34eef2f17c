"""Log probabilities of a prompt's own tokens, chunk by chunk as it is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kvllm.core.protocol import PromptLogprobs, SequenceStart, StepPlan
from kvllm.models.base import Decoder
from kvllm.worker.logit_parts import LogitParts
from kvllm.worker.sampler import LOGITS_AT_ONCE, read_report, report
from kvllm.worker.state import SequenceState
from kvllm.worker.transfer import Download, to_device


class PromptReport:
    """The log probabilities of a chunk of a prompt, on their way to the host.

    The memory of logits does not follow the length of the chunk, if they are computed when they are asked for.
    """

    def __init__(self, seq_id: int, first: int, token_ids: list[int], count: int, logits: Iterable[Tensor]) -> None:
        """
        token_ids: those at positions `first`, `first + 1`, ... of the prompt.
        count: how many of the most likely tokens to report at each position.
        logits: those of the position before each of them, [n, V] at a time.
        """
        self._seq_id, self._first, self._token_ids, self._count = seq_id, first, token_ids, count
        values, begin = list[Tensor](), 0
        for each in logits:
            chosen = to_device(token_ids[begin : begin + len(each)], each.device)
            values.append(report(each, chosen, count).flatten())
            begin += len(each)
        self._download = Download(torch.cat(values))

    def wait(self) -> PromptLogprobs:
        """Waits for the copy."""
        values = iter(self._download.wait().tolist())
        tokens = [read_report(token_id, self._count, values) for token_id in self._token_ids]
        return PromptLogprobs(self._seq_id, self._first, tokens)


class PromptReports:
    """The reports of a step, and the sequences whose prompts are not reported to the end (`pending`)."""

    def __init__(self, model: Decoder, parts: LogitParts, *, samples: bool) -> None:
        self.pending: set[int] = set()
        self._model = model
        self._parts = parts
        self._samples = samples
        self._found: list[PromptReport] = []

    def clear(self) -> None:
        self.pending.clear()
        self._found = []

    def start(self, start: SequenceStart) -> None:
        """Report a prompt that is asked for, and was not reported before its sequence was preempted."""
        if start.sampling.prompt_logprobs is not None and len(start.token_ids) == start.prompt_length:
            self.pending.add(start.seq_id)

    def add(self, plan: StepPlan, states: list[SequenceState], hidden: Tensor) -> None:
        """Report the tokens that follow those of the step in prompts. Lengths are those after the step."""
        first_chunk = plan.num_seqs - len(plan.chunks)
        begin = plan.num_tokens - sum(chunk.num_tokens for chunk in plan.chunks)
        for item, state in zip(plan.chunks, states[first_chunk:], strict=True):
            row, first = state.sample_row, state.logical_length - item.num_tokens + 1
            following = row.prompt_token_ids[first : first + item.num_tokens]
            if item.seq_id in self.pending and following:
                count, of_chunk = row.params.prompt_logprobs or 0, hidden[begin : begin + len(following)]
                logits = self._logits(of_chunk)
                if self._samples:
                    self._found.append(PromptReport(item.seq_id, first, following, count, logits))
                else:
                    deque(logits, maxlen=0)  # each rank's part
            if len(following) < item.num_tokens:
                self.pending.discard(item.seq_id)
            begin += item.num_tokens

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Of hidden states [n, hidden_size], some rows at a time."""
        for rows in hidden.split(max(1, LOGITS_AT_ONCE // self._parts.vocab_size)):
            yield self._parts.gather(self._model.logits(rows), range(len(rows)))

    def take(self) -> list[PromptReport]:
        """Those of the step."""
        found, self._found = self._found, []
        return found
