"""What the tests of several processes share."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is given up for being silent, as healthy ones are on busy cores. Tests of hangs set shorter times."""
    if find_spec("ray"):
        from kvllm.distributed import worker_group
        from kvllm.distributed.replicas import replica_set

        for module in (worker_group, replica_set):
            monkeypatch.setattr(module, "START_SECONDS", 600.0)
            monkeypatch.setattr(module, "SILENCE_SECONDS", 60.0)
