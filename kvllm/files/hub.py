"""Models of a hub by their ids: ORG/NAME, or ORG/NAME:QUANTIZATION for a file of a GGUF repository.

huggingface_hub downloads into its own cache, with its own variables: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. It
goes on where a connection was cut, and checks sizes; the hashes of what came are checked here.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from kvllm.errors import CheckpointError
from kvllm.files.hub_errors import explained, is_temporary, not_cached
from kvllm.files.hub_files import (
    TOKENIZER_FILES,
    Quantization,
    choose,
    description,
    gib,
    has_safetensors,
    quantizations,
    refuse_other_weights,
    safetensors,
    some,
)
from kvllm.files.hub_headers import fetch_header

if TYPE_CHECKING:  # takes a third of a second, which a directory needs not
    from huggingface_hub import RepoFile, ResolvedRevision

logger = logging.getLogger(__name__)

ID = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*?)(?::([\w.-]+))?", re.ASCII)
FILES = (".gguf", ".json", ".safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")


class HubId(NamedTuple):
    """repo: ORG/NAME. tag: what stands after a colon, if anything."""

    repo: str
    tag: str | None


def hub_id(model: str | Path) -> HubId | None:
    """The parts of an id. None for what is a path: a Path, what exists as one, and what has not the form of an id."""
    if isinstance(model, Path) or Path(model).exists() or model.endswith(FILES):
        return None
    found = ID.fullmatch(model)
    return HubId(found[1], found[2]) if found else None


@dataclass(frozen=True)
class Snapshot:
    """A commit of a repository in the cache, whose weights may not be there yet.

    revision: what was asked for, and the commit. folder: of its files in the cache. files: all that the commit has,
    perhaps not here. gguf: what is read, if it is in GGUF.
    """

    repo: str
    revision: ResolvedRevision
    folder: Path
    files: Mapping[str, RepoFile]
    gguf: Quantization | None = None

    @property
    def commit(self) -> str:
        return self.revision.resolved

    @property
    def path(self) -> Path:
        """The directory of the checkpoint, or the first GGUF file."""
        return self.folder / self.gguf.files[0] if self.gguf else self.folder

    @property
    def is_whole(self) -> bool:
        """Whether the weights are here."""
        return all((self.folder / name).is_file() for name in self._weights())

    def fetch_weights(self) -> None:
        """Download the weights that are not here. Raises CheckpointError."""
        self.fetch(self._weights())

    def _weights(self) -> Iterable[str]:
        return self.gguf.files if self.gguf else safetensors(self.files, self.folder)

    @cached_property
    def _headers(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="kvllm-headers-")

    def fetch_headers(self) -> Path:
        """As `path`, for GGUF files that may not be here: then of others that have their headers alone, and go with
        this object. Raises CheckpointError."""
        if self.gguf is None or self.is_whole:
            return self.path
        from huggingface_hub import constants

        if constants.is_offline_mode():
            raise not_cached(self.repo, self.revision.initial)
        folder = Path(self._headers.name)
        with explained(self.repo, self.revision.initial):
            for name in self.gguf.files:
                if not (folder / Path(name).name).exists():
                    fetch_header(self.repo, self.commit, self.files[name], folder / Path(name).name)
        return folder / Path(self.gguf.files[0]).name

    def fetch(self, names: Iterable[str]) -> None:
        """Download those files that are not here. Raises CheckpointError, before anything is downloaded if it can."""
        missing = [name for name in names if not (self.folder / name).is_file()]
        if not missing:
            return
        from huggingface_hub import constants, snapshot_download

        if constants.is_offline_mode():
            raise not_cached(self.repo, self.revision.initial)
        coming = sum(self.files[name].size for name in missing if not self._has_blob(name))
        _check_room(self.repo, coming, Path(constants.HF_HUB_CACHE))
        with explained(self.repo, self.revision.initial):
            exactly = [re.sub(r"([*?[])", r"[\1]", name) for name in missing]
            snapshot_download(self.repo, revision=self.revision, allow_patterns=exactly)
        self._check(missing)

    def _has_blob(self, name: str) -> bool:
        """Whether the cache has the content of a file already, as that of another commit."""
        listed = self.files[name]
        return (self.folder.parents[1] / "blobs" / (listed.lfs.sha256 if listed.lfs else listed.blob_id)).is_file()

    def _check(self, names: Collection[str]) -> None:
        """Remove files whose content is not what the hub has, and raise CheckpointError."""
        damaged = [name for name in names if not _is_whole(self.folder / name, self.files[name])]
        for name in damaged:
            _blob(self.folder / name).unlink()
            (self.folder / name).unlink(missing_ok=True)
        if damaged:
            raise CheckpointError(
                f"{some(damaged)} of {self.repo} came with another content than the hub says (the hash differs) and "
                "was removed: try again, perhaps without a proxy or mirror"
            )


def open_snapshot(asked: HubId, revision: str | None, memory: Callable[[], int]) -> Snapshot:
    """Find a model, in the hub or else in the cache, and download what describes it, which GGUF files do themselves.

    revision: a branch, a tag or a commit; None for the main branch. memory: tells the bytes of the device, by which a
        quantization is chosen if none was asked for.

    Raises:
        CheckpointError: the model cannot be had, or has no weights that are read.
    """
    repo, tag = asked
    snapshot = _listed(repo, revision)
    sizes = {name: file.size for name, file in snapshot.files.items()}
    if tag is not None or not has_safetensors(sizes):
        return replace(snapshot, gguf=_gguf(repo, tag, sizes, memory))
    if "config.json" not in sizes:
        raise CheckpointError(
            f"{repo} has no config.json, but {some(sorted(sizes))}: give a repository in Hugging Face format"
        )
    snapshot.fetch(description(sizes))
    return snapshot


def fetch_tokenizer(asked: HubId, memory: Callable[[], int]) -> Path:
    """What has the tokenizer of a repository, which may have no weights: a directory, or a GGUF file, downloaded where
    it is not here. `memory` as in `open_snapshot`. Raises CheckpointError."""
    repo, tag = asked
    snapshot = _listed(repo, None)
    if tag is None and not TOKENIZER_FILES.isdisjoint(snapshot.files):
        snapshot.fetch(description(snapshot.files))
        return snapshot.folder
    snapshot = open_snapshot(asked, None, memory)
    snapshot.fetch_weights()
    return snapshot.path


def fetch_files(asked: HubId, names: Collection[str]) -> Path:
    """Some files of a repository's main branch, and no others, downloaded where they are not here: their folder.

    Raises:
        CheckpointError: they cannot be had.
    """
    snapshot = _listed(asked.repo, None)
    if absent := [name for name in names if name not in snapshot.files]:
        raise CheckpointError(f"{asked.repo} has no {some(absent)}, but {some(sorted(snapshot.files))}")
    snapshot.fetch(names)
    return snapshot.folder


def _listed(repo: str, revision: str | None) -> Snapshot:
    """A commit of a repository, of which nothing is downloaded but the list of its files. Raises CheckpointError."""
    from huggingface_hub import constants

    with explained(repo, revision):
        resolved = _resolve(repo, revision)
        folder = Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}", "snapshots", resolved.resolved)
        return Snapshot(repo, resolved, folder, _files(repo, resolved, folder))


def _gguf(repo: str, tag: str | None, sizes: Mapping[str, int], memory: Callable[[], int]) -> Quantization:
    found = quantizations(sizes)
    if not found and tag is None:
        refuse_other_weights(repo, sizes)
    if tag is not None or len(found) == 1:
        return choose(repo, found, tag or found[0].name, 0)
    available = memory()
    chosen = choose(repo, found, None, available)
    logger.info(
        "%s:%s (%s) is the best that fits in this machine's memory of %s; there are %s",
        repo,
        chosen.tag,
        gib(chosen.size),
        gib(available),
        ", ".join(each.tag for each in found),
    )
    return chosen


def _resolve(repo: str, revision: str | None) -> ResolvedRevision:
    """The commit that the hub has now, or the one that is in the cache where the hub cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RevisionResolutionError

    try:
        return HfApi().resolve_revision(repo, revision=revision)
    except HfHubHTTPError as error:
        if not is_temporary(error):
            raise
        try:
            found = HfApi().resolve_revision(repo, revision=revision, local_files_only=True)
        except RevisionResolutionError:
            raise error from None
        logger.warning("%s: the hub refuses for now (%s); what is in the cache is used", repo, error)
        return found


