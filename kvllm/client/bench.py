"""One run of `kvllm bench serve`: prompts, warm-up, load, figures and files."""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import sys
import tempfile
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

import kvllm
from kvllm.client import summary
from kvllm.client.address import headers, root_of
from kvllm.client.events import first_model
from kvllm.client.load import ROUTES, Prompt, Run, Target, arrival_times, open_session, send_all
from kvllm.client.prompts import prompts_of_file, random_prompts, random_texts, tokenize_pieces
from kvllm.errors import ServerError
from kvllm.processor import cpu_name
from kvllm.simulation.workload import load_workload, read_timed_trace, synthetic
from kvllm.stats import DraftCounts

BUSY = 0.8
"""Share of a core above which the client's own work may delay its time stamps."""


async def bench(args: argparse.Namespace, extra: dict[str, Any]) -> bool:
    """Measure a server and print the figures. extra: fields of every request. Returns whether all requests ended well.

    Raises ConfigError and ServerError if the load cannot begin.
    """
    goodput = summary.parse_goodput(args.goodput)
    metrics = summary.parse_metrics(args.percentile_metrics)
    percentiles = summary.parse_percentiles(args.metric_percentiles)
    root = root_of(args.url)
    check_folder(args)
    async with open_session(headers(args.api_key)) as session:
        server = await describe_server(session, root)
        model = args.model or server["model"]
        prompts = await make_prompts(args, session, root, model, server["max_model_len"])
        target = Target(root, ROUTES[args.endpoint_type], model, extra)
        if args.num_warmups:
            warmups = [msgspec.structs.replace(prompts[i % len(prompts)], arrival=0.0) for i in range(args.num_warmups)]
            await send_all(session, target, warmups, args.max_concurrency, lambda: None)
        before = await read_drafts(session, root)
        with tqdm(total=len(prompts), unit="req", disable=args.disable_tqdm or not sys.stderr.isatty()) as bar:
            run = await send_all(session, target, prompts, args.max_concurrency, bar.update)
        drafts = summarize_drafts(before, await read_drafts(session, root))
    measured = summary.summarize(run, goodput, percentiles) | drafts
    result = provenance(args, server | {"model": model}) | measured
    print(summary.table(result, metrics, percentiles))
    for line in [*summary.examples_of_errors(run), *_warnings(run)]:
        print(line, file=sys.stderr)
    write_files(args, result, run)
    return result["failed"] == 0


async def describe_server(session: aiohttp.ClientSession, root: str) -> dict[str, Any]:
    """The first model that a server lists, the most tokens of a request (None where it does not say), its version."""
    try:
        async with session.get(f"{root}/v1/models") as response:
            if response.status != 200:
                raise ServerError(f"{root}/v1/models answers {response.status}: is the key right?")
            model = first_model(root, await response.read())
        async with session.get(f"{root}/version") as response:
            named = await response.json() if response.status == 200 else {}
    except aiohttp.ClientError as error:
        raise ServerError(f"{root} cannot be reached: {error}; kvllm serve starts a server") from None
    return {"model": model.id, "max_model_len": model.max_model_len, "version": named.get("version")}


async def make_prompts(
    args: argparse.Namespace, session: aiohttp.ClientSession, root: str, model: str, max_model_len: int | None
) -> list[Prompt]:
    """The prompts that the options ask for, each with its arrival."""
    chat = args.endpoint_type == "chat"
    arrivals = None
    if args.dataset_name == "custom":
        prompts = prompts_of_file(args.dataset_path, args.num_prompts, args.custom_output_len, chat=chat)
    else:
        if args.self_timed:
            lengths, arrivals = read_timed_trace(args.dataset_path, args.num_prompts, max_model_len or sys.maxsize)
        elif args.dataset_name == "trace":
            lengths = load_workload(args.dataset_path, max_model_len or sys.maxsize, args.num_prompts).lengths
        else:
            rng, sizes = random.Random(args.seed), (args.random_input_len, args.random_output_len)
            lengths = synthetic(rng, args.num_prompts, *sizes, args.random_range_ratio)
        pieces = await tokenize_pieces(session, root, model)
        prompts = (random_texts if chat else random_prompts)(pieces, lengths, args.seed, args.random_prefix_len)
    arrivals = arrivals or arrival_times(len(prompts), args.request_rate, args.burstiness, args.seed)
    return [msgspec.structs.replace(prompt, arrival=when) for prompt, when in zip(prompts, arrivals, strict=True)]


