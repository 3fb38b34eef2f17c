"""Runs one job: a job as JSON on stdin, a measurement as JSON on stdout. `benchmarks.common.jobs` starts it."""

from __future__ import annotations

import sys

import msgspec

from benchmarks.common.jobs import Job, run
from kvllm.errors import KvLLMError


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        measurement = run(job)
    except KvLLMError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(measurement))


if __name__ == "__main__":
    main()
