"""The models of a hub that are in the cache of huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvllm.errors import CheckpointError, ConfigError
from kvllm.files.hub import HubId
from kvllm.files.hub_files import quantizations
from kvllm.spelling import did_you_mean

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo
    from huggingface_hub.utils import CachedFileInfo

SHORTEST_COMMIT = 7


def cached_models() -> list[CachedRepoInfo]:
    """By name."""
    return [] if (cache := _scan()) is None else _models(cache)


def remove(asked: HubId, revision: str | None) -> int:
    """Remove a model, one of its revisions, or one of its quantizations.

    Returns:
        Bytes that this freed.

    Raises:
        ConfigError: there is none.
        CheckpointError: the cache cannot be written.
    """
    cache = _scan()
    models = {} if cache is None else {repo.repo_id: repo for repo in _models(cache)}
    if cache is None or asked.repo not in models:
        raise ConfigError(f"{asked.repo} is not in the cache{did_you_mean(asked.repo, models) or ': see kvllm list'}")
    revisions = _revisions(models[asked.repo], revision)
    if asked.tag is None:
        strategy = cache.delete_revisions(*(each.commit_hash for each in revisions))
    else:
        files = [file for each in revisions for file in _quantized(each, asked.tag)]
        if not files:
            raise ConfigError(f"{asked.repo} has no {asked.tag} in the cache: see kvllm list")
        strategy = cache.delete_files(*files)
    try:
        strategy.execute()
    except OSError as error:
        raise CheckpointError(f"{asked.repo} cannot be removed: {error}") from error
    return strategy.expected_freed_size


def _scan() -> HFCacheInfo | None:
    """None where there is no cache yet."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _models(cache: HFCacheInfo) -> list[CachedRepoInfo]:
    return sorted((repo for repo in cache.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id.lower())


def _revisions(repo: CachedRepoInfo, name: str | None) -> list[CachedRevisionInfo]:
    """The revisions of that name; None: all."""
    if name is None:
        return list(repo.revisions)
    found = [
        each
        for each in repo.revisions
        if name in each.refs or (len(name) >= SHORTEST_COMMIT and each.commit_hash.startswith(name))
    ]
    if not found:
        known = ", ".join(sorted({ref for each in repo.revisions for ref in (*each.refs, each.commit_hash[:12])}))
        raise ConfigError(f"{repo.repo_id} has no revision {name} in the cache: choose one of {known}")
    return found


def _quantized(revision: CachedRevisionInfo, tag: str) -> Iterator[CachedFileInfo]:
    """The files of one quantization."""
    files = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
    for each in quantizations({name: file.size_on_disk for name, file in files.items()}):
        if tag.lower() in (each.tag.lower(), each.name.lower()):
            yield from (files[name] for name in each.files)
