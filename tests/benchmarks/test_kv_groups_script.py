"""The benchmark of layers that release what lies behind their window, run small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kv_groups
from kvllm.errors import ConfigError

PAIR = 2 * 2 * 64 * 4
"""Bytes in one layer of a token: keys and values of two heads in float32."""
LENGTH, WINDOW = 96, 16
SIZES = ["--length", str(LENGTH), "--output-len", "24", "--window", str(WINDOW), "--layers", "6", "--block-size", "8"]


def test_release_runs_more_sequences_in_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--requests", "6", "--max-num-batched-tokens", "32", "--dtype", "float32", "--repeats", "1"]
    kv_groups.benchmark([*SIZES, *more, "--output", str(tmp_path)])
    found = json.loads((tmp_path / "kv_groups.json").read_text())
    assert found["pool_bytes"] == 2 * LENGTH * 6 * PAIR
    assert found["formula"] == {
        "kept": {"kv_bytes": LENGTH * 6 * PAIR, "block_bytes": LENGTH * 6 * PAIR, "sequences": 2},
        # A sequence has 12 blocks of the full layer, and 3 of each of the others: 27 of 144.
        "released": {"kv_bytes": (LENGTH + 5 * WINDOW) * PAIR, "block_bytes": 27 * 8 * PAIR, "sequences": 5},
    }
    kept, released = (found["engines"][name]["runs"][0] for name in ("kept", "released"))
    assert kept["num_blocks"] * kept["block_bytes"] == released["num_blocks"] * released["block_bytes"]
    assert kept["peak_concurrency"] == 2 < released["peak_concurrency"]
    assert released["mean_concurrency"] > kept["mean_concurrency"]
    assert kept["output_tokens"] == released["output_tokens"] == 6 * 24
    assert (tmp_path / "kv_groups.png").read_bytes().startswith(b"\x89PNG")
    rows = {line.split("   ")[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["sequences at once, formula"][-3:] == ["2", "5", "2.50"]


@pytest.mark.parametrize(
    ("option", "message"),
    [("--layers=5", "at least 6"), ("--length=24", "window of 16"), ("--fitting=0", "--fitting=0")],
)
def test_wrong_sizes_are_refused(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_groups.parse_arguments([*SIZES, option])
