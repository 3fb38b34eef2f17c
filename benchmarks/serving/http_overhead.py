"""The price of HTTP: streams of `kvllm serve` beside `LLM.generate` on the same batch, in turns.

    python -m benchmarks.serving.http_overhead

Two processes hold the same model with the same options: a server, and a program that calls `LLM.generate`. Each round
runs the batch once in each, and the order changes from round to round. The client is on the same processors, and does
little more than to keep what it receives. With --patient it lets that pile up in its sockets, so that what is left of
the loss is the server's. The tokens of both must be the same.

Beside the tokens per second there are the engine's own times: a step from its planning to its outputs, the model in it,
and the time around a step. They tell whether the server makes the engine's critical path longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import psutil
import uvloop
from msgspec import Struct
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.common import command_line, machine, report, shapes
from benchmarks.common.child import ROOT
from kvllm import LLM, SamplingParams
from kvllm.client.scrape import Scrape, parse
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.errors import KvLLMError
from kvllm.models.config import load_model_config
from tests.helpers.server import ServerProcess

# LLM.generate


class Batch(Struct):
    """What to generate. options: of the LLM."""

    model: str
    options: dict[str, Any]
    prompts: list[list[int]]
    output_tokens: int


class Round(Struct, kw_only=True):
    """One round. seconds: of the whole batch. step_seconds, model_seconds: of all steps, and of the model in these."""

    seconds: float
    steps: int
    step_seconds: float
    model_seconds: float
    token_ids: list[list[int]]


class GenerateProcess:
    """A process that calls `LLM.generate` on one batch again and again, whenever it is told to."""

    def __init__(self, batch: Batch) -> None:
        command = [sys.executable, "-c", "from benchmarks.serving.http_overhead import serve_rounds; serve_rounds()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._send(msgspec.json.encode(batch))

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self) -> Round:
        """One round. The first one waits until the model is loaded."""
        self._send(b"")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of LLM.generate has ended with code {self._process.wait()}")
        return msgspec.json.decode(line, type=Round)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()


def serve_rounds() -> None:
    """The other end: a Batch comes first, then a line for each round."""
    batch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Batch)
    llm = LLM(batch.model, **batch.options)
    for _ in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(_run(llm, batch)) + b"\n")
        sys.stdout.buffer.flush()


def _run(llm: LLM, batch: Batch) -> Round:
    params = SamplingParams(temperature=0, max_tokens=batch.output_tokens, ignore_eos=True)
    stats = llm.stats()
    steps, step_seconds, model_seconds = stats.steps, stats.step_seconds, stats.decode_seconds + stats.prefill_seconds
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch.prompts], params, use_tqdm=False)
    return Round(
        seconds=time.perf_counter() - begin,
        steps=stats.steps - steps,
        step_seconds=stats.step_seconds - step_seconds,
        model_seconds=stats.decode_seconds + stats.prefill_seconds - model_seconds,
        token_ids=[output.outputs[0].token_ids for output in outputs],
    )


# A client that does next to nothing while streams run: it shares the server's processors

DONE = b"data: [DONE]"
PATIENT_BYTES = 64 << 10
"""Those that a patient client lets pile up in its socket; the kernel takes half of the buffer at most."""


class Stream(asyncio.Protocol):
    """Keeps all that comes of one completion, until the connection ends. first: when its first event came."""

    def __init__(self, request: bytes, is_patient: bool) -> None:
        self.request = request
        self.is_patient = is_patient
        self.content = bytearray()
        self.begin = self.first = time.perf_counter()
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket = transport.get_extra_info("socket")
        cast(asyncio.Transport, transport).write(self.request)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self.first == self.begin and b"data: " in data:
            self.first = time.perf_counter()
            if self.is_patient:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PATIENT_BYTES)
        self.content += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def deltas(self) -> list[list[int]]:
        """The tokens of each event that has some. Raises KvLLMError if the stream was cut off."""
        *events, last = [line for line in self.content.splitlines() if line.startswith(b"data: ")] or [b""]
        if last != DONE:
            raise KvLLMError("a stream has ended without [DONE]")
        chunks = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in events]
        return [c["token_ids"] for chunk in chunks for c in chunk.get("choices", ()) if c["token_ids"]]


async def run_streams(url: str, prompts: list[list[int]], output_tokens: int, is_patient: bool) -> list[Stream]:
    """Send completions all at once, and wait for their ends."""
    address, loop, streams = urlsplit(url), asyncio.get_running_loop(), []
    assert address.hostname and address.port
    options = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    for prompt in prompts:
        body = msgspec.json.encode({"prompt": prompt, **options, "stream": True, "return_token_ids": True})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        make = partial(Stream, head.encode() + body, is_patient)
        streams.append((await loop.create_connection(make, address.hostname, address.port))[1])
    await asyncio.gather(*(stream.ended for stream in streams))
    return streams


# Both sides

BLOCK_SIZE = 16
PROMPT_TOKENS = 32
REASONER = "reasoner"
COUNTERS = ("kvllm:steps_total", "kvllm:step_seconds_total", "kvllm:phase_seconds_total")


class Run(Struct, kw_only=True):
    """One round on one side. Times are means over its steps, in seconds.

    step: from a step's planning to its outputs. model: of that, the workers' time. around: between two steps.
    """

    tokens_per_s: float
    step: float
    model: float
    around: float


class HttpRun(Run, kw_only=True):
    """first_token: median time from a request to its first event, in seconds. deltas: events with tokens, of a token.
    client_cpu: the client's processor time for a token, in seconds."""

    first_token: float
    deltas: float
    client_cpu: float


