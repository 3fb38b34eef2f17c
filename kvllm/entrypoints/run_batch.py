"""Answer a file of requests in OpenAI's batch format, without a server.

    kvllm run-batch path/to/Qwen3-0.6B -i requests.jsonl -o answers.jsonl

A line of the input is like
    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 16}}
and its url /v1/completions or /v1/chat/completions. Answers are written as they come, in any order. The same command
goes on where an earlier run was cut off: what has an answer is left out.

Exit codes: 0 if all requests were answered, 1 if one failed, 2 for wrong usage, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvllm.config import require
from kvllm.engine_args import EngineArgs
from kvllm.entrypoints.engine_flags import add_engine_flags, engine_args_from
from kvllm.entrypoints.serve import add_chat_flags, chat_options
from kvllm.errors import ConfigError
from kvllm.log import warnings_only

if TYPE_CHECKING:
    from kvllm.client.batch import BatchOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, a JSON object in each line")
    add("-o", "--output-file", type=Path, required=True, metavar="FILE", help="answers, appended if there are some")
    add("--served-model-name", metavar="NAME", help='name of the model in the field "model" (default: as MODEL)')
    add("--max-concurrency", type=int, metavar="N", help="requests at once (default: twice --max-num-seqs)")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add_chat_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    from kvllm.client.batch import BatchOutput, check_input  # its packages come with the extra `serve`

    limit = args.max_concurrency
    require(limit is None or limit >= 1, "--max-concurrency", limit, "at least 1")
    engine_args = engine_args_from(args)
    if args.input_file.resolve() == args.output_file.resolve():
        raise ConfigError(f"{args.input_file} cannot be input and output: give another file with -o")
    ids = check_input(args.input_file)
    with BatchOutput.open(args.output_file) as output:
        known = sum(custom_id in output.failed for custom_id in ids)
        if known < len(ids):
            asyncio.run(_answer_all(args, engine_args, output, known, len(ids)))
        failed = sum(output.failed[custom_id] for custom_id in ids)
    print(f"{len(ids)} requests: {len(ids) - failed} answered, {failed} failed; {known} of them in an earlier run")
    if failed:
        raise SystemExit(1)


async def _answer_all(
    args: argparse.Namespace, engine_args: EngineArgs, output: BatchOutput, known: int, total: int
) -> None:
    import httpx2
    from tqdm import tqdm

    from kvllm.client.batch import run_batch
    from kvllm.serving.app import make_app
    from kvllm.serving.parser_choice import with_parsers
    from kvllm.serving.state import ServerOptions, ServerState, start_engine

    names = (args.served_model_name or engine_args.served_name,)
    options = with_parsers(ServerOptions(names, **chat_options(args)), engine_args)
    engine = start_engine(engine_args)
    try:
        state = ServerState(engine_args, options, engine)
        transport = httpx2.ASGITransport(make_app(state))
        limit = args.max_concurrency or 2 * engine_args.max_num_seqs
        hidden = args.disable_tqdm or not sys.stderr.isatty()
        async with httpx2.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
            bar = tqdm(initial=known, total=total, unit="req", disable=hidden)
            with bar, warnings_only("kvllm.serving.app"):
                await run_batch(client, args.input_file, output, limit, bar.update)
    finally:
        engine.shutdown()
