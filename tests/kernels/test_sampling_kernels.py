"""The kernels that mask and choose tokens give what the functions for CPUs do, in Triton's interpreter."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm.sampling_params import SamplingParams
from kvllm.worker import draws
from kvllm.worker.mask import restrict
from kvllm.worker.sample_row import SampleRow
from tests.helpers.processes import run_python
from tests.helpers.strict_interpreter import print_failures

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

UNIFORMS = st.one_of(st.floats(1e-15, 1 - 2**-53), st.sampled_from([2.0**-53, 1 - 2**-53]))
OPTIONS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"temperature": st.sampled_from([1e-5, 0.3, 1.0, 7.0, 1e6])},
    optional={
        "top_k": st.integers(1, 400),
        "top_p": st.sampled_from([1e-300, 0.05, 0.5, 0.9, 0.999, 1 - 1e-16]),
        "min_p": st.sampled_from([1e-300, 0.01, 0.5, 1.0]),
    },
)


def expected_tokens(logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    """By the functions for CPUs, with the exponential function that Triton's interpreter has."""

    def weights(logits: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.exp(logits.numpy())).mul_(draws.RESOLUTION).round_().double()

    with patch.object(draws, "_weights", weights):
        return draws.choose(logits.float(), list(range(len(logits))), params, uniforms).tolist()


def found_tokens(
    logits: torch.Tensor, rows: list[int], params: list[SamplingParams], uniforms: list[float]
) -> list[int]:
    with patch.object(draws, "reads_in_place", lambda logits: True):
        return draws.choose(logits, rows, params, uniforms).tolist()


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(
    data=st.data(),
    vocab=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 40.0]),
    levels=st.sampled_from([1, 8, 1 << 20]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def check_draws(data: st.DataObject, vocab: int, seed: int, spread: float, levels: int, dtype: torch.dtype) -> None:
    """levels: of which logits are multiples, so that few make ties."""
    from kvllm.kernels import sampling

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * spread
    logits = ((logits * levels).round() / levels).to(dtype)
    impossible = torch.rand(3, vocab, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    impossible[range(3), torch.randint(vocab, (3,), generator=generator)] = False
    logits[impossible] = -math.inf
    rows = data.draw(st.sampled_from([[0, 1, 2], [2], [2, 0]]))
    params = [SamplingParams(**data.draw(OPTIONS)) for _ in rows]
    uniforms = [data.draw(UNIFORMS) for _ in rows]
    with patch.multiple(sampling, _MAX_SPLITS=data.draw(st.sampled_from([1, 2])), _TILE=64, _SEARCH_TILE=64):
        assert found_tokens(logits, rows, params, uniforms) == expected_tokens(logits[rows], params, uniforms)


def check_many_draws() -> None:
    """Of a wide vocabulary as it is shared out on a device: of close logits, of few distinct ones, of one that is all;
    each row alone, too."""
    vocab = 2 * 1024 * 3 + 5
    logits = (
        torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 1e-4, 3, 100])[:, None]
    )
    logits[2] = logits[2].round()
    params = [
        SamplingParams(top_p=0.95, temperature=0.6),
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=50),
        SamplingParams(min_p=0.1),
    ]
    uniforms = [0.7, 0.2, 0.99, 0.5]
    expected = expected_tokens(logits.clone(), params, uniforms)
    assert found_tokens(logits, [0, 1, 2, 3], params, uniforms) == expected
    assert found_tokens(logits, [1], params[1:2], uniforms[1:2]) == expected[1:2]


def check_most_likely() -> None:
    """The first of equal ones, in whichever span, and none where a logit is NaN or the largest is infinite."""
    from kvllm.kernels import sampling

    logits = torch.full((7, 3000), -2.0)
    logits[0, [5, 2900]] = 1.0
    logits[1, 2999] = -1.0
    logits[2, [1100, 1024, 2048]] = 3.0
    logits[3, 2500] = math.nan
    logits[4, 1] = math.inf
    logits[5] = -math.inf
    logits[6, :-1] = -math.inf
    expected = [5, 2999, 1024, -1, -1, -1, 2999]
    with patch.object(draws, "reads_in_place", lambda logits: True):
        assert draws.most_likely(logits).tolist() == draws.most_likely(logits.half()).tolist() == expected
        assert sampling.Maxima.of(logits).values.shape == (7, 4)
    params = [SamplingParams(temperature=0), SamplingParams()] * 3 + [SamplingParams(temperature=0)]
    assert found_tokens(logits, list(range(7)), params, [0.5] * 7)[2:] == [1024, -1, -1, -1, 2999]


def check_masks(device: str = "cpu") -> None:
    """Rows anywhere among others, of vocabularies whose last word, and whose last tile, is not full."""
    from kvllm.kernels import token_masks

    generator = torch.Generator().manual_seed(0)
    for vocab in (1, 31, 32, 33, 200, 641):
        logits, words = torch.zeros(5, 2 * vocab, device=device)[:, :vocab], -(-vocab // 32)
        allowed = torch.rand(3, vocab, generator=generator) < 0.5
        packed = np.zeros((3, 32 * words), dtype=bool)
        packed[:, :vocab] = allowed
        bits = torch.from_numpy(np.packbits(packed, axis=1, bitorder="little").view(np.int32))
        expected = torch.zeros(5, vocab)
        expected[[4, 0, 2]] = expected[[4, 0, 2]].masked_fill(~allowed, -math.inf)
        with patch.object(token_masks, "_TILE", 64):
            token_masks.forbid_others(logits, torch.tensor([4, 0, 2], device=device), bits.to(device))
        assert torch.equal(logits.cpu(), expected) and not logits._base[:, vocab:].any()


CHECKS = {check.__name__: check for check in (check_draws, check_many_draws, check_most_likely, check_masks)}


def run_checks() -> None:
    print_failures(CHECKS)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_python("run_checks()", __name__, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", CHECKS)
def test_in_the_interpreter(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


@pytest.mark.gpu
def test_masks_on_cuda() -> None:
    """The kernel, and rows with lists and bad words, whose masks are uploaded beside a product that takes long."""
    check_masks("cuda")
    logits = torch.randn(3, 151936, generator=torch.Generator().manual_seed(0))
    options = [{"allowed_token_ids": [3, 151935]}, {}, {"allowed_token_ids": [5, 7], "bad_words_token_ids": [[5]]}]
    rows = [SampleRow(SamplingParams(**each), 0, [], []) for each in options]
    on_device, expected = logits.cuda(), logits.clone()
    busy = torch.ones(8192, 8192, device="cuda")
    for _ in range(20):
        busy = busy @ busy * 0
    restrict(on_device, rows)
    restrict(expected, rows)
    assert torch.equal(on_device.cpu(), expected)
