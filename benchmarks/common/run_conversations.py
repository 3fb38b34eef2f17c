"""Has conversations with one engine. `benchmarks.prefix_tiers` starts it in a process of its own."""

from __future__ import annotations

from benchmarks.common.child import serve_job
from benchmarks.common.conversations import Conversations, run


def main() -> None:
    serve_job(run, Conversations)


if __name__ == "__main__":
    main()
