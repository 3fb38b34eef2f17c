"""The operators of recurrent layers, and the plain functions that define them."""

from __future__ import annotations

import pytest
import torch

from kvllm._extension import operator
from kvllm.models import gated_delta
from tests.helpers.recurrent_checks import assert_all, tables
from tests.helpers.tensors import randn


def test_plain_functions_are_transformers() -> None:
    assert_all(gated_delta.torch_short_convolution, gated_delta.torch_gated_delta_rule)


def test_wrong_arguments_are_refused() -> None:
    starts, slots = tables()
    x, taps, inputs = randn(75, 8), randn(4, 8), randn(7, 3, 8)
    convolve, rule = operator("short_convolution"), operator("gated_delta_rule")
    mixed, controls, states = randn(75, 2 * 4 + 2 * 6), randn(75, 2), randn(7, 2, 4, 6)
    wrong = {
        "query_start_loc covers tokens 0 to 75, not 0 to 74": lambda: convolve(
            x[:74], taps, inputs, starts, slots, True
        ),
        "slot 7 of sequence 0 is not among the 7": lambda: convolve(x, taps, inputs, starts, slots + 3, True),
        "dimension 1 of inputs is 3, not 2": lambda: convolve(x, taps[1:], inputs, starts, slots, True),
        "inputs has dtype BFloat16": lambda: convolve(x, taps, inputs.bfloat16(), starts, slots, True),
        "2 heads do not share 3 key heads": lambda: rule(mixed, controls, controls, states, starts, slots, 3),
        "dimension 1 of mixed is 20, not 28": lambda: rule(mixed, controls, controls, states, starts, slots, 2),
        "dimension 0 of decays is 74": lambda: rule(mixed, controls[1:], controls, states, starts, slots, 1),
        "states has dtype BFloat16": lambda: rule(mixed, controls, controls, states.bfloat16(), starts, slots, 1),
    }
    for message, call in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            call()
    for order in (starts.flip(0), torch.tensor([0, 70, 1, 71, 74, 75]).int()):
        with pytest.raises(RuntimeError, match="query_start_loc"):
            convolve(x, taps, inputs, order, slots, True)
