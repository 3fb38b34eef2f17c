"""Runs one trial: a job as JSON on stdin, an outcome as JSON on stdout. `benchmarks.common.trials` starts it."""

from __future__ import annotations

import sys

import msgspec

from benchmarks.common.trials import Job, run
from kvllm.errors import KvLLMError


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        outcome = run(job)
    except KvLLMError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
