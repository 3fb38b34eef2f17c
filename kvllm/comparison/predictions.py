"""Predictions of texts that are given token by token, and their divergence from those of the full cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from kvllm.comparison.texts import Text

PARTS = 4
"""The last of so many equal parts of an output tells most: all methods hold the same number of KV pairs by then."""
MOST_SAMPLES = 256
"""Positions of a text whose whole distribution is compared, in its last part and in the others together."""
MOST_FLOAT32_BYTES = 1 << 31


def last_part(length: int) -> int:
    """Where the last part of an output begins."""
    return length - max(1, length // PARTS)


def sampled_positions(length: int) -> np.ndarray:
    """Positions of an output whose distributions are compared: up to MOST_SAMPLES of the last part and of the rest."""
    begin = last_part(length)
    spread = [np.linspace(a, b - 1, min(b - a, MOST_SAMPLES)) for a, b in ((0, begin), (begin, length)) if b > a]
    return np.unique(np.concatenate(spread).round().astype(np.int64))


class Reference:
    """The log probabilities of the full cache at the sampled positions, in a file: a large vocabulary has many.

    They are float16 where float32 would take more than 2 GiB, and are added up to 1 again when they are read.
    """

    def __init__(self, path: Path, texts: Sequence[Text], vocab_size: int) -> None:
        self.rows = [np.full(len(text.output), -1) for text in texts]
        total = 0
        for rows in self.rows:
            positions = sampled_positions(len(rows))
            rows[positions] = total + np.arange(len(positions))
            total += len(positions)
        dtype = np.float32 if 4 * total * vocab_size <= MOST_FLOAT32_BYTES else np.float16
        self.logprobs = np.lib.format.open_memmap(path, "w+", dtype, (total, vocab_size))
        self.top = [np.zeros(len(text.output), dtype=np.int64) for text in texts]

    def read(self, rows: Sequence[int], device: torch.device) -> torch.Tensor:
        found = torch.from_numpy(self.logprobs[rows]).to(device)
        return found if found.dtype == torch.float32 else found.float().log_softmax(-1)


class Predictions:
    """What an engine predicts at every position of every output; an observer for `TeacherForcing.feed`.

    nlls: by text and position, minus the log probability of the token that follows. top: whether the most likely token
    is the full cache's. divergences: KL(full || engine) in nats at the sampled positions, nan at the others.
    """

    def __init__(self, texts: Sequence[Text], reference: Reference, advance: Callable[[int], object]) -> None:
        """advance: is told how many tokens were predicted."""
        self.texts = texts
        self.reference = reference
        self.advance = advance
        self.nlls, self.divergences = ([np.full(len(text.output), np.nan) for text in texts] for _ in range(2))
        self.top = [np.zeros(len(text.output), dtype=bool) for text in texts]

    def __call__(self, logits: torch.Tensor, sequences: list[int], counts: list[int]) -> None:
        self.advance(len(sequences))
        own = [row for row, i in enumerate(sequences) if i < len(self.texts)]  # what stands after the texts is others'
        if not own:
            return
        logits = logits if len(own) == len(sequences) else logits[own]
        places = [(sequences[row], counts[row]) for row in own]
        logprobs = logits.log_softmax(-1)
        tokens = torch.tensor([self.texts[i].output[count] for i, count in places], device=logits.device)
        nlls = -logprobs.gather(1, tokens[:, None])[:, 0]
        for (i, count), nll, top in zip(places, nlls.tolist(), logits.argmax(-1).tolist(), strict=True):
            self.nlls[i][count] = nll
            self.take_top(i, count, top)
        sampled = [row for row, (i, count) in enumerate(places) if self.reference.rows[i][count] >= 0]
        if sampled:
            self.compare(logprobs[sampled], [places[row] for row in sampled])

    def take_top(self, i: int, count: int, top: int) -> None:
        self.top[i][count] = self.reference.top[i][count] == top

    def compare(self, logprobs: torch.Tensor, places: list[tuple[int, int]]) -> None:
        full = self.reference.read([self.reference.rows[i][count] for i, count in places], logprobs.device)
        terms = torch.where(full > -torch.inf, full.exp() * (full - logprobs), 0.0)
        for (i, count), divergence in zip(places, terms.sum(-1, dtype=torch.float64).tolist(), strict=True):
            self.divergences[i][count] = divergence


class FullPredictions(Predictions):
    """The predictions of the full cache, which become the reference on the way."""

    def take_top(self, i: int, count: int, top: int) -> None:
        self.reference.top[i][count] = top
        super().take_top(i, count, top)

    def compare(self, logprobs: torch.Tensor, places: list[tuple[int, int]]) -> None:
        rows = [self.reference.rows[i][count] for i, count in places]
        self.reference.logprobs[rows] = logprobs.cpu().numpy()
        super().compare(logprobs, places)
