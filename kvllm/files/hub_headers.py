"""The header of a GGUF file on a hub, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvllm.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

FIRST_BYTES, MOST_BYTES = 1 << 22, 1 << 26
"""The first hold most headers: a vocabulary of 50,000 tokens takes two MiB. None needs more than the last."""
MOST_OF_VECTOR = 1 << 16
PARTIAL = 206


def fetch_header(repo: str, commit: str, listed: RepoFile, path: Path) -> None:
    """Write a file as long as the one on the hub, of which only the bytes of the header are there, and of tensors that
    the config reads.

    Raises CheckpointError if it is not GGUF, and what huggingface_hub raises.
    """
    from kvllm.files.gguf.header import read_header
    from kvllm.files.gguf.metadata import VECTORS

    num_bytes, most = FIRST_BYTES, min(listed.size, MOST_BYTES)
    while True:
        path.write_bytes(_fetch(repo, commit, listed.path, 0, min(num_bytes, most)))
        try:
            header = read_header(path, listed.size)
            break
        except CheckpointError:  # it is longer, or broken
            if num_bytes >= most:
                raise
        num_bytes *= 4
    beyond = [
        info for name in VECTORS if (info := header.tensors.get(name)) and info.start + info.num_bytes > num_bytes
    ]
    with path.open("r+b") as file:
        file.truncate(listed.size)  # the rest takes no room on the disk
        for info in beyond:
            file.seek(info.start)
            file.write(_fetch(repo, commit, listed.path, info.start, min(info.num_bytes, MOST_OF_VECTOR)))


def _fetch(repo: str, commit: str, name: str, start: int, num_bytes: int) -> bytes:
    """Some bytes of a file. A hub that knows no ranges would send the whole, so no more is read."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + num_bytes - 1}", "Accept-Encoding": "identity"}
    url, content = hf_hub_url(repo, name, revision=commit), bytearray()
    with http_stream_backoff(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        if start and response.status_code != PARTIAL:
            raise CheckpointError(f"{url} comes as a whole alone: give another hub in HF_ENDPOINT, or download it")
        for part in response.iter_bytes():
            content += part
            if len(content) >= num_bytes:
                break
    return bytes(content[:num_bytes])
