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
from kvllm.worker.sampler import SampleRows, Samples, sample
from kvllm.worker.transfer import to_device


def verify(
    logits: torch.Tensor, of_all: SampleRows, drafts: Sequence[list[int]], most_likely: torch.Tensor | None = None
) -> list[list[SampledToken]]:
    """The right tokens of each draft, and the token that is sampled after them.

    logits: `[sum of 1 + each draft's length, V]`, of the token before a draft and those of the draft, one sequence
        after the other.
    of_all: rows of the sequences. Their outputs grow meanwhile, and are as before at the end.
    most_likely: int64, of each row of logits, if it is known already. If all rows are plain, no others are read then.
    """
    rows, begins = of_all.all, [0]
    for draft in drafts:
        begins.append(begins[-1] + 1 + len(draft))
    # A GPU samples after wrong tokens, too: that takes less time than to wait for each token.
    at_once = logits.is_cuda and not any(row.reads_output for row in rows)
    if of_all.is_plain or at_once:
        if of_all.is_plain:
            chosen = draws.most_likely(logits) if most_likely is None else most_likely
            samples = Samples(chosen, [], {}, logits.shape[-1])
        else:
            pairs = zip(rows, drafts, strict=True)
            after = [row.branch(draft[:depth]) for row, draft in pairs for depth in range(len(draft) + 1)]
            samples = sample(logits, SampleRows(after), most_likely)
        tokens, ends = samples.tokens(), zip(pairwise(begins), drafts, strict=True)
        return [_until_wrong(tokens[begin:end], draft) for (begin, end), draft in ends]
    found: list[list[SampledToken]] = [[] for _ in rows]
    going_on, depth = list(range(len(rows))), 0
    while going_on:
        of_depth = logits[to_device([begins[i] + depth for i in going_on], logits.device)]
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
