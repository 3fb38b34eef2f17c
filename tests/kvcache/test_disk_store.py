"""Blocks that are kept on a disk, and what becomes of them where the disk does not do what it should."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.tiers.disk import FILE, DiskStore
from kvllm.kvcache.tiers.host import HostStore

MANY = 1 << 30
SIZE = 100_000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def digest(number: int) -> bytes:
    return number.to_bytes(16)


def filled(directory: Path, count: int = 20) -> Path:
    """The file of a store with as many blocks."""
    store = DiskStore(directory, MANY)
    store.put({digest(i): content(i) for i in range(count)})
    store.close()
    return directory / FILE


def test_blocks_outlive_the_store(tmp_path: Path) -> None:
    filled(tmp_path / "new" / "folder")
    store = DiskStore(tmp_path / "new" / "folder", MANY)
    assert store.digests() == [digest(i) for i in reversed(range(20))]
    assert [store.get(digest(i)) for i in (0, 19, 20)] == [content(0), content(19), None]


def test_the_first_blocks_make_room(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 5 * (SIZE + 16))
    for i in range(12):
        store.put({digest(i): content(i)})
        store.put({digest(i): content(i)})  # again
    assert store.digests() == [digest(i) for i in (11, 10, 9, 8, 7)]
    assert store.get(digest(6)) is None and store.get(digest(7)) == content(7)


@pytest.mark.parametrize("harm", ["truncated", "garbage", "other file", "empty"])
def test_a_damaged_file_gives_nothing_wrong(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    file = filled(tmp_path)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        match harm:
            case "truncated":
                opened.truncate(size // 2)
            case "garbage":
                opened.seek(65536)
                opened.write(os.urandom(size - 65536))
            case "other file":
                opened.write(b"This is no database.")
            case "empty":
                opened.truncate(0)
    store = DiskStore(tmp_path, MANY)
    for i in range(20):
        assert store.get(digest(i)) in (None, content(i))
    store.put({digest(30): content(30)})
    assert store.get(digest(30)) in (None, content(30))
    assert harm == "empty" or "Free the disk, or remove the file if it is damaged" in caplog.text


def test_a_block_that_was_changed_is_not_returned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sqlite3.connect(filled(tmp_path)) as connection:
        connection.execute("UPDATE blocks SET content = zeroblob(100016) WHERE digest = ?", (digest(3),))
        (other,) = connection.execute("SELECT content FROM blocks WHERE digest = ?", (digest(5),)).fetchone()
        connection.execute("UPDATE blocks SET content = ? WHERE digest = ?", (other, digest(4)))
    connection.close()
    store = DiskStore(tmp_path, MANY)
    assert [store.get(digest(i)) for i in (3, 4, 5)] == [None, None, content(5)]
    assert "is not what was written, and is computed again" in caplog.text
    store.put({digest(3): content(3), digest(4): content(4)})  # as it was computed again
    assert [store.get(digest(i)) for i in (3, 4, 5)] == [content(i) for i in (3, 4, 5)]


def test_a_full_disk_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path, MANY)
    assert store._connection is not None
    store._connection.execute("PRAGMA max_page_count = 20")
    for i in range(30):
        store.put({digest(i): content(i)})
    assert caplog.text.count("database or disk is full") == 1
    assert store.get(digest(0)) is None


def test_a_path_that_is_no_directory_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = DiskStore(tmp_path / "file" / "below", MANY)
    store.put({digest(0): content(0)})
    assert store.digests() == [] and store.get(digest(0)) is None
    assert "cannot be used any more" in caplog.text and "file/below" in caplog.text


def test_blocks_go_through_the_disk_bit_for_bit(tmp_path: Path) -> None:
    """Beside others that the host holds, in one load; with scores, and a size that is no multiple of a word."""
    shape = CacheShape(2, 3, 5, 3, torch.bfloat16, scored=True)
    cache = PagedKVCache(shape, 8)
    assert cache.scores is not None
    cache.data.normal_()
    cache.scores.normal_()
    data, scores = cache.data.clone(), cache.scores.clone()
    store = HostStore(shape, 2, torch.device("cpu"), disk=DiskStore(tmp_path, MANY))
    store.store(cache, [0, 1, 2], [1, -1, 0], [b"", digest(1), digest(2)])
    store.load(0, [0, -1, 1, -1], cache, [4, 5, 6, 7], [b"", digest(1), b"", digest(2)])
    ended = store.ended(wait=True)
    assert (ended.loaded, ended.lost) == ([0], [])
    for loaded, source in ((4, 2), (5, 1), (6, 0), (7, 2)):
        assert torch.equal(cache.data[:, :, loaded], data[:, :, source])
        assert torch.equal(cache.scores[:, loaded], scores[:, source])
    store.load(1, [0, -1], cache, [4, 5], [b"", digest(9)])
    assert store.ended(wait=True).lost == [1]
    assert store.disk is not None
    assert sorted(store.disk.digests()) == [digest(1), digest(2)]
