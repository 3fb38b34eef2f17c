"""Blocks on a disk, found by their content: they outlive the process."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from pathlib import Path

logger = logging.getLogger(__name__)

FILE = "blocks.sqlite"
PAGE_BYTES = 65536
"""The largest that there is: a block takes many."""
CHECKSUM_BYTES = 16
SECONDS_TO_WAIT = 5.0
"""For another process that writes to the same file."""


class DiskStore:
    """One rank's blocks by their digests, in an SQLite database.

    Whatever is wrong with the disk or the file, nothing that was read wrong is ever returned. A file that is damaged or
    not a database is left as it is, with a warning, and nothing is kept; so it is with a disk that is full. Where
    `max_bytes` are used, the blocks that came first make room.

    directory: made where it is absent. Whose blocks these are has to be part of its name: model, dtypes, block size and
        rank. It is used from one thread.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.path = directory / FILE
        self._max_bytes = max_bytes
        self._connection: sqlite3.Connection | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def digests(self) -> list[bytes]:
        """Of all blocks that are there, the last one first."""
        if self._connection is None:
            return []
        try:
            rows = self._connection.execute("SELECT digest FROM blocks ORDER BY id DESC").fetchall()
        except sqlite3.Error as error:
            self._give_up(error)
            return []
        return [digest for (digest,) in rows]

    def put(self, blocks: dict[bytes, bytes]) -> None:
        """Keep blocks, in order, by their digests."""
        if self._connection is None:
            return
        rows = [(digest, _checksum(digest, content) + content) for digest, content in blocks.items()]
        try:
            with self._connection as connection:
                connection.executemany(  # a record that is there already may be damaged
                    "INSERT INTO blocks (digest, content) VALUES (?, ?) "
                    "ON CONFLICT (digest) DO UPDATE SET content = excluded.content",
                    rows,
                )
                connection.execute(
                    "DELETE FROM blocks WHERE id <= (SELECT max(id) FROM blocks) - ?",
                    (self._max_bytes // max(len(content) for _, content in rows),),
                )
        except sqlite3.Error as error:
            self._give_up(error)

    def get(self, digest: bytes) -> bytes | None:
        """A block's content; None if it is not there, or not what was put."""
        if self._connection is None:
            return None
        try:
            row = self._connection.execute("SELECT content FROM blocks WHERE digest = ?", (digest,)).fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        if row is None:
            return None
        checksum, content = row[0][:CHECKSUM_BYTES], row[0][CHECKSUM_BYTES:]
        if checksum == _checksum(digest, content):
            return content
        logger.warning("A KV block in %s is not what was written, and is computed again", self.path)
        return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> None:
        self._connection = sqlite3.connect(self.path, timeout=SECONDS_TO_WAIT, check_same_thread=False)
        self._connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._connection.execute("PRAGMA journal_mode = WAL")
        # A power cut may lose the last blocks, and damages nothing.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        with self._connection:
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS blocks (id INTEGER PRIMARY KEY, digest BLOB UNIQUE, content BLOB)"
            )

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "%s cannot be used any more (%s): KV blocks are neither read from it nor written to it. Free the disk, or "
            "remove the file if it is damaged, and start again",
            self.path,
            error,
        )
        self.close()


def _checksum(digest: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, key=digest, digest_size=CHECKSUM_BYTES).digest()
