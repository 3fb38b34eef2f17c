"""Which tokens of drafts are right: those that the model would have sampled, one after the other.

A token that is sampled depends on its row's logits, its request's options, its seed and the tokens before it alone
(`kvllm.worker.sampler`). So the tokens of a sequence with drafts are those without, at every temperature, and no token
has to be rejected by another random number as where drafts are random themselves (Leviathan et al. 2023, arXiv
2211.17192): for a draft that is a single token, both accept it with its probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kvllm.core.protocol import SampledToken
from kvllm.worker import draws
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.sampler import SampleRows, Samples, sample


def verify(logits: torch.Tensor, rows: Sequence[SampleRow], drafts: Sequence[list[int]]) -> list[list[SampledToken]]:
    """The right tokens of each draft, and the token that is sampled after them.

    logits: `[sum of 1 + each draft's length, V]`, of the token before a draft and those of the draft, one sequence
        after the other.
    rows: of the sequences. Their outputs grow meanwhile, and are as before at the end.
    """
    begins = [0]
    for draft in drafts:
        begins.append(begins[-1] + 1 + len(draft))
    of_all = SampleRows(list(rows))
    if of_all.is_plain:
        samples = Samples(draws.most_likely(logits), [], {}, logits.shape[-1]).tokens()
        ends = zip(pairwise(begins), drafts, strict=True)
        return [_until_wrong(samples[begin:end], draft) for (begin, end), draft in ends]
    found: list[list[SampledToken]] = [[] for _ in rows]
    going_on, depth = list(range(len(rows))), 0
    while going_on:
        of_depth = logits[torch.tensor([begins[i] + depth for i in going_on], device=logits.device)]
        samples = sample(of_depth, SampleRows([rows[i] for i in going_on])).tokens()
        for i, token in zip(going_on, samples, strict=True):
            found[i].append(token)
            rows[i].output_token_ids.append(token.token_id)
        going_on = [i for i in going_on if _is_right(found[i][depth], drafts[i], depth)]
        depth += 1
    for row, tokens in zip(rows, found, strict=True):
        del row.output_token_ids[-len(tokens) :]
    return found


def _until_wrong(samples: list[SampledToken], draft: list[int]) -> list[SampledToken]:
    depth = 0
    while _is_right(samples[depth], draft, depth):
        depth += 1
    return samples[: depth + 1]


def _is_right(token: SampledToken, draft: list[int], depth: int) -> bool:
    """Whether a sampled token is that of the draft at its place, and so another one follows."""
    return token.error is None and depth < len(draft) and token.token_id == draft[depth]
