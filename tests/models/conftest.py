"""A checkpoint that the tests of models share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path, "qwen3", head_dim=16)
    return path
