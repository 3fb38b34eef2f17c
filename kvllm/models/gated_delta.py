"""The gated delta rule over the states of sequences (Gated Delta Networks, Yang et al. 2024, equation 10).

With a state S `[key_dim, value_dim]` of each head, a token with query q, key k, value v, decay g <= 0 and strength b
changes it and reads it:

    S <- exp(g) S;  S <- S + k (b (v - k S));  o = q S

CPU tensors go to the compiled operator, CUDA tensors to the Triton kernel if Triton is installed, all others to the
plain torch functions at the end of this file, which define the results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvllm.kvcache.recurrent import RecurrentStep

EPS = 1e-6

CHUNK = 64
"""Tokens of a text that are computed together where there are more."""


class Mixed(NamedTuple):
    """Of all query tokens: queries, keys `[T, key_heads, key_dim]`, values `[T, heads, value_dim]`; decays and
    strengths, float32 `[T, heads]`."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    strengths: torch.Tensor

    def rows(self, begin: int, end: int) -> Mixed:
        return Mixed(*(each[begin:end] for each in self))


def convolve(x: torch.Tensor, weight: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
    """The convolution of each channel over its last tokens, then SiLU: `[T, channels]` -> the same.

    weight: `[channels, taps]`, that of the newest token last.
    """
    inputs = step.states.inputs[layer]
    out, begin = torch.empty_like(x), 0
    for slot, count in _sequences(step):
        end = begin + count
        known = torch.cat((inputs[slot], x[begin:end]))
        inputs[slot] = known[count:]
        out[begin:end] = F.silu(F.conv1d(known.T, weight.unsqueeze(1), groups=len(weight)).T)
        begin = end
    return out


def gated_delta_rule(mixed: Mixed, step: RecurrentStep, layer: int) -> torch.Tensor:
    """What all query tokens read, `[T, heads, value_dim]` of the dtype of the values; states are changed in place."""
    states = step.states.states[layer]
    out, begin = torch.empty_like(mixed.values), 0
    for slot, count in _sequences(step):
        state, end = states[slot], begin + count
        for first in range(begin, end, CHUNK):
            last = min(end, first + CHUNK)
            out[first:last] = _chunk(_prepared(mixed.rows(first, last)), state)
        begin = end
    return out


def _sequences(step: RecurrentStep) -> list[tuple[int, int]]:
    """Slot and number of query tokens of each."""
    return list(zip(step.slots.tolist(), step.num_tokens, strict=True))


def _prepared(mixed: Mixed) -> Mixed:
    """In float32, heads first, one query and key for each value head, of length 1; queries are scaled, too."""
    repeats = mixed.values.shape[1] // mixed.keys.shape[1]
    queries, keys = (_normalized(each.float()).repeat_interleave(repeats, 1) for each in (mixed.queries, mixed.keys))
    found = (queries * mixed.keys.shape[-1] ** -0.5, keys, mixed.values.float(), mixed.decays, mixed.strengths)
    return Mixed(*(each.transpose(0, 1) for each in found))


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _chunk(mixed: Mixed, state: torch.Tensor) -> torch.Tensor:
    """A few tokens at once, by the WY form of their changes (the same paper, section 3.3), `[C, heads, value_dim]`.

    mixed: as `_prepared` makes it. state: float32 `[heads, key_dim, value_dim]`, changed in place.
    """
    queries, keys, values, decays, strengths = mixed
    total = decays.cumsum(1)
    # The decay between each token and each one before it. What is masked could overflow.
    between = (total[:, :, None] - total[:, None]).tril().exp().tril()
    strong = keys * strengths[..., None]
    system = (strong @ keys.transpose(1, 2) * between).tril(-1)
    seen = total.exp()[..., None]
    changes = values * strengths[..., None] - (strong * seen) @ state
    changes = torch.linalg.solve_triangular(system, changes, upper=False, unitriangular=True)
    out = (queries * seen) @ state + (queries @ keys.transpose(1, 2) * between) @ changes
    left = (total[:, -1:] - total).exp()[..., None]
    state.mul_(total[:, -1].exp()[:, None, None]).add_((keys * left).transpose(1, 2) @ changes)
    return out.transpose(0, 1)
