"""Check KvLLM on this machine's GPU, then measure it: four parts of ten minutes, one JSON file, one page of tables.

    python -m benchmarks.device_check
    python -m benchmarks.device_check --sections correctness
    python -m benchmarks.device_check --sections decode --seconds 300
    python -m benchmarks.device_check --dry-run

The parts are sanitizer, correctness, memory and figures, in this order. Each section of a part is a process of its own
with a time limit, so one that fails, hangs or crashes is reported, and the others still run. --dry-run does all of it
with tiny shapes on the CPU, to see that the script works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.common import machine, report
from benchmarks.device import show
from benchmarks.device.log import LEFT_OUT
from benchmarks.device.section import GRACE_SECONDS, PARTS, ROOT, SECTIONS, Section, run_section
from benchmarks.device.target import Target
from kvllm.config import require
from kvllm.errors import KvLLMError

TOTAL_SECONDS = 550.0
"""Seconds of all sections of a part. There is more to do before the first and behind the last."""
LEAST_SECONDS = 20.0
"""Seconds that a section needs at least: torch alone takes several to import."""
RESULTS = ROOT / "benchmarks" / "results"
OPTIONAL_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flashinfer-python", "xformers", "ray")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = ", ".join((*PARTS, *SECTIONS))
    add("--sections", nargs="+", choices=(*PARTS, *SECTIONS), metavar="NAME", help=f"run these alone, of: {names}")
    add("--seconds", type=float, help="limit of each section, instead of a share of ten minutes")
    add("--dry-run", action="store_true", help="tiny shapes on the CPU: no figure is a device's")
    add("--output", type=Path, metavar="DIR", help="default: benchmarks/results; of a dry run: benchmark-output")
    add("--commit", help="of the source, where git cannot tell")
    args = parser.parse_args(arguments)
    require(args.seconds is None or args.seconds > 0, "--seconds", args.seconds, "above 0")
    return args


def describe_device(dry_run: bool) -> dict[str, Any]:
    """By a process of its own: this one must not take memory of the device. Raises KvLLMError if there is none."""
    if dry_run:
        return Target.find(dry_run).describe()
    command = [sys.executable, "-m", "benchmarks.device.describe_target"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode != 0:
        raise KvLLMError(process.stderr.strip().removeprefix("error: "))
    return json.loads(process.stdout.splitlines()[-1])


def find_commit() -> str:
    """Short hash of the checkout, with "-dirty" behind it if files have changed since; "unknown" without git."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def installed_versions() -> dict[str, str]:
    found = {}
    for name in OPTIONAL_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def describe_run(args: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All of the report but its results."""
    device = describe_device(args.dry_run)
    run = machine.provenance("benchmarks.device_check", arguments)
    run["versions"] |= installed_versions()
    return {"dry_run": args.dry_run, "device": device, "commit": args.commit or find_commit(), **run}


def header(run: dict[str, Any]) -> str:
    device = ", ".join(f"{name} {value}" for name, value in run["device"].items() if name != "name")
    lines = [
        f"{run['device']['name']}{device and ': ' + device}",
        machine.describe(run["machine"]),
        ", ".join(f"{name} {value}" for name, value in run["versions"].items()),
        f"commit {run['commit']}: {run['command']}",
    ]
    if run["dry_run"]:
        lines.append("DRY RUN on the CPU with tiny shapes: no figure below is one of a device.")
    return "\n".join(lines)


def run_sections(args: argparse.Namespace, run: dict[str, Any], file: Path) -> dict[str, Any]:
    """Results by section. They are written to `file` as they come."""
    results: dict[str, Any] = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = file.with_suffix(".rows")  # here, so that nothing is lost if this process is killed, too
    for part in chosen_sections(args.sections):
        end = time.monotonic() + TOTAL_SECONDS
        # Of few sections each may have more than of all.
        spare = max(1.0, TOTAL_SECONDS / sum(SECTIONS[name].seconds for name in part))
        for name in part:
            section = SECTIONS[name]
            seconds = args.seconds or min(section.seconds * spare, end - GRACE_SECONDS - time.monotonic())
            if not args.seconds and seconds < LEAST_SECONDS:
                print(f"{name}: there is no time left, run it alone with --sections {name}", flush=True)
                results[name] = not_run(name, section)
            else:
                results[name] = run_section(name, section, seconds, args.dry_run, rows)
                print(f"{name}: {results[name]['status']}, {results[name]['seconds']:.0f} s", flush=True)
            report.write_json(file, {**run, "sections": results})
    rows.unlink(missing_ok=True)
    return results


def chosen_sections(names: Sequence[str] | None) -> list[list[str]]:
    """The sections of this run, part by part. "extension" is always among them, because others measure the compiled
    operators; it shares the time of the first part.

    names: of sections and parts; None: all.
    """
    parts: dict[str, list[str]] = {}
    waiting: list[str] = []
    for name, section in SECTIONS.items():
        if section.part is None:
            waiting.append(name)
        elif names is None or name in names or section.part in names:
            parts.setdefault(section.part, []).extend((*waiting, name))
            waiting = []
    return [*parts.values(), *([waiting] if waiting else [])]


def not_run(name: str, section: Section) -> dict[str, Any]:
    row = {"name": "all", "status": LEFT_OUT, "figures": {}, "reason": "there was no time left"}
    return {"name": name, "title": section.title, "status": LEFT_OUT, "seconds": 0.0, "rows": [row], "error": None}


def check_device(arguments: Sequence[str]) -> bool:
    """Whether no section failed."""
    args = parse_arguments(arguments)
    run = describe_run(args, arguments)
    device = "dry-run" if args.dry_run else re.sub(r"[^a-z0-9]+", "-", run["device"]["name"].lower()).strip("-")
    folder = args.output or (ROOT / "benchmark-output" if args.dry_run else RESULTS)
    file = folder / ("-".join([device, run["commit"], *(args.sections or [])]) + ".json")
    results = run_sections(args, run, file)
    print(f"\n{header(run)}")
    for result in results.values():
        print(f"\n{show.show_section(result, args.dry_run)}")
    if comparison := show.compare(results):
        print(f"\n{comparison}")
    left_out = [name for name, result in results.items() if result["status"] == LEFT_OUT]
    failed = [name for name, result in results.items() if result["status"] not in ("passed", LEFT_OUT)]
    print(f"\nNot passed: {', '.join(failed) or 'none'}. Left out: {', '.join(left_out) or 'none'}. Written: {file}")
    return not failed


def main() -> None:
    try:
        sys.exit(0 if check_device(sys.argv[1:]) else 1)
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
