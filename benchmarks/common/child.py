"""Processes that run one job each: the job goes in as JSON on stdin, the result comes out as JSON on stdout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvllm.errors import KvLLMError

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def run_child(
    module: str, title: str, job: msgspec.Struct, result: type[T], environment: Mapping[str, str] | None = None
) -> T:
    """Run `python -m module` on a job. Its output on stderr, such as progress, is shown at once.

    environment: variables in addition to those of this process.

    Raises:
        KvLLMError: the process failed; the message is the one of its own KvLLMError, if it raised one.
    """
    process = subprocess.run(
        [sys.executable, "-m", module],
        input=msgspec.json.encode(job),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )
    if process.returncode != 0:
        message = process.stdout.decode(errors="replace").strip() or f"exit code {process.returncode}, see above"
        raise KvLLMError(f"{title} failed: {message}")
    return msgspec.json.decode(process.stdout, type=result)


def serve_job(run: Callable[[Any], msgspec.Struct], job: type[msgspec.Struct]) -> None:
    """The other end: run the job of stdin and print its result, or the message of a KvLLMError."""
    try:
        result = run(msgspec.json.decode(sys.stdin.buffer.read(), type=job))
    except KvLLMError as error:
        print(error)
        sys.exit(1)
    sys.stdout.buffer.write(msgspec.json.encode(result))
