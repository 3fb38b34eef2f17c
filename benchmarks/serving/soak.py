"""A server under varied traffic for a long time: its memory, its accounting of blocks, and its answers.

    python -m benchmarks.serving.soak --minutes 20

Users with keys (weights, guaranteed shares, limits on cached prefixes) send requests of random kinds in bursts:
streams and whole answers, one or several completions, compressed or not, with structured outputs, shared prefixes and
priorities; some clients go away, some requests are cancelled, wrong or too many. The pool is small, so windows are
compressed and sequences preempted. The engine checks its block accounting behind every step. One user sends the same
request all the time, and its text must stay the same. Memory is read now and then. At the end the engine must be at
rest with no block owned.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from benchmarks.common import command_line, machine, report
from benchmarks.common.soak_traffic import Traffic
from kvllm.client.scrape import Scrape, parse
from kvllm.config import require
from tests.helpers.server import ServerProcess

KEYS = """
[[keys]]
name = "alice"
key = "sk-alice"
weight = 2
guaranteed_share = 0.25
[[keys]]
name = "bob"
key = "sk-bob"
guaranteed_share = 0.25
max_priority = 0
[[keys]]
name = "reference"
key = "sk-reference"
[[keys]]
name = "carol"
key = "sk-carol"
cached_share = 0.1
"""
FLAGS = (
    *("--block-size", "16", "--num-gpu-blocks-override", "192", "--max-model-len", "1536", "--max-num-seqs", "32"),
    *("--compression", "policy=pressure,window_blocks=3,retain_blocks=2,buffer=8", "--max-num-queued-reqs", "64"),
)
REST_SECONDS = 30.0
COUNTERS = ("kvllm:steps", "vllm:num_preemptions", "kvllm:windows_compressed", "vllm:generation_tokens")


class Reading(Struct):
    """The server at one time. resident: bytes in RAM. files: open file descriptors. Counters count from the start."""

    minutes: float
    resident: int
    files: int
    threads: int
    requests: int
    steps: int
    preemptions: int
    windows_compressed: int
    output_tokens: int


async def watch(server: ServerProcess, traffic: Traffic, minutes: float, every: float) -> list[Reading]:
    """Read the server every so many minutes while the traffic runs, then stop the traffic."""
    begin, readings = time.monotonic(), []
    try:
        while not readings or readings[-1].minutes < minutes:
            await asyncio.sleep(60 * every)
            scrape = await asyncio.to_thread(_scrape, server)
            readings.append(_read(server, traffic, (time.monotonic() - begin) / 60, scrape))
            show(readings[-1])
    finally:
        traffic.stop()
    return readings


def _scrape(server: ServerProcess) -> Scrape:
    return parse(server.request("/metrics", headers={"Authorization": "Bearer sk-alice"})[2].decode())


def _read(server: ServerProcess, traffic: Traffic, minutes: float, scrape: Scrape) -> Reading:
    process = psutil.Process(server.process.pid)
    return Reading(
        round(minutes, 2),
        process.memory_info().rss,
        process.num_fds(),
        process.num_threads(),
        sum(traffic.outcomes.values()) + traffic.references,
        *(int(scrape.values[f"{name}_total"]) for name in COUNTERS),
    )


def show(reading: Reading) -> None:
    print(
        f"{reading.minutes:5.1f} min: {report.mib(reading.resident)} resident, {reading.files} files, "
        f"{reading.threads} threads; {reading.requests:,} requests, {reading.steps:,} steps, "
        f"{reading.preemptions:,} preemptions, {reading.windows_compressed:,} windows",
        flush=True,
    )


def check_rest(server: ServerProcess) -> list[str]:
    """What is wrong with a server that has nothing to do."""
    end = time.monotonic() + REST_SECONDS
    while True:
        values = _scrape(server).values
        left = {name: values[name] for name in ("vllm:num_requests_running", "kvllm:blocks_in_use")}
        if not any(left.values()):
            break
        if time.monotonic() > end:
            return [f"the engine is not at rest: {left}"]
        time.sleep(0.1)
    return [f"the log has an error: {found}" for found in server.tracebacks]


def soak(args: argparse.Namespace) -> tuple[list[Reading], Traffic]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        server = ServerProcess(*FLAGS, "--api-key-file", str(keys), module="benchmarks.common.run_checked_server")
        try:
            traffic = Traffic(server.url, ["sk-alice", "sk-bob", "sk-carol"], "sk-reference", args.seed)

            async def together() -> list[Reading]:
                watching = asyncio.create_task(watch(server, traffic, args.minutes, args.every))
                await traffic.run(args.users)
                return await watching

            readings = asyncio.run(together())
            traffic.wrong += check_rest(server)
        finally:
            if server.stop() != 0:
                print("the server has ended with an error", file=sys.stderr)
    return readings, traffic


def summary(traffic: Traffic) -> str:
    """A table of the requests by kind and status, and what was wrong."""
    rows = [[kind, status, f"{count:,}"] for (kind, status), count in sorted(traffic.outcomes.items())]
    rows.append(["reference, same text", "200", f"{traffic.references:,}"])
    wrong = "nothing was wrong" if not traffic.wrong else f"{len(traffic.wrong)} were wrong:"
    return "\n".join([report.table(["requests", "status", "number"], rows), "", wrong, *traffic.wrong[:20]])


def run(arguments: Sequence[str]) -> None:
    """Soak a server. Exits with an error if anything was wrong."""
    args = parse_arguments(arguments)
    provenance = machine.provenance("benchmarks.serving.soak", arguments)
    print(f"{provenance['command']}\n{machine.describe(provenance['machine'])}", flush=True)
    readings, traffic = soak(args)
    print(f"\n{summary(traffic)}")
    content = {
        "readings": msgspec.to_builtins(readings),
        "outcomes": [[*key, count] for key, count in sorted(traffic.outcomes.items())],
        "references": traffic.references,
        "wrong": traffic.wrong,
    }
    report.write_json(args.output / "soak.json", {**provenance, **content})
    minutes = [each.minutes for each in readings]
    panels = {
        "resident, MiB": {"server": (minutes, [each.resident / report.MIB for each in readings])},
        "preemptions": {"server": (minutes, [float(each.preemptions) for each in readings])},
    }
    report.plot_lines(args.output / "soak.png", "kvllm serve under varied traffic", "minutes", panels)
    print(f"\nWritten: {args.output / 'soak.json'}, {args.output / 'soak.png'}")
    if traffic.wrong:
        sys.exit(1)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.serving.soak", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=20)
    add("--every", type=float, default=1, metavar="MINUTES", help="between two readings (default 1)")
    add("--users", type=int, default=24, help="clients at once (default 24)")
    add("--seed", type=int, default=0)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    for name in ("minutes", "every", "users"):
        require(getattr(args, name) > 0, f"--{name}", getattr(args, name), "above 0")
    return args


def main() -> None:
    command_line.run_script(run)


if __name__ == "__main__":
    main()
