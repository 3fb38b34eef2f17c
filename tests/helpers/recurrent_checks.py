"""The convolution and the gated delta rule of any implementation against transformers' modules, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from tests.helpers.tensors import randn

SEQUENCES = (1, 70, 0, 3, 1)
"""Query tokens of each."""
SLOTS = (4, 0, 2, 5, 1)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def tables(lengths: Sequence[int] = SEQUENCES) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(SLOTS).int()


def assert_convolves(
    run: Callable[..., torch.Tensor], channels: int, taps: int, dtype: torch.dtype, *, silu: bool = True
) -> None:
    """Rows may be apart; the last inputs stay for the next tokens, and nobody else's change."""
    starts, slots = tables()
    x = randn(sum(SEQUENCES), channels + 5, dtype=dtype)[:, :channels]
    weight, inputs = randn(taps, channels, dtype=dtype, seed=1), randn(7, taps - 1, channels, dtype=dtype, seed=2)
    held = inputs.clone()
    out = run(x, weight, inputs, starts, slots, silu)
    assert out.dtype == dtype and out.is_contiguous()
    for sequence, slot in enumerate(SLOTS):
        begin, end = starts[sequence : sequence + 2].tolist()
        known = torch.cat((held[slot], x[begin:end]))
        assert torch.equal(inputs[slot], known[end - begin :])
        sums = [(known[i : i + taps].double() * weight.double()).sum(0) for i in range(end - begin)]
        expected = torch.stack([*sums, torch.zeros(channels).double()])[:-1]
        expected = torch.nn.functional.silu(expected) if silu else expected
        torch.testing.assert_close(out[begin:end].double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    others = [slot for slot in range(7) if slot not in SLOTS]
    assert torch.equal(inputs[others], held[others])


def assert_follows_rule(
    run: Callable[..., torch.Tensor],
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    lengths: Sequence[int] = SEQUENCES,
) -> None:
    """One call is as good as two with the tokens shared out, or as transformers' loop over the tokens."""
    starts, slots = tables(lengths)
    tokens = sum(lengths)
    mixed = randn(tokens, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype)
    decays, strengths = -randn(tokens, heads, seed=1).exp(), randn(tokens, heads, seed=2).sigmoid()
    decays[2::7] = -200  # after which nothing is left, in float32
    states = randn(7, heads, key_dim, value_dim, seed=3)
    held = states.clone()
    out = run(mixed, decays.exp(), strengths, states, starts, slots, key_heads)
    assert out.dtype == dtype and out.shape == (tokens, heads, value_dim)
    sizes = [key_heads * key_dim] * 2 + [heads * value_dim]
    queries, keys, values = (
        part.float().unflatten(1, (count, -1))[None]
        for part, count in zip(mixed.split(sizes, 1), (key_heads, key_heads, heads), strict=True)
    )
    for sequence, slot in enumerate(SLOTS):
        rows = slice(*starts[sequence : sequence + 2].tolist())
        expected, state = theirs.torch_recurrent_gated_delta_rule(
            queries[:, rows],
            keys[:, rows],
            values[:, rows],
            decays[None, rows],
            strengths[None, rows],
            initial_state=held[slot][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(out[rows].float(), expected[0], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(states[slot], state[0], atol=2e-5, rtol=2e-5)
    assert torch.equal(states[6], held[6])


def assert_all(convolve: Callable[..., torch.Tensor], rule: Callable[..., torch.Tensor]) -> None:
    """Sizes that fill vectors, and that do not."""
    for dtype in (torch.float32, torch.bfloat16):
        for channels, taps, silu in ((300, 4, True), (7, 2, True), (48, 3, False)):
            assert_convolves(convolve, channels, taps, dtype, silu=silu)
        for sizes in ((2, 4, 16, 72), (1, 3, 8, 12), (2, 2, 128, 128)):
            assert_follows_rule(rule, *sizes, dtype)
