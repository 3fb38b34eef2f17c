"""A checkpoint that the tests of models share."""

from __future__ import annotations

from tests.helpers.checkpoints import checkpoint_fixture

qwen3 = checkpoint_fixture("qwen3", head_dim=16)
