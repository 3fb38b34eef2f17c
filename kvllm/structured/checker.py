"""Refusal of grammars that cannot be compiled, or cost too much, before their requests reach the engine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from importlib.util import find_spec
from typing import IO

import msgspec

from kvllm.errors import RequestError
from kvllm.structured import trial
from kvllm.structured.compile import Grammars
from kvllm.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_KNOWN = 1000
"""Rules whose verdict is remembered."""


class GrammarChecker:
    """Tries each new rule in a process of its own, which starts with the first rule. Threads may share it.

    grammars: of the process that samples, if this is the one: a good rule is compiled there at once, and not in a step.
        Elsewhere they only bring the vocabulary.
    """

    def __init__(self, grammars: Grammars, *, samples_here: bool) -> None:
        self._grammars = grammars
        self._samples_here = samples_here
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[bytes, str | None] = {}

    def check(self, rule: StructuredOutputsParams) -> None:
        """Takes a millisecond as a rule, a second or two for the first rule of all. Raises RequestError."""
        if find_spec("llguidance") is None:
            raise RequestError(
                'structured_outputs needs llguidance, which is not installed: pip install "kvllm[serve]"'
                " (or: pip install llguidance)"
            )
        key = msgspec.msgpack.encode(rule)
        known = self._known  # its entries stay, whatever another thread does
        error = known[key] if key in known else self._learn(key)
        if error is not None:
            raise RequestError(error)
        if self._samples_here:
            self._grammars.compile(rule)

    def _learn(self, key: bytes) -> str | None:
        with self._lock:
            error = self._known[key] = self._try(key)
            if len(self._known) > MAX_KNOWN:  # a copy, because others read without the lock
                self._known = dict(list(self._known.items())[MAX_KNOWN // 2 :])
        return error

    def close(self) -> None:
        """End the process. The next rule would start another."""
        with self._lock:
            self._stop()

    def _try(self, message: bytes) -> str | None:
        """The error of a rule, if it has one."""
        if self._process is None:
            self._process = self._start()
        answer = None
        try:
            with suppress(OSError):  # the process has ended
                trial.send(_pipe(self._process.stdin), message)
                answer = trial.receive(_pipe(self._process.stdout))
        finally:
            if answer is None:  # an interrupt may have left an answer unread, too
                self._stop()
        if answer is None:
            return (
                f"structured_outputs takes more than {trial.MAX_SECONDS:g} s of computing time or "
                f"{trial.MAX_BYTES >> 20} MiB of memory to compile: simplify it"
            )
        verdict = msgspec.msgpack.decode(answer, type=trial.Verdict)
        if verdict.not_enforced:
            left_out = ascii("; ".join(verdict.not_enforced))[:500]
            logger.warning("structured outputs do not enforce all of a JSON schema: %s", left_out)
        return verdict.error

    def _start(self) -> subprocess.Popen[bytes]:
        vocabulary = msgspec.msgpack.encode(self._grammars.vocabulary)
        process = subprocess.Popen(
            [sys.executable, "-m", trial.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the engine
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._end = weakref.finalize(self, _end, process)
        trial.send(_pipe(process.stdin), vocabulary)
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._end()
            self._process = None


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # each was asked for
    return stream


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes the pipes and waits
        pass
