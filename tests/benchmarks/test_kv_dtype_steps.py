"""The benchmark of decode steps over quantized KV pairs, run small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kv_dtype_steps
from kvllm.errors import ConfigError


def test_dtypes_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--contexts", "5", "20", "--sequences", "2", "--layers", "1", "--turns", "2"]
    kv_dtype_steps.benchmark([*sizes, "--kv-cache-dtypes", "auto", "int8", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "kv_dtype_steps.json").read_text())
    of_dtypes = [(each["context"], each["kv_cache_dtype"]) for each in found["steps"]]
    assert of_dtypes == [(5, "auto"), (5, "int8"), (20, "auto"), (20, "int8")]
    full, int8, *_ = found["steps"]
    assert full["speedups"] == [1, 1]
    assert int8["speedups"] == [a / b for a, b in zip(full["step_ms"], int8["step_ms"], strict=True)]
    assert "times as fast as" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [("--turns=1", "--turns=1.*at least 2"), ("--contexts=0", "at least 1 token"), ("--layers=0", "--layers=0")],
)
def test_wrong_sizes_are_refused(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_dtype_steps.parse_arguments([option])
