"""Runs one section of a device check. `benchmarks.device.section` starts it in a process of its own."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
from pathlib import Path

from benchmarks.device.log import Log


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.section_process", description=__doc__)
    parser.add_argument("module")
    parser.add_argument("seconds", type=float)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    faulthandler.enable()
    log = Log(args.rows, args.seconds)
    from benchmarks.device.target import Target  # torch takes seconds to import

    importlib.import_module(args.module).run(Target.find(args.dry_run), log)


if __name__ == "__main__":
    main()
