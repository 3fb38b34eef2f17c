"""Prefixes that leave the pool, and are found on the host, or on the disk by a later process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, ConfigError
from kvllm.kvcache.tiers.disk import FILE, DiskStore
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint
from tests.helpers.engines import greedy, make_llm, random_prompts, tokens

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 8, "max_num_seqs": 2, "watermark": 0.0}
HOST: dict[str, Any] = SMALL | {"kv_offloading_size": 0.02}
PROMPTS = random_prompts(256, (60, 70, 80, 90))
"""The pool holds the blocks of one or two."""


checkpoint = checkpoint_fixture("qwen3", head_dim=32, num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return one_by_one(make_llm(checkpoint, **SMALL | {"num_gpu_blocks_override": 400}))


def one_by_one(llm: LLM) -> list[list[int]]:
    return [tokens(llm, [prompt], greedy(20))[0] for prompt in PROMPTS]


def test_prefixes_come_back_from_the_host(checkpoint: Path, expected: list[list[int]]) -> None:
    llm = make_llm(checkpoint, **HOST)
    assert one_by_one(llm) == expected
    assert llm.stats().blocks_stored > 0 and not llm.stats().prefix_host_hits
    assert one_by_one(llm) == expected
    stats = llm.stats()
    assert stats.prefix_host_hits == stats.prefix_cache_hits == sum(length // 8 * 8 for length in (59, 69, 79, 89))
    llm.llm_engine.scheduler.check()
    llm.llm_engine.reset_prefix_cache()
    assert one_by_one(llm) == expected
    assert llm.stats().prefix_host_hits == stats.prefix_host_hits


def test_a_full_host_keeps_the_prefixes_used_last(checkpoint: Path, expected: list[list[int]]) -> None:
    block = 2 * 2 * 2 * 8 * 32 * 4
    llm = make_llm(checkpoint, **HOST | {"kv_offloading_size": 12 * block / (1 << 30)})
    assert [one_by_one(llm), one_by_one(llm)] == [expected, expected]
    llm.llm_engine.scheduler.check()
    assert llm.stats().host_blocks_in_use == llm.config.num_host_blocks == 12


def test_quantized_prefixes_are_loaded(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, **HOST, kv_offload_dtype="int8")
    one_by_one(llm)
    assert [len(each) for each in one_by_one(llm)] == [20] * 4
    assert llm.stats().prefix_host_hits > 0


def test_prefixes_outlive_the_engine(checkpoint: Path, expected: list[list[int]], tmp_path: Path) -> None:
    options = HOST | {"kv_offloading_path": str(tmp_path)}
    first = make_llm(checkpoint, **options)
    assert one_by_one(first) == expected
    first.llm_engine.close()  # what the pool holds goes to the disk as well
    second = make_llm(checkpoint, **options)
    assert one_by_one(second) == expected
    assert second.stats().prefix_host_hits == sum(length // 8 * 8 for length in (59, 69, 79, 89))
    for other in ({"block_size": 16}, {"kv_cache_dtype": "int8"}, {"kv_offload_dtype": "int8"}):
        another = make_llm(checkpoint, **options | other)
        one_by_one(another)
        assert not another.stats().prefix_host_hits


@pytest.mark.parametrize("has_run", [False, True])
def test_what_was_forgotten_stays_so_behind_a_failed_step(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path, has_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers tell again what the disk has. What was written since is found."""
    options = HOST | {"kv_offloading_path": str(tmp_path)}
    first = make_llm(checkpoint, **options)
    assert one_by_one(first) == expected
    first.llm_engine.close()
    llm = make_llm(checkpoint, **options)
    if has_run:
        assert one_by_one(llm)[:1] == expected[:1]
    before = llm.stats().prefix_host_hits
    assert (before > 0) == has_run
    llm.llm_engine.reset_prefix_cache()
    fail_a_step(llm, monkeypatch)
    assert one_by_one(llm) == expected
    assert llm.stats().prefix_host_hits == before
    fail_a_step(llm, monkeypatch)
    assert one_by_one(llm) == expected
    assert llm.stats().prefix_host_hits > before


