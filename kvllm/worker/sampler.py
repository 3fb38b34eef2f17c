"""Logits to tokens: penalties, temperature, top-k, top-p, min-p, one draw per row, log probabilities.

A row's token depends on that row alone: its logits, its options, its seed and its tokens. Neither its batch mates nor
their number change it, so a seed reproduces a request under any load, after a preemption and after a restart.
Three things make that so:

- The random number of a row is a hash of (seed, tokens generated so far). There is no generator state to keep.
- Probabilities are rounded to whole multiples of 2**-34 of the largest one. Sums of integers below 2**53 are exact in
  float64, so cumulative sums do not depend on the order in which a device adds (for vocabularies up to 2**19).
- Each filter is a lower bound on the logit. Tokens of equal logit stay or go together, however a sort orders them.

Filters apply in the order top-k, top-p, min-p, each to what the one before has left, as in transformers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvllm.core.protocol import SampledToken
from kvllm.errors import KvLLMError
from kvllm.sampling_params import SamplingParams

RESOLUTION = 2.0**34
# Rows are drawn in parts of this many logits: it bounds the copies alive at once, some 30 bytes per logit.
LOGITS_AT_ONCE = 2**22
MASK_64 = 2**64 - 1


@dataclass(slots=True)
class SampleRow:
    """One row of logits: what its request asks for, and the tokens known so far.

    eos_token_ids: forbidden, with `params.stop_token_ids`, until `params.min_tokens` are generated.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    eos_token_ids: tuple[int, ...] = ()
    _prompt: frozenset[int] | None = None
    _counts: Counter[int] = field(default_factory=Counter)

    def prompt_tokens(self) -> frozenset[int]:
        if self._prompt is None:
            self._prompt = frozenset(self.prompt_token_ids)
        return self._prompt

    def output_counts(self) -> Counter[int]:
        """Occurrences in the output, counted on from the last call: a step must not cost what the text is long."""
        self._counts.update(self.output_token_ids[self._counts.total() :])
        return self._counts


def sample(logits: Tensor, rows: list[SampleRow]) -> list[SampledToken]:
    """Sample one token for each row.

    Args:
        logits: [R, V] float32, not modified.
        rows: R of them.

    Raises:
        KvLLMError: the logits of a row are not finite.
    """
    special = [i for i, row in enumerate(rows) if not row.params.greedy or _is_adjusted(row)]
    if len(special) < len(rows):
        chosen = logits.argmax(-1)
        _check_finite(logits.gather(-1, chosen.unsqueeze(-1)))  # the argmax of a row with a NaN is a NaN
    else:
        chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    rows_at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    for start in range(0, len(special), rows_at_once):
        part = special[start : start + rows_at_once]
        chosen[part] = _choose(logits[part], [rows[i] for i in part])
    return [
        SampledToken(token_id) if row.params.logprobs is None else _report(row_logits, token_id, row.params.logprobs)
        for row, row_logits, token_id in zip(rows, logits, chosen.tolist(), strict=True)
    ]


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


def _is_adjusted(row: SampleRow) -> bool:
    return len(row.output_token_ids) < row.params.min_tokens or _is_penalized(row.params)