class Pair(Struct, kw_only=True):
    """Both sides of a round. other_load: cores that other processes kept busy meanwhile, on average."""

    model: str
    generate: Run
    http: HttpRun
    other_load: float

    @property
    def ratio(self) -> float:
        return self.http.tokens_per_s / self.generate.tokens_per_s


class Sides:
    """The two processes, and the batch that both get."""

    def __init__(self, name: str, path: Path, options: dict[str, Any], args: argparse.Namespace) -> None:
        rng, vocab_size = random.Random(0), load_model_config(path).vocab_size
        self.name = name
        self._prompts = [[rng.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(args.batch)]
        self._output_tokens = args.output_tokens
        self._is_patient = args.patient
        threads = str(len(os.sched_getaffinity(0)))
        flags = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        environment = {"OMP_NUM_THREADS": threads, "KVLLM_NUM_THREADS": threads}
        self._server = ServerProcess(str(path), *flags, environment=environment)
        self._program = GenerateProcess(Batch(str(path), options, self._prompts, args.output_tokens))

    def close(self) -> None:
        self._program.close()
        self._server.stop()

    def pair(self, http_first: bool) -> Pair:
        """A round. Raises KvLLMError if the tokens differ."""
        pids = (self._server.process.pid, self._program.pid)
        others_before, begin = machine.cpu_seconds_of_others() - _cpu_seconds(pids), time.perf_counter()
        if http_first:
            http, generate = self._http(), self._generate()
        else:
            generate, http = self._generate(), self._http()
        others = machine.cpu_seconds_of_others() - _cpu_seconds(pids) - others_before
        if http[1] != generate[1]:
            raise KvLLMError("the streams have other tokens than LLM.generate")
        other_load = max(0.0, others / (time.perf_counter() - begin))
        return Pair(model=self.name, generate=generate[0], http=http[0], other_load=other_load)

    def _generate(self) -> tuple[Run, list[list[int]]]:
        found = self._program.run()
        counters = (found.steps, found.step_seconds, found.model_seconds)
        times = _times(found.seconds, *counters)
        return Run(tokens_per_s=sum(map(len, found.token_ids)) / found.seconds, **times), found.token_ids

    def _http(self) -> tuple[HttpRun, list[list[int]]]:
        before, cpu_before, begin = self._scrape(), sum(psutil.Process().cpu_times()[:2]), time.perf_counter()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            running = run_streams(self._server.url, self._prompts, self._output_tokens, self._is_patient)
            streams = runner.run(running)
        seconds, cpu = time.perf_counter() - begin, sum(psutil.Process().cpu_times()[:2]) - cpu_before
        after, deltas = self._scrape(), [stream.deltas() for stream in streams]
        token_ids = [[token_id for delta in of_stream for token_id in delta] for of_stream in deltas]
        tokens = sum(map(len, token_ids))
        steps, step_seconds, phase_seconds = (after.values[name] - before.values[name] for name in COUNTERS)
        run = HttpRun(
            tokens_per_s=tokens / seconds,
            **_times(seconds, steps, step_seconds, phase_seconds),
            first_token=median(stream.first - stream.begin for stream in streams),
            deltas=sum(map(len, deltas)) / tokens,
            client_cpu=cpu / tokens,
        )
        return run, token_ids

    def _scrape(self) -> Scrape:
        return parse(self._server.request("/metrics")[2].decode())


def _times(seconds: float, steps: float, step_seconds: float, model_seconds: float) -> dict[str, float]:
    return {
        "step": step_seconds / steps,
        "model": model_seconds / steps,
        "around": (seconds - step_seconds) / steps,
    }


def _cpu_seconds(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def show(pairs: Sequence[Pair]) -> str:
    """Medians of each model and side, and how much of the speed is left."""
    header = ["model", "side", "tokens/s", "step, ms", "model\nin it, ms", "around\nit, ms"]
    rows, lines = [], []
    for name in dict.fromkeys(pair.model for pair in pairs):
        of_model = [pair for pair in pairs if pair.model == name]
        for title, side in (("LLM.generate", "generate"), ("kvllm serve", "http")):
            runs: list[Run] = [getattr(pair, side) for pair in of_model]
            times = [
                f"{1e3 * median(getattr(run, field) for run in runs):.2f}" for field in ("step", "model", "around")
            ]
            rows.append([name, title, f"{median(run.tokens_per_s for run in runs):,.0f}", *times])
        ratios = [pair.ratio for pair in of_model]
        first, deltas, cpu = (
            median(getattr(p.http, field) for p in of_model) for field in ("first_token", "deltas", "client_cpu")
        )
        lines.append(
            f"{name}: {median(ratios):.3f} of LLM.generate ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} "
            f"rounds); first token after {1e3 * first:.0f} ms, {deltas:.2f} events a token; client {1e6 * cpu:.1f} us "
            f"a token; other processes kept {median(pair.other_load for pair in of_model):.2f} cores busy"
        )
    return "\n".join([report.table(header, rows), "", *lines])


def measure(args: argparse.Namespace, folder: Path) -> list[Pair]:
    pairs = []
    for name in args.models:
        path, options = _model(name, folder, args)
        with closing(Sides(name, path, options, args)) as sides:
            sides.pair(http_first=False)  # a warm-up
            for number in range(args.rounds):
                pairs.append(sides.pair(http_first=number % 2 == 1))
                print(f"{name}, round {number + 1}: {pairs[-1].ratio:.3f}", flush=True)
    return pairs


def _model(name: str, folder: Path, args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """A checkpoint and the options of its engine. Shapes get random weights."""
    length = PROMPT_TOKENS + args.output_tokens
    blocks = args.batch * -(-length // BLOCK_SIZE) + 1
    options = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": args.batch,
        "max_model_len": length,
        "num_gpu_blocks_override": blocks,
    }
    if name == REASONER:
        return DEFAULT_MODEL, options
    path = shapes.named_shape(name, folder)
    write_tokenizer(path, shapes.SHAPES[name]["vocab_size"])
    return path, {**options, "load_format": "dummy"}


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer of up to `vocab_size` tokens, pieces of this repository's pages and sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    files = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "kvllm").rglob("*.py")])
    tokenizer.train([str(file) for file in files], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def run(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    provenance = machine.announce("benchmarks.serving.http_overhead", arguments)
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(args, Path(folder))
    title = f"{args.batch} streams of {PROMPT_TOKENS} + {args.output_tokens} tokens"
    print(f"\n{title}\n\n{show(pairs)}")
    content = [{**msgspec.to_builtins(pair), "ratio": pair.ratio} for pair in pairs]
    report.write_json(args.output / "http_overhead.json", {**provenance, "pairs": content})


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.serving.http_overhead", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=[REASONER, "50m"], choices=(REASONER, *shapes.SHAPES))
    add("--batch", type=int, default=64, help="streams at once (default 64)")
    add("--output-tokens", type=int, default=256, help="of each stream (default 256)")
    add("--rounds", type=int, default=6)
    add("--patient", action="store_true", help="a client that reads each stream's first event and its end")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "batch", "output_tokens", "rounds")
    return args


if __name__ == "__main__":
    command_line.run_script(run)
