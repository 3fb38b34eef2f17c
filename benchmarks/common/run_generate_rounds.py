"""Calls `LLM.generate` when it is told to. `benchmarks.common.generate_rounds` starts it in a process of its own."""

from __future__ import annotations

from benchmarks.common.generate_rounds import serve_rounds


def main() -> None:
    serve_rounds()


if __name__ == "__main__":
    main()