def provenance(args: argparse.Namespace, server: dict[str, Any]) -> dict[str, Any]:
    """The command, the machine of the client and the versions: what is needed to judge and to repeat a run."""
    rate = args.request_rate
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": _command(args.api_key),
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "system": platform.platform(),
            "load_average": round(os.getloadavg()[0], 2),
        },
        "versions": {"kvllm": kvllm.__version__, "python": platform.python_version(), "aiohttp": version("aiohttp")},
        "server": server,
        "model_id": server["model"],
        "endpoint_type": args.endpoint_type,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "request_rate": rate if rate < float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
    }


def _command(api_key: str | None) -> str:
    """The command line without the key."""
    shown = [argument.replace(api_key, "...") if api_key else argument for argument in sys.argv[1:]]
    return shlex.join(["kvllm", *shown])


def _warnings(run: Run) -> list[str]:
    share = run.cpu_seconds / run.seconds
    if share < BUSY:
        return []
    return [f"warning: the client used {share:.0%} of a core, so its own work may have delayed what it measured"]


def check_folder(args: argparse.Namespace) -> None:
    """Make the folder of the files, if any are asked for. Raises OSError if none can be written there, which is better
    known before the load."""
    if args.save_result or args.save_detailed or args.plot:
        folder = (args.result_dir / (args.result_filename or "result.json")).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_files(args: argparse.Namespace, result: dict[str, Any], run: Run) -> None:
    """Write the JSON file and the plot, as far as they are asked for."""
    rate, now = f"{result['request_rate']}qps", datetime.now().strftime("%Y%m%d-%H%M%S")
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    default = f"{args.endpoint_type}-{rate}{limit}-{Path(result['model_id']).name}-{now}.json"
    path = args.result_dir / (args.result_filename or default)
    if args.save_detailed:
        result = result | _details(run)
    if args.save_result or args.save_detailed:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        print(f"Written: {path}")
    if args.plot:
        picture = path.with_name(path.name.removesuffix(".json") + ".png")
        summary.plot(picture, f"{result['model_id']}, {rate}{limit}", run)
        print(f"Written: {picture}")


def _details(run: Run) -> dict[str, list[Any]]:
    return {
        "start_times": [each.start for each in run.outcomes],
        "input_lens": [each.prompt_len for each in run.outcomes],
        "output_lens": [each.output_len for each in run.outcomes],
        "ttfts": [each.ttft for each in run.outcomes],
        "itls": [each.itl for each in run.outcomes],
        "latencies": [each.latency for each in run.outcomes],
        "errors": [each.error for each in run.outcomes],
    }


PREFIX = "vllm:spec_decode_num_"


async def read_drafts(session: aiohttp.ClientSession, root: str) -> DraftCounts:
    """The counts since the server started; none of one that has no such metrics, or has died under the load."""
    counts = DraftCounts()
    try:
        async with session.get(f"{root}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
        families = list(text_string_to_metric_families(text))
    except (aiohttp.ClientError, ValueError):
        return counts
    by_position: dict[int, int] = {}
    for family in families:
        for sample in family.samples if family.name.startswith(PREFIX) else ():
            name, value = sample.name.removeprefix(PREFIX).removesuffix("_total"), int(sample.value)
            if name == "drafts":
                counts.drafts += value
            elif name == "draft_tokens":
                counts.tokens += value
            elif name == "accepted_tokens_per_pos":
                position = int(sample.labels["position"])
                by_position[position] = by_position.get(position, 0) + value
    counts.right = [by_position[position] for position in sorted(by_position)]
    return counts


def summarize_drafts(before: DraftCounts, after: DraftCounts) -> dict[str, Any]:
    """The fields of the result, with vLLM's names; none where nothing was drafted."""
    drafts, tokens = after.drafts - before.drafts, after.tokens - before.tokens
    if drafts <= 0 or tokens <= 0:
        return {}
    earlier = before.right + [0] * (len(after.right) - len(before.right))
    right = [now - then for now, then in zip(after.right, earlier, strict=True)]
    return {
        "spec_decode_acceptance_rate": 100 * sum(right) / tokens,
        "spec_decode_acceptance_length": 1 + sum(right) / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": sum(right),
        "spec_decode_per_position_acceptance_rates": [each / drafts for each in right],
    }