def _files(repo: str, revision: ResolvedRevision, folder: Path) -> dict[str, RepoFile]:
    """All files of a commit. Where the hub cannot be reached, and the cache has no list, as other programs leave it:
    those that are there."""
    import httpx2
    from huggingface_hub import HfApi, RepoFile, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, OfflineModeIsEnabled

    try:
        found = get_cached_repo_tree(repo, revision=revision)
    except CachedRepoTreeNotFoundError:
        try:
            listed = list(HfApi().list_repo_tree(repo, recursive=True, revision=revision.resolved))
            found = [each for each in listed if isinstance(each, RepoFile)]
        except (httpx2.TransportError, OfflineModeIsEnabled):
            found = [
                RepoFile(path=file.relative_to(folder).as_posix(), size=file.stat().st_size, oid="")
                for file in folder.rglob("*")
                if file.is_file()
            ]
            if not any(file.path.endswith((".safetensors", ".gguf")) for file in found):
                raise
    return {file.path: file for file in found}


def _check_room(repo: str, size: int, cache: Path) -> None:
    """Raise CheckpointError if the disk has no room for so many bytes."""
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if size > free:
        raise CheckpointError(
            f"{repo} needs {gib(size)} more in {cache}, and {gib(free)} of its disk are free: make room (kvllm list, "
            "kvllm rm), or set HF_HOME to a directory on a larger disk"
        )


def _blob(file: Path) -> Path:
    """The file that a link of a snapshot names, which may be a link, too, into a store that repositories share."""
    return file.parent / file.readlink() if file.is_symlink() else file


def _is_whole(file: Path, listed: RepoFile) -> bool:
    """Whether the content has the hash that the hub gave: that of SHA-256 for large files, else of git's SHA-1.

    The cache names a file by it. A mirror may name files by something else: then there is none to compare with.
    """
    name = _blob(file).name
    if SHA256.fullmatch(name):
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == name
    if name != listed.blob_id:
        return True
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == name
