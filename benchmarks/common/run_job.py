"""Runs one variant of the engine. `benchmarks.common.jobs` starts it in a process of its own."""

from __future__ import annotations

from benchmarks.common.child import serve_job
from benchmarks.common.jobs import Job, run


def main() -> None:
    serve_job(run, Job)


if __name__ == "__main__":
    main()
