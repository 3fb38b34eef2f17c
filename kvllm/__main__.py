"""`python -m kvllm` is the command `kvllm`."""

from __future__ import annotations

from kvllm.entrypoints.cli import main

if __name__ == "__main__":
    main()
