"""A hub on loopback that huggingface_hub is pointed at, with a cache of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.hub import Hub, reachable_hub


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in several shards."""
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, "llama", sharded=True)
    return path


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
