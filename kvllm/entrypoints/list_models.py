"""List the models that were downloaded from a hub.

    kvllm list

A model is there once for each commit; a branch names the newest that was asked for. Commits share equal files.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvllm.files.hub_cache import cached_models
from kvllm.files.hub_files import gib, quantizations

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> None:
    from huggingface_hub import constants

    rows = [("MODEL", "REVISION", "SIZE", "USED")]
    for repo in cached_models():
        for revision in sorted(repo.revisions, key=lambda each: each.last_modified, reverse=True):
            name = ", ".join(sorted(revision.refs)) or revision.commit_hash[:12]
            rows.append((repo.repo_id + _tags(revision), name, gib(revision.size_on_disk), repo.last_accessed_str))
    if len(rows) == 1:
        print(f"no models in {constants.HF_HUB_CACHE}: kvllm pull ORG/NAME downloads one")
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _tags(revision: CachedRevisionInfo) -> str:
    """The quantizations that are there of a GGUF repository, as they are asked for."""
    sizes = {str(file.file_path.relative_to(revision.snapshot_path)): file.size_on_disk for file in revision.files}
    tags = [each.tag for each in quantizations(sizes)]
    return f":{','.join(tags)}" if tags else ""