def fail_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(llm.llm_engine.executor, "collect", fail)
        tokens(llm, PROMPTS[:1], greedy(2))
    llm.llm_engine.abort("0")


def test_a_changed_checkpoint_finds_nothing(tmp_path: Path) -> None:
    options = HOST | {"kv_offloading_path": str(tmp_path / "disk")}
    for seed in (0, 1):
        make_checkpoint(tmp_path / "model", "qwen3", seed=seed, head_dim=32, num_hidden_layers=2)
        expected = one_by_one(make_llm(tmp_path / "model", **SMALL))
        llm = make_llm(tmp_path / "model", **options)
        assert one_by_one(llm) == expected
        assert not llm.stats().prefix_host_hits
        llm.llm_engine.close()


@pytest.mark.parametrize("harm", ["truncated", "garbage"])
def test_a_damaged_file_leads_to_computing_again(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = HOST | {"kv_offloading_path": str(tmp_path)}
    llm = make_llm(checkpoint, **options)
    one_by_one(llm)
    llm.llm_engine.close()
    second = make_llm(checkpoint, **options)
    (file,) = tmp_path.rglob(FILE)
    size = file.stat().st_size
    with file.open("r+b") as opened:  # while the engine runs, which knows what was there
        if harm == "truncated":
            opened.truncate(size // 2)
        else:
            opened.seek(65536)
            opened.write(bytes(range(256)) * ((size - 65536) // 256))
    assert one_by_one(second) == expected
    assert "cannot be used any more" in caplog.text or "computed again" in caplog.text


SCRIPT = """
import json, os, resource, signal, sys
from tests.worker.test_prefix_tiers import HOST, PROMPTS
from kvllm.worker.features.offloading import Offloader
from tests.helpers.engines import greedy, make_llm, tokens
from tests.helpers.features import feature_of
path, directory, way = sys.argv[1:]
llm = make_llm(path, **HOST, kv_offloading_path=directory)
if way == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
found = [tokens(llm, [prompt], greedy(20))[0] for prompt in PROMPTS * 2]
if way == "full":
    llm.llm_engine.close()
    print(json.dumps(found))
else:
    if way == "killed":
        feature_of(llm.llm_engine.executor.runner, Offloader).store.disk.wait()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(checkpoint: Path, directory: Path, way: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", SCRIPT, str(checkpoint), str(directory), way]
    return subprocess.run(arguments, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("way", ["killed", pytest.param("killed while it writes", marks=pytest.mark.long)])
def test_prefixes_outlive_a_killed_process(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path, way: str
) -> None:
    assert run_script(checkpoint, tmp_path, way).returncode == -9
    llm = make_llm(checkpoint, **HOST, kv_offloading_path=str(tmp_path))
    assert one_by_one(llm) == expected
    assert llm.stats().prefix_host_hits > 0 or way != "killed"


def test_a_full_disk_is_named_and_changes_no_token(checkpoint: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """The system writes no file of more than some blocks."""
    process = run_script(checkpoint, tmp_path, "full")
    assert process.returncode == 0 and json.loads(process.stdout) == expected * 2
    assert process.stderr.count("cannot be used any more") == 1 and "Free the disk" in process.stderr
    llm = make_llm(checkpoint, **HOST, kv_offloading_path=str(tmp_path))  # with room again
    assert one_by_one(llm) == expected


def test_a_small_disk_keeps_the_blocks_written_last(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    block = 2 * 2 * 2 * 8 * 32 * 4
    options = HOST | {"kv_offloading_path": str(tmp_path), "kv_offloading_disk_size": 5 * (block + 16) / (1 << 30)}
    for _ in range(2):
        llm = make_llm(checkpoint, **options)
        assert [one_by_one(llm), one_by_one(llm)] == [expected, expected]
        llm.llm_engine.close()
    (file,) = tmp_path.rglob(FILE)
    assert len(DiskStore(file.parent, 1 << 30).digests()) == 5
    with pytest.raises(ConfigError, match="kv_offloading_disk_size=.*at least a block of 8 tokens"):
        make_llm(checkpoint, **options | {"kv_offloading_disk_size": block / 2 / (1 << 30)})
