"""A hub on loopback that huggingface_hub is pointed at, with a cache of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.hub import Hub, reachable_hub

checkpoint = checkpoint_fixture("llama", sharded=True)
"""A small Llama in several shards."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    without_waits = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", without_waits)
    with reachable_hub(cache, monkeypatch) as hub:
        yield hub
