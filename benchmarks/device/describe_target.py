"""Prints the device as JSON. `benchmarks.device_check` starts it, so that the check itself takes no memory there."""

from __future__ import annotations

import json
import sys

from benchmarks.device.target import Target
from kvllm.errors import KvLLMError


def main() -> None:
    try:
        print(json.dumps(Target.find(dry_run=False).describe()))
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
