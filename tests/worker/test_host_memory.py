"""The memory that a container leaves, from control groups of both versions; and the length of the timeline."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import psutil
import pytest

from kvllm import stats
from kvllm.stats import EngineStats
from kvllm.worker import host_memory
from kvllm.worker.host_memory import _left_in_groups, available_memory, total_memory

MIB = 1 << 20


def group(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(f"{text}\n")


def version_2(limit: int | str, used: int, cached: int) -> dict[str, str]:
    stat = f"anon {used - cached}\ninactive_file {cached}"
    return {"memory.max": str(limit), "memory.current": str(used), "memory.stat": stat}


def test_version_2_counts_every_group_above_and_no_cached_files(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/slice/container\n")
    group(tmp_path / "mount", {"memory.stat": "anon 0"})  # the machine's root has no limit
    group(tmp_path / "mount/slice", version_2(900 * MIB, 500 * MIB, 0))
    group(tmp_path / "mount/slice/container", version_2("max", 300 * MIB, 0))
    assert list(_left_in_groups(tmp_path / "mount", tmp_path / "own")) == [400 * MIB]
    group(tmp_path / "mount/slice/container", version_2(512 * MIB, 300 * MIB, 100 * MIB))
    assert list(_left_in_groups(tmp_path / "mount", tmp_path / "own")) == [312 * MIB, 400 * MIB]
    group(tmp_path / "mount/slice/container", version_2(512 * MIB, 600 * MIB, 0))
    assert min(_left_in_groups(tmp_path / "mount", tmp_path / "own")) == 0


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/not/visible/here\n")
    group(tmp_path / "mount", version_2(512 * MIB, 100 * MIB, 0))
    assert list(_left_in_groups(tmp_path / "mount", tmp_path / "own")) == [412 * MIB]


def test_version_1(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("5:cpu:/box\n4:memory:/box\n0::/\n")
    stat = {"memory.stat": f"inactive_file 7\ntotal_inactive_file {50 * MIB}"}
    used = {"memory.usage_in_bytes": str(250 * MIB), **stat}
    group(tmp_path / "mount/memory", {"memory.limit_in_bytes": str(2**63 - 4096), **used})
    group(tmp_path / "mount/memory/box", {"memory.limit_in_bytes": str(300 * MIB), **used})
    assert min(_left_in_groups(tmp_path / "mount", tmp_path / "own")) == 100 * MIB


def test_no_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(_left_in_groups(tmp_path / "mount", tmp_path / "own")) == []
    assert 0 < available_memory() <= total_memory() <= psutil.virtual_memory().total
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "mount")
    assert 0 < available_memory() <= psutil.virtual_memory().total == total_memory()


def test_a_limit_is_all_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in use."""
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    group(tmp_path, version_2(512 * MIB, 500 * MIB, 0))
    assert total_memory() == 512 * MIB


def test_the_timeline_forgets_old_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "MOST_STEPS", 10)
    counted = EngineStats(num_blocks=4)
    for step in range(100):
        counted.record_step(running=step, blocks=1)
        assert len(counted.timeline) <= 10 and counted.timeline[-1] == (step, 1)
    assert counted.steps == 100
    assert counted.timeline_since(97) == [(97, 1), (98, 1), (99, 1)]
    assert counted.timeline_since(3) == counted.timeline  # as far back as it goes
    assert counted.timeline_since(100) == []


def test_a_step_in_the_timeline_takes_few_bytes() -> None:
    counted = EngineStats(num_blocks=4)
    tracemalloc.start()
    for step in range(1000, 6000):
        counted.record_step(running=step, blocks=step)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted.timeline == [(step, step) for step in range(1000, 6000)]
    assert used < 5000 * 16
