"""Changes of logits that depend on the tokens so far: penalties, and tokens that must not come yet."""

from __future__ import annotations

import math
from array import array

import numpy as np
import torch
from torch import Tensor

from kvllm.sampling_params import SamplingParams
from kvllm.worker.transfer import to_device


class Penalties:
    """The penalties of a row: the distinct tokens that they are for, and how often its output has each."""

    def __init__(self, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        self.factors = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        known = dict.fromkeys(prompt_token_ids if params.repetition_penalty != 1 else ())
        self._places = {token_id: place for place, token_id in enumerate(known)}
        self._token_ids = array("q", self._places)
        self._counts = array("q", [0] * len(self._places))
        self._num_counted = 0

    def count(self, output_token_ids: list[int]) -> None:
        """Count on from the last call: a step must not cost what the text is long."""
        for token_id in output_token_ids[self._num_counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._counts):
                self._token_ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1
        self._num_counted = len(output_token_ids)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and their counts, int64. A token of the prompt alone counts 0."""
        return np.array(self._token_ids), np.array(self._counts)


def penalize(logits: Tensor, penalties: dict[int, Penalties]) -> None:
    """Apply penalties to some rows of logits [R, V], in place, to all at once.

    Repetition on prompt and output (Keskar et al. 2019, arXiv 1909.05858, section 4.1; dividing a positive and
    multiplying a negative logit), then frequency and presence on the output, as in the OpenAI API.
    """
    token_ids, counts = zip(*(of_row.arrays() for of_row in penalties.values()), strict=True)
    lengths = [len(of_row) for of_row in token_ids]
    places = np.stack((np.repeat(list(penalties), lengths), np.concatenate(token_ids)))
    factors = np.repeat([of_row.factors for of_row in penalties.values()], lengths, axis=0)
    row, token = to_device(places, logits.device)
    numbers = np.vstack((np.concatenate(counts), factors.T))
    occurrences, repetition, frequency, presence = to_device(numbers, logits.device, logits.dtype)
    values = logits[row, token]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * occurrences + presence * (occurrences > 0)
    # An extreme repetition penalty overflows. Keep it finite: it is the user's to ask for.
    largest = torch.finfo(logits.dtype).max
    logits[row, token] = values.clamp(-largest, largest)


def forbid(logits: Tensor, forbidden: dict[int, set[int]]) -> None:
    """Forbid tokens in some rows of logits [R, V], in place, but none in a row that would be left without any."""
    vocab = logits.shape[-1]
    places = []
    for row, token_ids in forbidden.items():
        existing = [token_id for token_id in token_ids if 0 <= token_id < vocab]
        if len(existing) < vocab:
            places += [(row, token_id) for token_id in existing]
    if places:
        logits[tuple(to_device(places, logits.device).T)] = -math.inf
