"""`layer_groups="auto"`: the shares that lose least, by a file beside the checkpoint."""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvllm import LLM, CheckpointError
from kvllm.engine_args import EngineArgs
from kvllm.layer_shares import LAYER_LOSSES_FILE, LayerLosses, convex, propose
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression

SHARES = [0.0, 0.25, 0.5, 0.75, 1.0]
LOSSES = [[9.0, 4.0, 2.0, 1.0, 0.0], [1.0, 0.5, 0.3, 0.1, 0.0], [9.5, 6.0, 3.0, 1.0, 0.0]]
AUTO = paper_compression(method="keydiff", window_blocks=4, retain_blocks=2, buffer=8, layer_groups="auto")


def test_shares_lose_least_of_all_with_the_same_total() -> None:
    found = propose(LayerLosses(SHARES, LOSSES, "", 0), [0, 1, 2], AUTO, 8)

    def loss(blocks: tuple[int, ...]) -> float:
        shares = [(kept * 8 - 8) / 24 for kept in blocks]
        return sum(LayerLosses(SHARES, LOSSES, "", 0).at(layer, share) for layer, share in enumerate(shares))

    others = [blocks for blocks in product(range(1, 5), repeat=3) if sum(blocks) == 6]
    assert sum(found) == 6 and loss(tuple(found)) == min(map(loss, others)) and len(set(found)) > 1


def test_losses_lie_on_lines_between_the_shares() -> None:
    losses = LayerLosses([0.0, 0.1, 1.0], [[8.0, 2.0, 0.0]], "", 0)
    assert [losses.at(0, share) for share in (0, 0.025, 0.1, 0.55, 1)] == pytest.approx([8, 6.5, 2, 1, 0])


def slopes(curve: list[float]) -> list[float]:
    return [(after - before) / 0.25 for before, after in pairwise(curve)]


LISTS = st.lists(st.floats(0, 10), min_size=len(SHARES) - 1, max_size=len(SHARES) - 1)


@given(LISTS)
def test_the_highest_convex_curve_below(losses: list[float]) -> None:
    measured = [*losses, 0.0]
    found = convex(SHARES, measured)
    assert all(low <= high + 1e-9 for low, high in zip(found, measured, strict=True))
    assert all(first <= second + 1e-6 for first, second in pairwise(slopes(found)))
    # It bends only where it touches what was measured, so no convex curve below is higher.
    bends = [i + 1 for i, (first, second) in enumerate(pairwise(slopes(found))) if second - first > 1e-6]
    assert all(found[i] == pytest.approx(measured[i], abs=1e-9) for i in (0, *bends, len(SHARES) - 1))


def test_losses_that_no_text_has_shown_go_on_falling_as_before() -> None:
    shares = [0.0, 0.1, 0.2, 0.4, 1.0]
    rows = [[1.0, 0.1, 0.0, 0.0, 0.0], [1.0, 0.1, 0.05, 0.02, 0.0], [2.0, 1.9, 1.8, 1.6, 0.0]]
    smoothed = LayerLosses(shares, rows, "", 0).smoothed()
    assert smoothed.losses[0] == pytest.approx([1.0, 0.1, 0.01, 0.0001, 0.0])
    assert smoothed.losses[1] == pytest.approx([1.0, 0.1, 0.05, 0.02, 0.0])  # 0.05 falls to 0.02, not to 0.0125
    slow = [2.0, 1.9, 1.805, 1.805 * 0.95**2, 0.0]  # and then faster to 0, which would be no convex curve
    assert smoothed.losses[2] == pytest.approx(convex(shares, slow))


@given(LISTS)
def test_smoothed_losses_are_convex_and_not_below_what_was_measured(losses: list[float]) -> None:
    measured = convex(SHARES, [*sorted(losses, reverse=True), 0.0])
    found = LayerLosses(SHARES, [measured], "", 0).smoothed().losses[0]
    assert all(high >= low - 1e-9 for high, low in zip(found, measured, strict=True)) and found[-1] == 0
    assert all(first <= second + 1e-6 for first, second in pairwise(slopes(found)))


def test_the_checkpoint_has_the_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    args = {"block_size": 8, "max_model_len": 128, "compression": AUTO}
    with pytest.raises(CheckpointError, match=f"has no {LAYER_LOSSES_FILE}.*kvllm calibrate"):
        _ = EngineArgs(tmp_path, **args).engine_config
    file = tmp_path / LAYER_LOSSES_FILE
    for shares, losses in ((SHARES, LOSSES[:2]), (SHARES[1:], LOSSES), (SHARES[::-1], LOSSES), ([0.0, 1.0], LOSSES)):
        file.write_text(json.dumps({"shares": shares, "losses": losses, "text": "", "tokens": 1}))
        with pytest.raises(CheckpointError, match="is not of this model, which has 3 layers"):
            _ = EngineArgs(tmp_path, **args).engine_config
    file.write_text(json.dumps({"shares": SHARES, "losses": LOSSES, "text": "", "tokens": 1}))
    config = EngineArgs(tmp_path, **args).engine_config
    by_layer = config.compression.retained_by_layer([None] * 3)
    assert by_layer == propose(LayerLosses(SHARES, LOSSES, "", 1).smoothed(), [0, 1, 2], AUTO, 8)
    assert {group.retain_blocks for group in config.kv_groups} == set(by_layer)


def test_a_number_of_blocks_means_the_same_bytes(tmp_path: Path) -> None:
    """The three layers keep three different shares, so that a block holds one of them."""
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    found = []
    for groups in ((), "pyramid"):
        compression = structs.replace(AUTO, layer_groups=groups)
        llm = LLM(tmp_path, block_size=8, num_gpu_blocks_override=40, max_model_len=128, compression=compression)
        found.append((llm.stats().num_blocks, llm.stats().block_bytes))
    (blocks, block_bytes), (more, fewer_bytes) = found
    assert (blocks, more) == (40, 120) and block_bytes == 3 * fewer_bytes
