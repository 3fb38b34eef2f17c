"""Logits to tokens by temperature, top-k, top-p and min-p: the most likely tokens, and draws.

Two implementations: the functions here, and kernels for GPUs that read logits where they are.

- Probabilities are rounded to whole multiples of 2**-34 of the largest one. Sums of integers below 2**53 are exact in
  float64, so cumulative sums do not depend on the order in which a device adds (for vocabularies up to 2**19).
- Each filter is a lower bound on the logit. Tokens of equal logit stay or go together, however a sort orders them.

Filters apply in the order top-k, top-p, min-p, each to what the one before has left, as in transformers.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from kvllm._extension import operator
from kvllm.sampling_params import SamplingParams
from kvllm.worker.transfer import to_device

RESOLUTION = 2.0**34
NO_TOKEN = -1
"""In place of a token, where the logits allow none: the host finds out once it has the tokens anyway."""


def reads_in_place(logits: Tensor) -> bool:
    """Whether kernels take these logits as they are, of any dtype."""
    return logits.is_cuda and find_spec("triton") is not None


def choose(logits: Tensor, rows: list[int], params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """Tokens of some rows of logits [R, V]: the most likely one where the parameters are greedy, else a draw.

    rows: r of them; unless `reads_in_place`, all of them in order, and `logits` are overwritten. uniforms: a random
    number for each, above 0 and below 1.

    Returns int64 [r], NO_TOKEN for a row without a finite maximum.
    """
    random = [i for i, each in enumerate(params) if not each.greedy]
    if len(random) == len(params):
        return _draw(logits, rows, params, uniforms)
    chosen = most_likely(logits)
    if len(rows) < len(logits):
        chosen = chosen[to_device(rows, logits.device)]
    if random:
        drawn = _draw(logits, [rows[i] for i in random], [params[i] for i in random], [uniforms[i] for i in random])
        chosen[to_device(random, logits.device)] = drawn
    return chosen


def most_likely(logits: Tensor) -> Tensor:
    """Token ids [r], NO_TOKEN for a row without a finite maximum."""
    if reads_in_place(logits):
        from kvllm.kernels.sampling import Maxima

        return Maxima.of(logits).most_likely()
    if logits.device.type == "cpu":
        return operator("most_likely")(logits)
    highest, chosen = logits.max(-1)  # the maximum of a row with a NaN is a NaN
    return chosen.masked_fill_(~highest.isfinite(), NO_TOKEN)


def _draw(logits: Tensor, rows: list[int], params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """One draw for each of some rows, by the inverse of its cumulative distribution in token order."""
    if reads_in_place(logits):
        return _draw_in_place(logits, rows, params, uniforms)
    if len(rows) < len(logits):
        logits = logits[to_device(rows, logits.device)]
    highest = filter_logits(logits, params)
    cumulative = _weights(logits).cumsum_(-1)
    total = cumulative[:, -1:]
    # At most total - 1, as a uniform number is at most 1 - 2**-53. So some token's cumulative weight exceeds the
    # target; the first one's own weight is at least 1.
    target = (_column(uniforms, cumulative) * total).floor_()
    drawn = torch.searchsorted(cumulative, target, right=True)
    return drawn.masked_fill_(~highest.isfinite(), NO_TOKEN).squeeze(-1)


def _draw_in_place(logits: Tensor, rows: list[int], params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    from kvllm.kernels.sampling import Maxima, draw

    vocab = logits.shape[-1]
    options = [
        (each.temperature, min(each.top_k, vocab), each.top_p, _log(each.min_p), uniform)
        for each, uniform in zip(params, uniforms, strict=True)
    ]
    return draw(
        logits,
        Maxima.of(logits),
        to_device(rows, logits.device),
        to_device(options, logits.device, torch.float64),
        top_k=any(each.top_k for each in params),
        top_p=any(each.top_p < 1 for each in params),
    )


def _log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf


def _weights(logits: Tensor) -> Tensor:
    """Unnormalized probabilities as whole numbers in float64: `RESOLUTION` for logit 0, the largest. [r, V]."""
    return logits.exp().mul_(RESOLUTION).round_().double()


def filter_logits(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Temperature and filters, in place.

    logits: [r, V]. Becomes relative to the row's largest, which is 0 afterwards; rejected tokens become -inf.

    Returns what was largest, [r, 1]. If that is not finite, the row makes no sense.
    """
    highest = logits.amax(-1, keepdim=True)
    # The maximum becomes exactly 0 before the division, so that no temperature can overflow it.
    logits.sub_(highest).div_(_column([each.temperature for each in params], logits))
    bounds = torch.full_like(highest, -math.inf)
    top_k = [i for i, each in enumerate(params) if each.top_k > 0]
    top_p = [i for i, each in enumerate(params) if each.top_k == 0 and each.top_p < 1]
    for group in (top_k, top_p):
        if group:
            index = to_device(group, logits.device)
            bounds[index] = _top_k_top_p_bounds(logits[index], [params[i] for i in group])
    if any(each.min_p for each in params):
        bounds = bounds.maximum(_column([_log(each.min_p) for each in params], logits))
    if top_k or top_p or any(each.min_p for each in params):
        logits.masked_fill_(logits < bounds, -math.inf)
    return highest


def _top_k_top_p_bounds(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """The smallest logit [r, 1] in the top-p set (Holtzman et al. 2020, arXiv 1904.09751) of the top-k tokens."""
    vocab = logits.shape[-1]
    top_k = [min(each.top_k, vocab) or vocab for each in params]
    descending = _largest(logits, max(top_k))
    weights = _weights(descending)
    ranks = torch.arange(max(top_k), device=logits.device)
    weights.masked_fill_(ranks >= to_device(top_k, logits.device).unsqueeze(-1), 0)
    cumulative = weights.cumsum_(-1)
    needed = cumulative[:, -1:] * _column([each.top_p for each in params], cumulative)
    last = torch.searchsorted(cumulative, needed).clamp_(max=max(top_k) - 1)  # NaN is after all numbers
    return descending.gather(-1, last)


def _largest(logits: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row [r, V], in descending order."""
    if logits.device.type == "cpu":
        # NumPy's vectorized sort takes a tenth of the time of torch's, and no more than its topk.
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)[:, -count:]).flip(-1)
    return logits.topk(count).values if count <= 1024 else logits.sort(-1, descending=True).values[:, :count]


def _column(values: list[float], like: Tensor) -> Tensor:
    return to_device(values, like.device, like.dtype).unsqueeze(-1)
