"""Where the package's log goes: standard error, at the level of the environment variable KVLLM_LOG_LEVEL.

Only the logger "kvllm" is set up, never the root logger. An application that has handlers of its own on the root logger
gets the records there, and standard error gets none.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvllm.errors import ConfigError

VARIABLE = "KVLLM_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


class StandardError(logging.Handler):
    """Writes to `sys.stderr` as it is at that time, unless the root logger has handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None and not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr, flush=True)


def set_up() -> None:
    """Give the logger "kvllm" its level, INFO unless the variable names another, and its handler, once.

    Raises:
        ConfigError: the variable names no level.
    """
    logger, name = logging.getLogger("kvllm"), os.environ.get(VARIABLE)
    if name and name.upper() not in LEVELS:
        raise ConfigError(f"{VARIABLE}={name!r} is not allowed: choose one of {', '.join(LEVELS)}")
    if name:
        logger.setLevel(name.upper())
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, StandardError) for handler in logger.handlers):
        handler = StandardError()
        handler.setFormatter(logging.Formatter(FORMAT, "%m-%d %H:%M:%S"))
        logger.addHandler(handler)


@contextmanager
def warnings_only(name: str) -> Iterator[None]:
    """Inside of this, only warnings and errors of a logger: a line for each engine would tear a progress bar."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
