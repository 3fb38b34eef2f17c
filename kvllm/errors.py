"""Every error a user can cause. Each message says what was given, what is allowed, and what to do."""

from __future__ import annotations


class KvLLMError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(KvLLMError, ValueError):
    """An engine, compression or sampling option has a value that cannot work."""


class CheckpointError(KvLLMError, ValueError):
    """The model is missing, cannot be downloaded, incomplete, of an unknown architecture, or does not fit its
    config."""


class RequestError(KvLLMError, ValueError):
    """One request cannot be served. Other requests are not affected.

    param: the place in the request that is wrong, such as "messages[1].content", if it is one place.
    """

    def __init__(self, *args: object, param: str | None = None) -> None:
        super().__init__(*args)
        self.param = param


class EngineDeadError(KvLLMError, RuntimeError):
    """The engine has failed, or was shut down, and serves nothing any more. Its cause is what it failed with."""


class OutOfBlocksError(KvLLMError, RuntimeError):
    """The block pool was asked for more blocks than it has: the scheduler must check before it allocates."""


class WorkerError(KvLLMError, RuntimeError):
    """A rank died, hangs or failed. The message says which, and carries its own traceback if it left one."""


class ServerError(KvLLMError, RuntimeError):
    """A server cannot be reached, refused a request, or broke off its answer."""
