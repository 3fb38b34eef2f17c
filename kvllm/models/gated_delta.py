"""A short convolution, and the gated delta rule, over the states of sequences.

The rule (Gated Delta Networks, Yang et al. 2024, equation 10): with a state S `[key_dim, value_dim]` of each head, a
token with query q, key k, value v, decay g <= 0 and strength b changes it and reads it:

    S <- exp(g) S;  S <- S + k (b (v - k S));  o = q S

CPU tensors go to the compiled operators, CUDA tensors to the Triton kernels if Triton is installed, all others to the
plain torch functions at the end of this file, which define the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F

from kvllm._extension import operator
from kvllm.kvcache.recurrent import RecurrentStep

EPS = 1e-6
SMALLEST = torch.finfo(torch.float32).tiny
CHUNK = 64
"""Tokens of a text that torch computes together where there are more."""


@cache
def _implementation(name: str, device: str) -> Callable[..., torch.Tensor]:
    """The function `name` for tensors on a type of device."""
    if device == "cpu":
        return operator(name)
    if device == "cuda" and find_spec("triton"):
        return getattr(import_module("kvllm.kernels.gated_delta"), name)
    return globals()[f"torch_{name}"]


def convolve(
    x: torch.Tensor, taps: torch.Tensor, step: RecurrentStep, layer: int, *, silu: bool = True
) -> torch.Tensor:
    """Each channel's last inputs times the taps, then perhaps SiLU: `[T, channels]` -> the same, contiguous.

    taps: `[taps, channels]`, that of the newest token last. layer: among the recurrent ones.
    """
    if step.changes:
        step.changes.note(lambda again, x: convolve(x, taps, again, layer, silu=silu), x)
    run = _implementation("short_convolution", x.device.type)
    return run(x, taps, step.states.inputs[layer], step.query_start_loc, step.slots, silu)


def gated_delta_rule(
    mixed: torch.Tensor, decays: torch.Tensor, strengths: torch.Tensor, key_heads: int, step: RecurrentStep, layer: int
) -> torch.Tensor:
    """What the query tokens read, `[T, heads, value_dim]` of the dtype of `mixed`. States are changed in place.

    mixed: `[T, ...]`, queries and keys of all key heads, then the values of all heads. Each key head is that of equally
        many heads. Queries and keys are scaled to length 1 here, and queries by `key_dim ** -0.5`.
    decays: g, float32 `[T, heads]`. strengths: b, the same.
    """
    if step.changes:

        def change(again: RecurrentStep, mixed: torch.Tensor, decays: torch.Tensor, strengths: torch.Tensor) -> None:
            gated_delta_rule(mixed, decays, strengths, key_heads, again, layer)

        step.changes.note(change, mixed, decays, strengths)
    run = _implementation("gated_delta_rule", mixed.device.type)
    states = step.states.states[layer]
    return run(mixed, decays.exp(), strengths, states, step.query_start_loc, step.slots, key_heads)


def _sequences(query_start_loc: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Slot, first query token, and the one after the last, of each sequence that has some."""
    for slot, (begin, end) in zip(slots.tolist(), pairwise(query_start_loc.tolist()), strict=True):
        if begin < end:
            yield slot, begin, end


def torch_short_convolution(
    x: torch.Tensor,
    taps: torch.Tensor,
    inputs: torch.Tensor,
    query_start_loc: torch.Tensor,
    slots: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    out = torch.empty_like(x)
    for slot, begin, end in _sequences(query_start_loc, slots):
        known = torch.cat((inputs[slot], x[begin:end]))
        inputs[slot] = known[end - begin :]
        sums = F.conv1d(known.T, taps.T.unsqueeze(1), groups=taps.shape[1]).T
        out[begin:end] = F.silu(sums) if silu else sums
    return out


def torch_gated_delta_rule(
    mixed: torch.Tensor,
    factors: torch.Tensor,
    strengths: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    slots: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """factors: `exp(g)`. states: float32 `[slots, heads, key_dim, value_dim]`."""
    heads, key_dim, value_dim = states.shape[1:]
    queries, keys, values = mixed.float().split([key_heads * key_dim] * 2 + [heads * value_dim], 1)
    queries, keys = (_of_heads(each, key_heads, heads // key_heads) for each in (queries, keys))
    values = values.unflatten(1, (heads, value_dim)).transpose(0, 1)
    decays, strengths = factors.clamp_min(SMALLEST).log().T, strengths.T  # the logarithm of 0 makes differences NaN
    out = mixed.new_empty(len(mixed), heads, value_dim)
    for slot, begin, end in _sequences(query_start_loc, slots):
        for first in range(begin, end, CHUNK):
            rows = slice(first, min(end, first + CHUNK))
            inputs = (each[:, rows] for each in (queries * key_dim**-0.5, keys, values, decays, strengths))
            out[rows] = _chunk(states[slot], *inputs).transpose(0, 1)
    return out


def _of_heads(vectors: torch.Tensor, key_heads: int, repeats: int) -> torch.Tensor:
    """`[T, key_heads * key_dim]` -> `[key_heads * repeats, T, key_dim]`, of length 1."""
    of_heads = vectors.unflatten(1, (key_heads, -1)).repeat_interleave(repeats, 1).transpose(0, 1)
    return of_heads * torch.rsqrt(of_heads.square().sum(-1, keepdim=True) + EPS)


def _chunk(
    state: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    strengths: torch.Tensor,
) -> torch.Tensor:
    """A few tokens at once, by the WY form of their changes (the same paper, section 3.3): `[heads, C, value_dim]`.

    state: float32 `[heads, key_dim, value_dim]`, changed in place. The others: `[heads, C, ...]`.
    """
    total = decays.cumsum(1)
    # The decay between each token and each one before it. What is masked could overflow.
    between = (total[:, :, None] - total[:, None]).tril().exp().tril()
    strong = keys * strengths[..., None]
    system = strong @ keys.transpose(1, 2) * between
    seen = total.exp()[..., None]
    changes = values * strengths[..., None] - (strong * seen) @ state
    changes = torch.linalg.solve_triangular(system, changes, upper=False, unitriangular=True)
    out = (queries * seen) @ state + (queries @ keys.transpose(1, 2) * between) @ changes
    left = (total[:, -1:] - total).exp()[..., None]
    state.mul_(total[:, -1].exp()[:, None, None]).add_((keys * left).transpose(1, 2) @ changes)
    return out
