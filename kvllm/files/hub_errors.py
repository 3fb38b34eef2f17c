"""What huggingface_hub raises, as errors that say what was asked for and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvllm.errors import CheckpointError
from kvllm.spelling import did_you_mean


def not_cached(repo: str, revision: str | None) -> CheckpointError:
    """The error of a model that is needed while nothing may be downloaded."""
    from huggingface_hub import constants

    at = f" at revision {revision}" if revision else ""
    return CheckpointError(
        f"{repo}{at} is not in the cache {constants.HF_HUB_CACHE}, or not all of it, and HF_HUB_OFFLINE forbids to "
        f"download it: unset HF_HUB_OFFLINE, or run kvllm pull {repo} first; kvllm list shows what is there"
    )


def is_temporary(error: Exception) -> bool:
    """Whether the hub refuses for now alone, so that what is in the cache may serve."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code in (408, 429)


@contextmanager
def explained(repo: str, revision: str | None) -> Iterator[None]:
    """Inside of this, errors of the hub, the network and the disk become CheckpointError.

    repo: ORG/NAME. revision: what was asked for.
    """
    import httpx2
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RevisionResolutionError

    try:
        yield
    except (RevisionResolutionError, HFValidationError, httpx2.HTTPError, OSError) as error:
        cause = _cause(error)
        if isinstance(cause, OfflineModeIsEnabled):
            raise not_cached(repo, revision) from error
        raise CheckpointError(_explain(cause, repo, revision)) from error


def _cause(error: BaseException) -> BaseException:
    """What is wrong, below the errors that say only that a file could not be had."""
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionResolutionError

    while isinstance(error, RevisionResolutionError | LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _explain(error: BaseException, repo: str, revision: str | None) -> str:
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated: accept its terms at {hub}/{repo}, and give a token of that account in HF_TOKEN "
            f"({hub}/settings/tokens), or run hf auth login"
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return (
            f"{repo} is neither a directory nor a model at {hub}{_near(repo)}: give the directory of a checkpoint, or "
            "the id ORG/NAME of a model; a private one needs a token in HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision}: give a branch, a tag or a commit of {hub}/{repo}, or none for main"
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error.response.status_code, repo, hub)
    if isinstance(error, httpx2.HTTPError):
        return (
            f"{repo} is no directory, and {hub} cannot be reached ({type(error).__name__}: {error}): check the path; "
            "for a model of the hub, check network, proxy and HF_ENDPOINT, or choose one that kvllm list shows"
        )
    return _explain_disk(error, repo)


def _explain_status(status: int, repo: str, hub: str) -> str:
    if status == 401:
        return f"{hub} refuses {repo} without a valid token (401): give one in HF_TOKEN, or none for a public model"
    if status == 403:
        return f"{hub} forbids {repo} (403): give a token in HF_TOKEN that may read it ({hub}/settings/tokens)"
    if status == 429:
        return (
            f"{hub} gives {repo} to this address no more for now (429, too many requests): wait some minutes; with a "
            "token in HF_TOKEN more requests are allowed"
        )
    if status >= 500:
        return f"{hub} fails ({status}) at {repo}, after some tries: try again later; complete files are not lost"
    return f"{hub} refuses {repo} ({status}): check the id, the revision and HF_ENDPOINT"


def _explain_disk(error: BaseException, repo: str) -> str:
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache} became full while {repo} was downloaded: make room (kvllm rm), or set HF_HOME"
    if isinstance(error, PermissionError):
        return f"{cache} cannot be written ({error}), so {repo} cannot be downloaded: set HF_HOME to another directory"
    return f"{repo} cannot be downloaded to {cache} ({error}): try again; complete files are not lost"


def _near(repo: str) -> str:
    """A directory with nearly that name."""
    folder, name = Path(repo).parent, Path(repo).name
    if not folder.is_dir():
        return ""
    return did_you_mean(repo, [str(folder / each.name) for each in folder.iterdir() if each.name != name])
