"""A disk that is full, torn, cut short, locked, or reads back other bytes: a block comes back as it was, or not."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from kvllm.kvcache.tiers import disk
from kvllm.kvcache.tiers.disk import DiskStore
from tests.helpers.examples import examples

DIGESTS = [bytes([i]) * 16 for i in range(24)]
BLOCK_BYTES = 9000
FAULTS = ("flip", "flip", "cut", "tear", "full", "locked")


def content_of(digest: bytes) -> bytes:
    return random.Random(digest).randbytes(BLOCK_BYTES)


class Disk:
    """A store in a directory, and what befalls its files."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        self.rng = rng
        self.found = self.wrong = 0
        self.store = DiskStore(directory, 12 * BLOCK_BYTES)

    def step(self) -> None:
        action = self.rng.choice(("put", "put", "get", "get", "get", "reopen", self.rng.choice(FAULTS)))
        getattr(self, action)()

    def put(self) -> None:
        self.store.put({digest: content_of(digest) for digest in self.rng.sample(DIGESTS, 4)})

    def get(self) -> None:
        digest = self.rng.choice(DIGESTS)
        content = self.store.get(digest)
        self.found += content is not None
        self.wrong += content not in (None, content_of(digest))

    def reopen(self) -> None:
        """The process ends and another one begins: some directories need a new file first."""
        self.store.close()
        if self.rng.random() < 0.3:
            for path in self.files:
                path.unlink()
        self.store = DiskStore(self.directory, 12 * BLOCK_BYTES)

    @property
    def files(self) -> list[Path]:
        """Those that are on the disk: one that ends in shm is memory, which is made anew."""
        return sorted(each for each in self.directory.iterdir() if each.stat().st_size and each.suffix != ".sqlite-shm")

    def flip(self) -> None:
        """Bytes of a file become others, which the process sees or the next one."""
        if ends := self.rng.random() < 0.7:
            self.store.close()
        if self.files:
            with open(self.rng.choice(self.files), "r+b") as file:
                size = file.seek(0, 2)
                for _ in range(self.rng.randint(1, 3)):
                    file.seek(self.rng.randrange(size))
                    file.write(self.rng.randbytes(1))
        if ends:
            self.store = DiskStore(self.directory, 12 * BLOCK_BYTES)

    def cut(self) -> None:
        """A file ends too early after the process has."""
        self.store.close()
        if self.files:
            path = self.rng.choice(self.files)
            with open(path, "r+b") as file:
                file.truncate(self.rng.randrange(path.stat().st_size))
        self.store = DiskStore(self.directory, 12 * BLOCK_BYTES)

    def tear(self) -> None:
        """Of what a write has changed, a part is as it was before."""
        before = {path: path.read_bytes() for path in self.files}
        self.put()
        for path, old in before.items():
            if path.exists():
                begin = self.rng.randrange(len(old))
                with open(path, "r+b") as file:
                    file.seek(begin)
                    file.write(old[begin : begin + self.rng.randint(1, 40_000)])

    def full(self) -> None:
        """No page can be added from now on."""
        if self.store._connection is not None:
            with suppress(sqlite3.Error):
                self.store._connection.execute("PRAGMA max_page_count = 1")

    def locked(self) -> None:
        """Another process holds the file for longer than the store waits."""
        with suppress(sqlite3.Error), closing(sqlite3.connect(self.store.path, timeout=0.01)) as other:
            other.execute("BEGIN EXCLUSIVE")
            self.put()


def run_disks(directory: Path, count: int) -> tuple[int, int]:
    """Blocks that were found, and those of them that were wrong."""
    found = wrong = 0
    with patch.object(disk, "SECONDS_TO_WAIT", 0.01):
        for seed in range(count):
            each = Disk(directory / str(seed), random.Random(seed))
            for _ in range(40):
                each.step()
            each.store.close()
            found, wrong = found + each.found, wrong + each.wrong
    return found, wrong


def test_nothing_wrong_is_read_from_a_failing_disk(tmp_path: Path) -> None:
    found, wrong = run_disks(tmp_path, examples(400))
    assert found > 50 and not wrong


def test_a_torn_record_that_is_accepted_is_found(tmp_path: Path) -> None:
    """With a checksum that does not look at the content."""
    with patch.object(disk, "_checksum", lambda digest, content: digest):
        assert run_disks(tmp_path, 60)[1]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "kvllm")


def test_a_damaged_file_is_let_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An open connection would hold the file, and remove its log when it is collected."""
    (tmp_path / disk.FILE).write_bytes(b"no database" * 1000)
    with caplog.at_level("WARNING", "kvllm"):
        store = DiskStore(tmp_path, 1)
    opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert len(caplog.records) == 1 and str(store.path.resolve()) not in opened
