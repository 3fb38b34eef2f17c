"""Watch a running server: requests, KV cache, speed, latencies, compression.

    kvllm top                      every second, until an interrupt (Ctrl-C)
    kvllm top --once               the figures since the server started
    kvllm top --url http://127.0.0.1:8080 --interval 5

The figures come from the server's /metrics and /load. Output that is no terminal gets them once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from kvllm.client import address
from kvllm.config import require
from kvllm.errors import ServerError

if TYPE_CHECKING:
    from kvllm.client.connection import Connection
    from kvllm.client.scrape import Scrape

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""A screen of its own without a cursor, and back."""
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
BAR = 24
TTFT, GAP = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    address.add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default: 1")
    parser.add_argument("--once", action="store_true", help="print the figures since the server started, and end")


def run(args: argparse.Namespace) -> None:
    from kvllm.client.connection import Connection  # its packages come with the extra `serve`

    require(args.interval > 0, "--interval", args.interval, "seconds, above 0")
    connection = Connection(args.url, args.api_key)
    if args.once or not sys.stdout.isatty():
        now, load = read(connection)
        print("\n".join(view(connection.root, now, None, load)))
    else:
        _refresh(connection, args.interval)


def _refresh(connection: Connection, interval: float) -> None:
    before = None
    sys.stdout.write(ENTER)
    try:
        while True:
            try:
                now, load = read(connection)
                lines, before = view(connection.root, now, before, load), now
            except ServerError as error:
                lines, before = [f"{connection.root}", "", str(error)], None
            width, height = shutil.get_terminal_size()
            shown = [line[:width] + END_OF_LINE for line in lines[: height - 1]]
            sys.stdout.write(HOME + "\n".join(shown) + END_OF_SCREEN)
            sys.stdout.flush()
            time.sleep(interval)
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


def read(connection: Connection) -> tuple[Scrape, int | None]:
    """The metrics, and how many HTTP requests are being answered (None where the server does not say)."""
    from kvllm.client.scrape import parse

    now = parse(connection.get("/metrics").decode(errors="replace"))
    try:
        load = msgspec.json.decode(connection.get("/load"), type=dict[str, int]).get("server_load")
    except (ServerError, msgspec.DecodeError):
        load = None
    return now, load


def view(root: str, now: Scrape, before: Scrape | None, load: int | None) -> list[str]:
    """The lines of the view. before: an earlier scrape, or None for figures since the server started, without rates."""
    from kvllm.client.scrape import counted, quantile

    def value(name: str) -> str:
        return _number(now.values.get(name))

    def total(name: str) -> str:
        return _number(now.values.get(name + "_total"))

    def rate(name: str) -> str:
        rise = counted(name + "_total", now, before) if before else None
        return "" if rise is None or before is None else f"{rise / (now.at - before.at):,.1f}/s"

    def times(name: str) -> str:
        return "".join(f"{_milliseconds(quantile(name, share, now, before)):>12}" for share in (0.5, 0.99))

    since = "since the start" if before is None else f"last {now.at - before.at:.1f} s"
    used = now.values.get("vllm:kv_cache_usage_perc")
    return [
        f"{root}   {', '.join(now.models)}",
        "",
        f"requests   running {value('vllm:num_requests_running')}   waiting {value('vllm:num_requests_waiting')}"
        f"   connections {_number(load)}   ended {total('vllm:request_success')}"
        f"   refused {total('vllm:admission_rejections')}",
        f"KV cache   {_bar(used)}   blocks {value('kvllm:blocks_in_use')} of {value('kvllm:blocks')}",
        "",
        f"{'':<28}{'total':>12}{'rate':>12}",
        *(
            f"{title:<28}{total(name):>12}{rate(name):>12}"
            for title, name in (
                ("prompt tokens", "vllm:prompt_tokens"),
                ("output tokens", "vllm:generation_tokens"),
                ("prompt tokens from cache", "vllm:prefix_cache_hits"),
                ("preemptions", "vllm:num_preemptions"),
                ("windows compressed", "kvllm:windows_compressed"),
                ("KV pairs evicted", "kvllm:evicted_pairs"),
                ("blocks released", "kvllm:blocks_released"),
                ("drafts", "vllm:spec_decode_num_drafts"),
                ("drafted tokens", "vllm:spec_decode_num_draft_tokens"),
                ("right drafted tokens", "vllm:spec_decode_num_accepted_tokens"),
            )
        ),
        "",
        f"{'milliseconds, ' + since:<28}{'p50':>12}{'p99':>12}",
        f"{'time to first token':<28}{times(TTFT)}",
        f"{'between tokens':<28}{times(GAP)}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"


def _bar(share: float | None) -> str:
    if share is None:
        return "-"
    filled = round(BAR * min(share, 1.0))
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {share:.1%}"
