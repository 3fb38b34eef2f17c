"""Calls in processes of their own: the argument goes in as JSON on stdin, the result comes out as JSON on stdout."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, get_type_hints

import msgspec

from kvllm.errors import KvLLMError

ROOT = Path(__file__).parents[2]
J = TypeVar("J", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


def run_child(run: Callable[[J], R], job: J, title: str, environment: Mapping[str, str] | None = None) -> R:
    """Call `run`, a function of a module, in a new process. Its output on stderr, such as progress, is shown at once.

    environment: variables in addition to those of this process.

    Raises:
        KvLLMError: the process failed; the message is the one of its own KvLLMError, if it raised one.
    """
    spec = sys.modules[run.__module__].__spec__  # its name is that of the module, where __name__ is "__main__"
    assert spec is not None
    process = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import serve; serve({spec.name!r}, {run.__name__!r})"],
        input=msgspec.json.encode(job),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )
    if process.returncode != 0:
        message = process.stdout.decode(errors="replace").strip() or f"exit code {process.returncode}, see above"
        raise KvLLMError(f"{title} failed: {message}")
    return msgspec.json.decode(process.stdout, type=get_type_hints(run)["return"])


def serve(module: str, name: str) -> None:
    """The other end: print what the function returns for the job of stdin, or the message of a KvLLMError."""
    run = getattr(importlib.import_module(module), name)
    job_type, _ = get_type_hints(run).values()
    try:
        result = run(msgspec.json.decode(sys.stdin.buffer.read(), type=job_type))
    except KvLLMError as error:
        print(error)
        sys.exit(1)
    sys.stdout.buffer.write(msgspec.json.encode(result))
