"""Ranks that die, or hang, while requests decode: a check of the tokens, and the time of the repair.

    python -m benchmarks.worker_faults
    python -m benchmarks.worker_faults --stop

The requests run twice on Ray: undisturbed, and with a signal to one rank at random moments of decoding. The signal is
SIGKILL or, with --stop, SIGSTOP. Half of the requests are greedy, half are sampled. All must end with the tokens of the
undisturbed run, or the script fails. Times count from the signal: until the fault is noticed, until new workers have
the model, until the next token. The figures go to worker_faults.json.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from msgspec import Struct, to_builtins

from benchmarks.common import command_line, machine, report, shapes, workloads
from benchmarks.common.internals import engine_of
from benchmarks.common.workloads import Request
from kvllm import LLM, SamplingParams
from kvllm.distributed.executor import RayExecutor
from kvllm.errors import KvLLMError
from kvllm.outputs import RequestOutput

INPUT_LEN = 32
LAST_FAULT = 0.9
"""Share of the tokens before the last fault, which must have something left to disturb."""
TIMES = {"noticed_seconds": "noticed", "restarted_seconds": "workers restarted", "resumed_seconds": "next token"}


class Fault(Struct):
    """tokens: the number generated before the fault. Times are in seconds after the signal."""

    rank: int
    tokens: int
    noticed_seconds: float = 0.0
    restarted_seconds: float = 0.0
    resumed_seconds: float = 0.0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.worker_faults", __doc__)
    add = parser.add_argument
    add("--model", default="50m", help=shapes.MODEL_HELP)
    add("--tensor-parallel-size", type=int, default=2, help="ranks (default 2)")
    add("--faults", type=int, default=10, help="number of faults (default 10)")
    add("--stop", action="store_true", help="let ranks hang instead of ending them")
    add("--requests", type=int, default=32)
    add("--output-len", type=int, default=128)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "faults", "requests", "output_len")
    return args


def start(args: argparse.Namespace, path: Path) -> LLM:
    """The engine, in float32: only there it promises the same tokens on every path of computation."""
    return LLM(
        path,
        dtype="float32",
        load_format="dummy" if args.model in shapes.SHAPES else "auto",
        block_size=16,
        num_gpu_blocks_override=args.requests * -(-(INPUT_LEN + args.output_len) // 16),
        tensor_parallel_size=args.tensor_parallel_size,
        distributed_executor_backend="ray",
        max_worker_restarts=args.faults,
    )


def add_requests(llm: LLM, requests: list[Request]) -> list[RequestOutput]:
    outputs = []
    for i, request in enumerate(requests):
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=request.output_length, ignore_eos=True)
        outputs.append(llm.llm_engine.add_request(str(i), request.prompt_token_ids, params))
    return outputs


def run_undisturbed(llm: LLM, requests: list[Request]) -> list[RequestOutput]:
    outputs = add_requests(llm, requests)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return outputs


def run_disturbed(
    llm: LLM, requests: list[Request], faults: list[Fault], number: int, rng: random.Random
) -> list[RequestOutput]:
    """The same with faults. A fault comes once its tokens are generated and the one before is repaired, somewhere in a
    step."""
    engine, executor = llm.llm_engine, engine_of(llm).executor
    assert isinstance(executor, RayExecutor)  # as `start` asks for
    restarts = executor.restart_seconds
    outputs, before, due = add_requests(llm, requests), llm.stats().output_tokens, faults[:]
    sent: list[float] = []

    def send(pid: int) -> None:
        sent.append(time.monotonic())
        os.kill(pid, number)

    is_under_way, noticed, now, step_seconds = False, False, time.monotonic(), 0.0
    while engine.has_unfinished_requests():
        if due and not is_under_way and llm.stats().output_tokens - before >= due[0].tokens:
            is_under_way = True
            threading.Timer(rng.uniform(0, step_seconds), send, [executor.pids[due[0].rank]]).start()
        touched = engine.step()
        begin, now = now, time.monotonic()
        step_seconds = now - begin
        if is_under_way and not noticed and len(restarts) > len(faults) - len(due):
            noticed = True
            due[0].restarted_seconds = now - sent[-1]
            due[0].noticed_seconds = now - sent[-1] - restarts[-1]
        elif noticed and touched:
            due.pop(0).resumed_seconds = now - sent[-1]
            is_under_way = noticed = False
    if due:
        raise KvLLMError(f"{len(due)} faults came too late: give --output-len more than {requests[0].output_length}")
    return outputs


def show(faults: list[Fault]) -> str:
    columns = [[getattr(fault, name) for fault in faults] for name in TIMES]
    rows = [
        [str(i), str(fault.rank), str(fault.tokens), *(f"{seconds:.2f}" for seconds in times)]
        for i, (fault, *times) in enumerate(zip(faults, *columns, strict=True), start=1)
    ]
    for name, of_column in (("median", median), ("longest", max)):
        rows.append([name, "", "", *(f"{of_column(column):.2f}" for column in columns)])
    return report.table(["fault", "rank", "after\ntokens", *(f"{title}\nafter s" for title in TIMES.values())], rows)


def run_faults(arguments: Sequence[str]) -> None:
    """Raises KvLLMError if a request has other tokens than undisturbed."""
    args = parse_arguments(arguments)
    provenance = machine.announce("benchmarks.worker_faults", arguments)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        llm = start(args, shapes.find_model(args.model, Path(scratch)))
        try:
            lengths = [(INPUT_LEN, args.output_len)] * args.requests
            requests = workloads.random_requests(rng, lengths, llm.model_config.vocab_size)
            moments = sorted(rng.uniform(0, LAST_FAULT) for _ in range(args.faults))
            tokens = args.requests * args.output_len
            faults = [Fault(rng.randrange(args.tensor_parallel_size), int(at * tokens)) for at in moments]
            expected = run_undisturbed(llm, requests)
            found = run_disturbed(llm, requests, faults, signal.SIGSTOP if args.stop else signal.SIGKILL, rng)
        finally:
            llm.llm_engine.close()
    same = sum(a.outputs == b.outputs for a, b in zip(expected, found, strict=True))
    print(f"{show(faults)}\n\n{same} of {args.requests} requests have the tokens of the undisturbed run")
    content = {"requests_with_the_same_tokens": same, "faults": to_builtins(faults)}
    report.write_json(args.output / "worker_faults.json", provenance | content)
    if same < args.requests:
        raise KvLLMError(f"{args.requests - same} requests have other tokens than in the undisturbed run")


if __name__ == "__main__":
    command_line.run_script(run_faults)
