"""Real replicas with a device that sleeps, beside the simulated fleet."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("ray", reason="needs ray: pip install ray")
from benchmarks import fleet
from kvllm.distributed.replicas import replica_set

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]


def test_real_replicas_and_a_simulated_fleet_serve_the_same_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both serve the same loads. How near times are is measured, and not asserted: other work on the machine shows."""
    monkeypatch.setattr(replica_set, "Replica", replica_set.Replica)  # which the script replaces
    fleet.run_fleet(["--stand-in", "10", "--requests", "20", "--rates", "2"])
    out = capsys.readouterr().out
    assert re.findall(r"^(all at once|2 a second) ", out, re.MULTILINE) == ["all at once", "2 a second"]
    rows = re.findall(r"^(output tokens/s|latency, mean, s|found in cache, tokens) +(\S+) +(\S+)", out, re.MULTILINE)
    assert len(rows) == 6
    assert all(float(figure.replace(",", "")) > 0 for _, *figures in rows for figure in figures)
