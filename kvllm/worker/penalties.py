"""Changes of logits before a token is drawn: bias, penalties, and tokens that must not come."""

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


def add_bias(logits: Tensor, biases: dict[int, dict[int, float]]) -> None:
    """Add to the logits of tokens, by row of logits [R, V] and token id, in place."""
    places = [(row, token_id) for row, of_row in biases.items() for token_id in of_row]
    if places:
        values = [value for of_row in biases.values() for value in of_row.values()]
        row, token = to_device(places, logits.device).T
        logits[row, token] += to_device(values, logits.device, logits.dtype)


def bad_endings(words: list[list[int]], output_token_ids: list[int]) -> set[int]:
    """Tokens that would complete a word at the end of an output. words: as token ids, at least one each."""
    endings = set()
    for word in words:
        begin = len(output_token_ids) - len(word) + 1
        if begin >= 0 and output_token_ids[begin:] == word[:-1]:
            endings.add(word[-1])
    return endings


def forbid(logits: Tensor, forbidden: dict[int, list[set[int]]]) -> None:
    """Forbid tokens in some rows of logits [R, V], in place, but no set that would leave a row without any token."""
    vocab = logits.shape[-1]
    places = []
    for row, sets in forbidden.items():
        found: set[int] = set()
        for token_ids in sets:
            together = found | {token_id for token_id in token_ids if 0 <= token_id < vocab}
            found = together if len(together) < vocab else found
        places += [(row, token_id) for token_id in found]
    if places:
        logits[tuple(to_device(places, logits.device).T)] = -math.inf
