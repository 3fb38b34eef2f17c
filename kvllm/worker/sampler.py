"""Logits to tokens: penalties, grammars, temperature, top-k, top-p, min-p, one draw per row, log probabilities.

A row's token depends on that row alone: its logits, its options, its seed and its tokens. Neither its batch mates nor
their number change it, so a seed reproduces a request under any load, after a preemption and after a restart.
Two things make that so:

- The random number of a row is a hash of (seed, tokens generated so far). There is no generator state to keep.
- Draws do not depend on the order in which a device adds (see `kvllm.worker.draws`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvllm.core.protocol import SampledToken
from kvllm.worker import draws
from kvllm.worker.mask import restrict
from kvllm.worker.penalties import add_bias, forbid, penalize
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.transfer import Download, to_device

# Rows are drawn in parts of this many logits: it bounds the copies alive at once, some 30 bytes per logit, or up to 8
# where they are read in place.
LOGITS_AT_ONCE = 2**22
LOGITS_AT_ONCE_IN_PLACE = 2**26
MASK_64 = 2**64 - 1
NOT_FINITE = "the model's logits are not finite: check its weights, or use a dtype with a wider range"


class SampleRows:
    """The rows of a step's logits: `all` of them, and the numbers of those that need more than the most likely token.

    special: rows that are not plain. reported: rows that asked for log probabilities, by how many they asked for.
    read: rows whose logits are read. is_plain: whether there are none.
    """

    def __init__(self, rows: list[SampleRow]) -> None:
        self.all = rows
        self.special = [i for i, row in enumerate(rows) if not row.is_plain]
        self.reported: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if row.params.logprobs is not None:
                self.reported.setdefault(row.params.logprobs, []).append(i)
        self.read = sorted({*self.special, *(i for rows in self.reported.values() for i in rows)})
        self.is_plain = not self.read


def sample(logits: Tensor, of_step: SampleRows, most_likely: Tensor | None = None) -> Samples:
    """Sample one token for each row. What one row makes fail gives that row alone an error instead of a token.

    Args:
        logits: [R, V] float32, or of the model's dtype where `draws.reads_in_place` or all rows are plain; not
            modified. With `most_likely`, only `of_step.read` are read.
        of_step: with R rows.
        most_likely: int64 [R], if it is known already; not modified.
    """
    rows, special = of_step.all, of_step.special
    if len(special) < len(rows) and most_likely is not None:
        # A download from the CPU is no copy, and is read when the next step may have overwritten what a graph returned.
        chosen = most_likely.clone() if special or most_likely.is_cpu else most_likely
    elif len(special) < len(rows):
        chosen = draws.most_likely(logits)
    else:
        chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    errors = {i: failure for i in special if (failure := rows[i].failure)}
    at_once = LOGITS_AT_ONCE_IN_PLACE if draws.reads_in_place(logits) else LOGITS_AT_ONCE
    rows_at_once = max(1, at_once // logits.shape[-1])
    for start in range(0, len(special), rows_at_once):
        part = special[start : start + rows_at_once]
        chosen[to_device(part, logits.device)] = _choose_part(logits, rows, part, errors)
    return Samples(chosen, _report(logits, chosen, of_step.reported, errors), errors, logits.shape[-1])


def _choose_part(logits: Tensor, rows: list[SampleRow], part: list[int], errors: dict[int, str]) -> Tensor:
    """Token ids of the rows whose numbers are in `part`: of all at once, or one by one if that fails."""
    try:
        return _choose(logits, rows, part)
    except Exception as error:
        if len(part) == 1:
            errors[part[0]] = _describe(error)
            return torch.full((1,), draws.NO_TOKEN, device=logits.device)
    return torch.cat([_choose_part(logits, rows, [i], errors) for i in part])


class Report(NamedTuple):
    """The log probabilities of some rows that asked for equally many: values, float64 `[rows, 2 + 2 * num_top]`."""

    rows: list[int]
    num_top: int
    values: Tensor


def _report(logits: Tensor, chosen: Tensor, reported: dict[int, list[int]], errors: dict[int, str]) -> list[Report]:
    """Reports of the rows that have a token. Rows that ask for equally many are reported together, because among equal
    logits `topk` may choose others if it is asked for more."""
    rows_at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    found: list[Report] = []
    for count, rows in reported.items():
        wanted = [i for i in rows if i not in errors]
        for start in range(0, len(wanted), rows_at_once):
            found += _report_part(logits, chosen, wanted[start : start + rows_at_once], count, errors)
    return found


def _report_part(logits: Tensor, chosen: Tensor, part: list[int], count: int, errors: dict[int, str]) -> list[Report]:
    """Of the rows whose numbers are in `part`: of all at once, or one by one if that fails."""
    try:
        index = to_device(part, logits.device)
        return [Report(part, count, report(logits[index].float(), chosen[index], count))]
    except Exception as error:
        if len(part) == 1:
            errors[part[0]] = _describe(error)
            return []
    return [of_row for i in part for of_row in _report_part(logits, chosen, [i], count, errors)]


def _describe(error: Exception) -> str:
    return f"no token could be sampled: {type(error).__name__}: {error}"


class Samples:
    """Sampled tokens and what is reported of them, on their way to the host in one copy.

    chosen: int64 [R], on the device. reports: as `report` makes their values. errors: by row, where no token was
        sampled.
    """

    def __init__(self, chosen: Tensor, reports: list[Report], errors: dict[int, str], vocab_size: int) -> None:
        self._reports = [(each.rows, each.num_top) for each in reports]
        self._errors = errors
        self._vocab_size = vocab_size
        self.chosen = chosen
        # float64 holds every token id.
        values = [each.values.flatten() for each in reports]
        self._download = Download(torch.cat((chosen.double(), *values)) if values else chosen)

    def token_ids(self) -> np.ndarray:
        """int64 `[R]`. Waits for the copy. A row with an error has any token, since its request ends."""
        values = self._download.wait().numpy()[: len(self.chosen)]
        return np.maximum(values, 0).astype(np.int64, copy=False)

    def place(self, rows: list[int], places: list[int], token_ids: Tensor) -> None:
        """Write the tokens of rows to places of the token ids `[T]`, all on the device. A row without a token gives
        any."""
        count = len(rows)
        if places == rows == list(range(count)):
            token_ids[:count] = self.chosen[:count].clamp(min=0)
        else:
            to, source = to_device([places, rows], token_ids.device)
            token_ids[to] = self.chosen[source].clamp(min=0)

    def tokens(self) -> list[SampledToken]:
        """Waits for the copy. A row whose logits are not finite has an error."""
        values, count = self._download.wait().tolist(), len(self.chosen)
        tokens, reported = [SampledToken(int(token_id)) for token_id in values[:count]], iter(values[count:])
        for rows, number in self._reports:
            for row in rows:
                tokens[row] = read_report(tokens[row].token_id, number, reported)
        if tokens and not 0 <= min(values[:count]) <= max(values[:count]) < self._vocab_size:
            tokens = [self._checked(token) for token in tokens]
        for row, error in self._errors.items():
            tokens[row] = SampledToken(0, error=error)
        return tokens

    def _checked(self, token: SampledToken) -> SampledToken:
        return token if 0 <= token.token_id < self._vocab_size else SampledToken(0, error=NOT_FINITE)


def uniform(seed: int, position: int) -> float:
    """A number in the open interval (0, 1): a hash of the seed and the position, by two rounds of SplitMix64."""
    mixed = _mix((_mix(seed & MASK_64) + position * 0x9E3779B97F4A7C15) & MASK_64)
    # 52 bits and a half: with 53, the largest value would round to 1.
    return ((mixed >> 12) + 0.5) * 2.0**-52


def _mix(state: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    state = (state + 0x9E3779B97F4A7C15) & MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)


def _choose(logits: Tensor, rows: list[SampleRow], part: list[int]) -> Tensor:
    """Token ids of the rows whose numbers are in `part`, which need more than an argmax."""
    of_part = [rows[i] for i in part]
    if any(row.changes_logits for row in of_part) or not draws.reads_in_place(logits):
        logits, part = logits[to_device(part, logits.device)].float(), list(range(len(part)))
        _change(logits, of_part)
    uniforms = [uniform(row.seed, len(row.output_token_ids)) for row in of_part]
    return draws.choose(logits, part, [row.params for row in of_part], uniforms)


def _change(logits: Tensor, rows: list[SampleRow]) -> None:
    """Apply to logits [r, V] what rows ask for ahead of temperature and filters, in place."""
    add_bias(logits, {i: row.params.logit_bias for i, row in enumerate(rows) if row.params.logit_bias})
    if penalized := {i: row.penalties() for i, row in enumerate(rows) if row.is_penalized}:
        penalize(logits, penalized)
    forbid(logits, {i: row.forbidden() for i, row in enumerate(rows) if row.forbids and not row.is_masked})
    restrict(logits, rows)


def report(logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
    """Log probability and rank of the token `token_ids[r]` in each row, then ids and log probabilities of the `count`
    most likely.

    logits: [r, V], untouched ones. token_ids: int64 [r]. Returns float64 [r, 2 + 2 * count].
    """
    token_ids = token_ids.clamp(min=0).unsqueeze(-1)
    top = logits.topk(count).indices
    # Summed in float64, reported in float32: the order of summation does not show.
    values = logits.double()
    logprobs = values.gather(-1, torch.cat((token_ids, top), -1)) - values.logsumexp(-1, keepdim=True)
    logprobs = logprobs.float().double()
    rank = (logits > logits.gather(-1, token_ids)).sum(-1, keepdim=True, dtype=torch.float64) + 1
    return torch.cat((logprobs[:, :1], rank, top.double(), logprobs[:, 1:]), -1)


def read_report(token_id: int, count: int, values: Iterator[float]) -> SampledToken:
    """Reads on where the last report has ended."""
    logprob, rank = next(values), int(next(values))
    top = [int(each) for each in islice(values, count)]
    return SampledToken(token_id, logprob, rank, list(zip(top, islice(values, count), strict=True)))
