"""`layer_groups="auto"`: the losses that a text measures, and the shares that lose least."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.common.layer_losses import DISTANCE, STEPS, LayerLoss
from kvllm import CheckpointError, CompressionConfig
from kvllm.engine_args import EngineArgs
from kvllm.layer_shares import LAYER_LOSSES_FILE, LayerLosses, propose
from tests.helpers.checkpoints import make_checkpoint

LOSSES = [[9.0, 4.0, 2.0, 1.0, 0.0], [1.0, 0.5, 0.3, 0.1, 0.0], [9.5, 6.0, 3.0, 1.0, 0.0]]
AUTO = CompressionConfig(method="keydiff", window_blocks=4, retain_blocks=2, buffer=8, layer_groups="auto")


def test_losses_are_those_of_what_is_looked_up() -> None:
    """Every query looks up KV pair 3 with certainty: without it all is lost, and with any share nothing."""
    keys = torch.zeros(2 * DISTANCE, 1, 4)
    keys[3] = 100
    of_layer = LayerLoss(scale=1.0)
    of_layer.add(torch.ones(2 * DISTANCE, 2, 4), keys)
    lost = of_layer.losses()
    assert len(lost) == STEPS + 1
    # Two query heads; of the tokens, those at least DISTANCE behind the KV pair.
    assert lost[0] == pytest.approx(2 * (DISTANCE - 3) / (2 * DISTANCE), rel=0.02)
    assert lost[-1] == pytest.approx(0, abs=1e-9) and lost[1] < 0.01 * lost[0]


def test_shares_lose_least_of_all_with_the_same_total() -> None:
    found = propose(LayerLosses(LOSSES, "", 0), [0, 1, 2], AUTO, 8)

    def loss(blocks: tuple[int, ...]) -> float:
        shares = [(kept * 8 - 8) / 24 for kept in blocks]
        return sum(LayerLosses(LOSSES, "", 0).at(layer, share) for layer, share in enumerate(shares))

    others = [blocks for blocks in product(range(1, 5), repeat=3) if sum(blocks) == 6]
    assert sum(found) == 6 and loss(tuple(found)) == min(map(loss, others)) and len(set(found)) > 1


def test_the_checkpoint_has_the_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    args = {"block_size": 8, "max_model_len": 128, "compression": AUTO}
    with pytest.raises(CheckpointError, match=f"has no {LAYER_LOSSES_FILE}.*benchmarks.quality.calibrate"):
        _ = EngineArgs(tmp_path, **args).engine_config
    file = tmp_path / LAYER_LOSSES_FILE
    file.write_text(json.dumps({"losses": LOSSES[:2], "text": "", "tokens": 1}))
    with pytest.raises(CheckpointError, match="is not of this model, which has 3 layers"):
        _ = EngineArgs(tmp_path, **args).engine_config
    file.write_text(json.dumps({"losses": LOSSES, "text": "", "tokens": 1}))
    config = EngineArgs(tmp_path, **args).engine_config
    by_layer = config.compression.retained_by_layer([None] * 3)
    assert by_layer == propose(LayerLosses(LOSSES, "", 1), [0, 1, 2], AUTO, 8)
    assert {group.retain_blocks for group in config.kv_groups} == set(by_layer)