def _is_penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _choose(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Token ids [r] of rows that need more than an argmax. Overwrites `logits` [r, V]."""
    for row_logits, row in zip(logits, rows, strict=True):
        if _is_penalized(row.params):
            penalize(row_logits, row)
        if len(row.output_token_ids) < row.params.min_tokens:
            _forbid_stopping(row_logits, row)
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(random) == len(rows):
        return _draw(logits, rows)
    chosen = logits.argmax(-1)
    if random:
        chosen[random] = _draw(logits[random], [rows[i] for i in random])
    return chosen


def penalize(logits: Tensor, row: SampleRow) -> None:
    """Penalties on logits [V], in place.

    Repetition on prompt and output (Keskar et al. 2019, arXiv 1909.05858, section 4.1; dividing a positive and
    multiplying a negative logit), then frequency and presence on the output, as in the OpenAI API.
    """
    params = row.params
    counts = row.output_counts()
    seen = list(counts.keys() | row.prompt_tokens()) if params.repetition_penalty != 1 else list(counts)
    if not seen:
        return
    token_ids = torch.tensor(seen, device=logits.device)
    occurrences = torch.tensor([counts[token_id] for token_id in seen], dtype=logits.dtype, device=logits.device)
    values = logits[token_ids]
    values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values -= params.frequency_penalty * occurrences + params.presence_penalty * (occurrences > 0)
    # An extreme repetition penalty overflows. Keep it finite: it is the user's to ask for.
    largest = torch.finfo(logits.dtype).max
    logits[token_ids] = values.clamp(-largest, largest)


def _forbid_stopping(logits: Tensor, row: SampleRow) -> None:
    """Forbid the tokens that would end the sequence, unless that leaves none. logits: [V], overwritten."""
    stopping = {*row.eos_token_ids, *(row.params.stop_token_ids or [])}
    stopping = [token_id for token_id in stopping if token_id < len(logits)]
    if len(stopping) < len(logits):
        logits[stopping] = -math.inf


def _draw(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """One draw for each row by the inverse of its cumulative distribution, in token order. Overwrites `logits` [r, V].

    Returns int64 [r].
    """
    filter_logits(logits, [row.params for row in rows])
    cumulative = _weights(logits).cumsum_(-1)
    total = cumulative[:, -1:]
    target = _column([uniform(row.seed, len(row.output_token_ids)) for row in rows], cumulative)
    # At most total - 1, as `uniform` is at most 1 - 2**-53. So some token's cumulative weight exceeds the target; the
    # first one's own weight is at least 1.
    target = (target * total).floor_()
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _weights(logits: Tensor) -> Tensor:
    """Unnormalized probabilities as whole numbers in float64: `RESOLUTION` for logit 0, the largest. [r, V]."""
    return logits.exp().mul_(RESOLUTION).round_().double()


def filter_logits(logits: Tensor, params: list[SamplingParams]) -> None:
    """Temperature and filters, in place.

    logits: [r, V]. Becomes relative to the row's largest, which is 0 afterwards; rejected tokens become -inf.

    Raises:
        KvLLMError: a row has no finite maximum.
    """
    highest = logits.amax(-1, keepdim=True)
    _check_finite(highest)
    # The maximum becomes exactly 0 before the division, so that no temperature can overflow it.
    logits.sub_(highest).div_(_column([each.temperature for each in params], logits))
    bounds = torch.full_like(highest, -math.inf)
    top_k = [i for i, each in enumerate(params) if each.top_k > 0]
    top_p = [i for i, each in enumerate(params) if each.top_k == 0 and each.top_p < 1]
    for group in (top_k, top_p):
        if group:
            bounds[group] = _top_k_top_p_bounds(logits[group], [params[i] for i in group])
    min_p = [i for i, each in enumerate(params) if each.min_p > 0]
    if min_p:
        bounds[min_p] = bounds[min_p].maximum(_column([math.log(params[i].min_p) for i in min_p], logits))
    if top_k or top_p or min_p:
        logits.masked_fill_(logits < bounds, -math.inf)


def _check_finite(highest: Tensor) -> None:
    if not highest.isfinite().all():
        raise KvLLMError("the model's logits are not finite: check its weights, or use a dtype with a wider range")


def _top_k_top_p_bounds(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """The smallest logit [r, 1] in the top-p set (Holtzman et al. 2020, arXiv 1904.09751) of the top-k tokens."""
    vocab = logits.shape[-1]
    top_k = [min(each.top_k, vocab) or vocab for each in params]
    descending = _largest(logits, max(top_k))
    weights = _weights(descending)
    ranks = torch.arange(max(top_k), device=logits.device)
    weights.masked_fill_(ranks >= torch.tensor(top_k, device=logits.device).unsqueeze(-1), 0)
    cumulative = weights.cumsum_(-1)
    needed = cumulative[:, -1:] * _column([each.top_p for each in params], cumulative)
    return descending.gather(-1, torch.searchsorted(cumulative, needed))


def _largest(logits: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row [r, V], in descending order."""
    if logits.device.type == "cpu":
        # NumPy's vectorized sort takes a tenth of the time of torch's, and no more than its topk.
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)[:, -count:]).flip(-1)
    return logits.topk(count).values if count <= 1024 else logits.sort(-1, descending=True).values[:, :count]


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


def _report(logits: Tensor, token_id: int, count: int) -> SampledToken:
    """The token with its log probability and rank, and the `count` most likely tokens. logits: [V], untouched ones."""
    top = logits.topk(count).indices.tolist()
    # Summed in float64, reported in float32: the order of summation does not show.
    values = logits.double()
    values = (values[[token_id, *top]] - values.logsumexp(-1)).float().tolist()
    rank = int((logits > logits[token_id]).sum()) + 1
    return SampledToken(token_id, logprob=values[0], rank=rank, top_logprobs=list(zip(top, values[1:], strict=True)))
