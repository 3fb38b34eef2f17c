"""The linear scorer: its map against a ridge regression that is written out in float64, and when it takes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvllm.compression.linear_fit import FORGET, RIDGE, LinearFit
from kvllm.compression.methods import kara_sharp, keydiff, linear_scorer
from kvllm.worker.features.linear_fits import LinearFits
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import greedy, make_llm, random_prompts, random_token_ids, tokens
from tests.helpers.features import feature_of
from tests.helpers.literal_kara import literal_token2chunk
from tests.helpers.literal_methods import best, halves, pairs

LENGTH, RETAIN, BUFFER, HEADS, KV_HEADS, WIDTH = 46, 21, 6, 4, 2, 8
FREQUENCIES = 100.0 ** -torch.linspace(0, 1, WIDTH // 2 + 1)[:-1]


def windows_of(seed: int, count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "queries": torch.randn(count, HEADS, LENGTH, WIDTH, generator=generator) * 2,
        "keys": torch.randn(count, KV_HEADS, LENGTH, WIDTH, generator=generator),
        "value_norms": torch.rand(count, KV_HEADS, LENGTH, generator=generator),
        "last_positions": [LENGTH - 1 + 7 * i for i in range(count)],
    }


def select(windows: dict[str, Any], fits: list[LinearFit]) -> torch.Tensor:
    return linear_scorer.select(
        **windows,
        retain=RETAIN,
        buffer=BUFFER,
        chunk_budget=6,
        max_chunk=5,
        query_offsets=torch.arange(LENGTH),
        frequencies=FREQUENCIES,
        fits=fits,
    )


def some(windows: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: None if each is None else each[rows] for name, each in windows.items()}


def literal_features(windows: dict[str, Any], window: int, head: int) -> np.ndarray:
    """`[KV pairs in front of the buffer, features]` in float64, rotations taken back by complex numbers."""
    keys = windows["keys"][window, head].double().numpy()
    positions = windows["last_positions"][window] - LENGTH + 1 + np.arange(LENGTH)
    turned = pairs(keys) * np.exp(-1j * np.outer(positions, FREQUENCIES.double().numpy()))
    lengths, places = windows["value_norms"][window, head].double().numpy(), np.arange(LENGTH) / (LENGTH - 1)
    rows = np.column_stack((halves(turned), abs(turned), lengths, places))
    return rows[: LENGTH - BUFFER]


def literal_weights(windows: dict[str, Any], head: int, count: int, forget: float = FORGET) -> np.ndarray:
    """Least squares over standardized features, with rows that draw each weight to 0. Earlier windows count less."""
    offsets = torch.arange(LENGTH)
    scores = kara_sharp.scores(windows["queries"].double(), windows["keys"].double(), BUFFER, offsets)
    targets = scores[:count, head].double().numpy().ravel()
    rows = np.concatenate([literal_features(windows, window, head) for window in range(count)])
    counts = np.repeat((1 - forget) ** np.arange(count - 1.0, -1, -1), LENGTH - BUFFER)
    means = np.average(rows, axis=0, weights=counts)
    deviations = np.sqrt(np.average((rows - means) ** 2, axis=0, weights=counts))
    standard = np.sqrt(counts)[:, None] * (rows - means) / deviations
    drawn = np.sqrt(RIDGE * counts.sum()) * np.eye(rows.shape[1])
    centred = np.sqrt(counts) * (targets - np.average(targets, weights=counts))
    found = np.linalg.lstsq(np.concatenate((standard, drawn)), np.concatenate((centred, np.zeros(rows.shape[1]))))[0]
    return found / deviations


def test_the_map_is_a_ridge_regression_that_forgets() -> None:
    windows, fit = windows_of(0, 20), LinearFit()
    select(windows, [fit])
    assert fit.weights is not None and fit.weights.shape == (KV_HEADS, linear_scorer.num_features(WIDTH))
    for head in range(KV_HEADS):
        expected = literal_weights(windows, head, 20)
        np.testing.assert_allclose(fit.weights[head].numpy(), expected, rtol=2e-3, atol=1e-5)
        assert abs(literal_weights(windows, head, 20, forget=0) - expected).max() > 1e-2


def test_a_map_follows_windows_of_another_kind() -> None:
    """What a feature is worth changes its sign, and 64 windows later the map says so."""
    fit, generator = LinearFit(), torch.Generator().manual_seed(0)
    features = torch.randn(128, 1, 20, 1, generator=generator)
    fit.add(features[:64], features[:64, ..., 0])
    assert fit.weights is not None and fit.weights.item() > 0.9
    fit.add(features[64:], -features[64:, ..., 0])
    assert fit.weights.item() < -0.6


def test_windows_may_come_one_by_one() -> None:
    windows, together, alone = windows_of(1, 6), LinearFit(), LinearFit()
    select(windows, [together])
    for i in range(6):
        select(some(windows, slice(i, i + 1)), [alone])
    assert alone.weights is not None and together.weights is not None
    assert torch.equal(alone.weights, together.weights)


def test_windows_are_chosen_by_what_they_have_just_taught() -> None:
    """Three windows, and these without their queries."""
    windows, fit = windows_of(2, 3), LinearFit()
    kept = select(windows, [fit])
    assert torch.equal(select(windows | {"queries": None}, [fit]), kept)
    weights = fit.weights
    assert weights is not None
    for head in range(KV_HEADS):
        np.testing.assert_allclose(weights[head].numpy(), literal_weights(windows, head, 3), rtol=2e-3, atol=1e-5)


def test_without_queries_it_keeps_what_the_map_scores_highest() -> None:
    """In two layers at once, of which each has a map of its own; a quarter goes to distinct keys."""
    fits = [LinearFit(), LinearFit()]
    for seed, fit in enumerate(fits):
        select(windows_of(seed, 5), [fit])
    windows = windows_of(5, 4) | {"queries": None, "last_positions": [60, 81] * 2}
    kept, total = select(windows, fits), RETAIN - BUFFER
    for window in range(4):
        weights = fits[window // 2].weights
        assert weights is not None
        unlike = keydiff.scores(windows["keys"][window : window + 1])[0, :, : LENGTH - BUFFER].tolist()
        for head in range(KV_HEADS):
            scores = literal_features(windows, window, head) @ weights[head].double().numpy()
            scores[best(np.array(unlike[head]), total // 4)] = scores.max()
            expected = literal_token2chunk(scores.astype(np.float32), total, 6, 5)
            assert kept[window, head, :total].tolist() == expected
    alone = select(some(windows, slice(2, 3)), fits[1:])
    assert torch.equal(alone[0], kept[2])


def test_a_feature_that_never_varies_counts_nothing() -> None:
    fit, generator = LinearFit(), torch.Generator().manual_seed(0)
    features = torch.randn(2, 1, 30, 3, generator=generator)
    features[..., 1] = 7
    fit.add(features, 2 * features[..., 0] - features[..., 2])
    assert fit.weights is not None
    torch.testing.assert_close(fit.weights, torch.tensor([[2.0, 0, -1]]), rtol=0, atol=0.01)


# In the engine


checkpoint = checkpoint_fixture("qwen3", head_dim=16)


def test_queries_are_computed_again_for_the_first_windows_and_one_in_32(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for as many first ones after what a failed step may have left behind."""
    compression = paper_compression(method="linear_scorer", period=8, window_blocks=3, buffer=4, chunk_budget=4)
    llm = make_llm(checkpoint, block_size=8, compression=compression)
    runner = llm.llm_engine.executor.runner
    passes, recompute = list[int](), runner.model.recompute_queries
    runner.model.recompute_queries = lambda token_ids, *args: (
        passes.append(len(token_ids) // 24) or recompute(token_ids, *args)
    )
    tokens(llm, random_prompts(256, (3, 17, 30)), greedy(120))
    assert 8 < llm.stats().windows_compressed < 8 + 31 and sum(passes) == 8
    assert [fit.windows for fit in feature_of(runner, LinearFits).fits] == [8] * 3
    while llm.stats().windows_compressed < 80:
        tokens(llm, random_prompts(256, (3, 17)), greedy(120))
    seen = sum(passes)
    assert seen == 8 + -(-(llm.stats().windows_compressed - 39) // 32)
    llm.llm_engine.add_request("failing", random_token_ids(3)[0], greedy(5))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(runner.model, "forward", lambda *_: 1 / 0)
        llm.llm_engine.step()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    tokens(llm, random_prompts(256, (3, 17, 30)), greedy(120))
    assert sum(passes) >= seen + 8


def test_what_it_learns_from_counts_as_memory_of_the_cache(checkpoint: Path) -> None:
    """Three layers and two KV heads; 16 channels, 8 pairs of them, two lengths, and the target and a constant."""
    llm = make_llm(checkpoint, compression=paper_compression(method="linear_scorer", buffer=4))
    assert llm.stats().method_state_bytes == 3 * 2 * 28**2 * 8
