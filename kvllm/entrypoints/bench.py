"""Measure a running server under load: latencies, throughput, goodput.

    kvllm bench serve --num-prompts 200 --request-rate 4
    kvllm bench serve --dataset-name trace --dataset-path conversation_trace.jsonl --self-timed

`kvllm bench serve --help` lists the options.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from kvllm.client import address
from kvllm.config import require
from kvllm.entrypoints.model_argument import add_model_argument
from kvllm.entrypoints.settings import parse_json_object, parse_request_compression
from kvllm.errors import ConfigError

SERVE_HELP = """Send requests to a running server and measure what its clients see.

Open loop: requests arrive at a rate, whether the server keeps up or not.
    kvllm bench serve --num-prompts 200 --request-rate 4 --goodput ttft:500 tpot:50
Closed loop: a number of clients, of which each sends its next request when it has its answer.
    kvllm bench serve --num-prompts 200 --max-concurrency 16
A trace of a service, at the times of the trace, with the results as JSON and as a plot:
    kvllm bench serve --dataset-name trace --dataset-path AzureLLMInferenceTrace_conv.csv --self-timed \\
        --save-result --result-dir results --plot

Exit codes: 0 if all requests ended well, 1 if one failed, 2 for wrong usage, 130 after an interrupt.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    serve = subparsers.add_parser("serve", help="measure a running server", description=SERVE_HELP)
    add_model_argument(serve, "name of the model (default: the first that the server lists)")
    address.add_arguments(serve, "--base-url")
    _add_request_arguments(serve.add_argument_group("requests"))
    _add_prompt_arguments(serve.add_argument_group("prompts"))
    _add_load_arguments(serve.add_argument_group("load"))
    _add_result_arguments(serve.add_argument_group("results"))


def _add_request_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--endpoint-type", choices=("completions", "chat"), default="completions", help="default: completions")
    add("--ignore-eos", action="store_true", help="generate all tokens that are asked for, past the end of the text")
    add("--temperature", type=float, metavar="T", help="default: the server's")
    settings = "compression settings of every request, as far as the server allows them"
    add("--compression", default="", metavar="KEY=VALUE,...|JSON", help=settings)
    add("--extra-body", metavar="JSON", help='further fields of every request, like {"top_p": 0.9}')


def _add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    names = (
        "random: random tokens (default); custom: JSONL with prompt or messages, and output_tokens; "
        "trace: random tokens with the lengths of an Azure (.csv) or Mooncake (.jsonl) trace"
    )
    add("--dataset-name", choices=("random", "custom", "trace"), default="random", help=names)
    add("--dataset-path", type=Path, metavar="FILE", help="of custom and trace")
    add("--num-prompts", type=int, default=1000, metavar="N", help="default: 1000")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    add("--random-input-len", type=int, default=1024, metavar="N", help="tokens of a prompt (default: 1024)")
    add("--random-output-len", type=int, default=128, metavar="N", help="tokens to generate (default: 128)")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="both lengths vary by it, 0 to below 1")
    add("--random-prefix-len", type=int, default=0, metavar="N", help="further tokens, with which all prompts begin")
    add("--custom-output-len", type=int, default=256, metavar="N", help="where the file says none (default: 256)")


def _add_load_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--request-rate", type=float, default=float("inf"), metavar="R", help="requests/s (default: inf, all at once)")
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson (default); less: bursts; more: even")
    add("--self-timed", action="store_true", help="requests arrive when they did in the trace")
    add("--max-concurrency", type=int, metavar="N", help="most requests under way (default: no limit)")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before, which do not count (default: 0)")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _add_result_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits of a good request: ttft, tpot, e2el")
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAME,...", help="latencies to print")
    add("--metric-percentiles", default="90,99", metavar="P,...", help="beside mean and median (default: 90,99)")
    add("--save-result", action="store_true", help="write the figures, the machine and the command as JSON")
    add("--save-detailed", action="store_true", help="write the figures of every request, too")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="of the files (default: where you are)")
    add("--result-filename", metavar="NAME", help="default: made of rate, model and time")
    add("--plot", action="store_true", help="write a PNG of the same name; needs matplotlib")


def run(args: argparse.Namespace) -> None:
    from kvllm.client.bench import bench  # its packages come with the extra `serve`

    _check(args)
    if not asyncio.run(bench(args, _extra_body(args))):
        raise SystemExit(1)


def _check(args: argparse.Namespace) -> None:
    require(args.request_rate > 0, "--request-rate", args.request_rate, "requests/s, above 0")
    require(args.burstiness > 0, "--burstiness", args.burstiness, "above 0")
    for name in ("num_prompts", "random_input_len", "random_output_len", "custom_output_len"):
        require(getattr(args, name) >= 1, "--" + name.replace("_", "-"), getattr(args, name), "at least 1")
    for name in ("random_prefix_len", "num_warmups"):
        require(getattr(args, name) >= 0, "--" + name.replace("_", "-"), getattr(args, name), "at least 0")
    require(0 <= args.random_range_ratio < 1, "--random-range-ratio", args.random_range_ratio, "0 to below 1")
    limit = args.max_concurrency
    require(limit is None or limit >= 1, "--max-concurrency", limit, "at least 1")
    if (args.dataset_path is None) != (args.dataset_name == "random"):
        raise ConfigError(f"--dataset-name {args.dataset_name}: custom and trace need --dataset-path, random has none")
    if args.self_timed and (args.dataset_name != "trace" or args.request_rate < float("inf")):
        raise ConfigError("--self-timed takes the arrivals of a trace: give --dataset-name trace and no --request-rate")


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    extra = parse_json_object("--extra-body", args.extra_body) if args.extra_body else {}
    if args.compression:
        extra["compression"] = parse_request_compression(args.compression)
    if args.ignore_eos:
        extra["ignore_eos"] = True
    if args.temperature is not None:
        extra["temperature"] = args.temperature
    return extra
