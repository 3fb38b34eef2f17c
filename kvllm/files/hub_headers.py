"""The header of a GGUF file on a hub, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvllm.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

FIRST_BYTES = 1 << 22
"""Which hold most headers: a vocabulary of 50,000 tokens takes two MiB."""


def fetch_header(repo: str, commit: str, listed: RepoFile, path: Path) -> None:
    """Write a file as long as the one on the hub, of which only the bytes of the header are there.

    Raises CheckpointError if it is not GGUF, and what huggingface_hub raises.
    """
    from kvllm.files.gguf.header import read_header

    num_bytes = FIRST_BYTES
    while True:
        content = _fetch(repo, commit, listed.path, min(num_bytes, listed.size))
        path.write_bytes(content)
        try:
            read_header(path, listed.size)
            break
        except CheckpointError:
            if num_bytes >= listed.size:
                raise
        num_bytes *= 4
    with path.open("r+b") as file:
        file.truncate(listed.size)  # the rest takes no room on the disk


def _fetch(repo: str, commit: str, name: str, num_bytes: int) -> bytes:
    """The first bytes of a file. A hub that knows no ranges sends the whole, of which these are taken."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    response = http_backoff(
        "GET",
        hf_hub_url(repo, name, revision=commit),
        headers={**build_hf_headers(), "Range": f"bytes=0-{num_bytes - 1}"},
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        follow_redirects=True,
    )
    hf_raise_for_status(response)
    return response.content[:num_bytes]
