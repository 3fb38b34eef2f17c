"""Real replicas beside the simulated fleet."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("ray", reason="needs ray: pip install ray")
from benchmarks import fleet

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]


def test_real_replicas_and_a_simulated_fleet_serve_the_same_loads(capsys: pytest.CaptureFixture[str]) -> None:
    """Both serve the same loads. How near times are is measured, and not asserted: other work on the machine shows."""
    fleet.run_fleet(["--requests", "20", "--rates", "2"])
    out = capsys.readouterr().out
    assert re.findall(r"^(all at once|2 a second) ", out, re.MULTILINE) == ["all at once", "2 a second"]
    rows = re.findall(r"^(output tokens/s|latency, mean, s|found in cache, tokens) +(\S+) +(\S+)", out, re.MULTILINE)
    assert len(rows) == 6
    assert all(float(figure.replace(",", "")) > 0 for _, *figures in rows for figure in figures)
