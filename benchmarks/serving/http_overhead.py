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
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
from msgspec import Struct
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.common import command_line, machine, report, shapes
from benchmarks.common.child import ROOT
from benchmarks.common.streams import Stream, run_streams
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
    """first_token, last_first_token: median and longest time from a request to its first event, in seconds. deltas:
    events with tokens, of a token. client_cpu: the client's processor time for a token, in seconds."""

    first_token: float
    last_first_token: float
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
        common = {"max_tokens": self._output_tokens, "temperature": 0, "ignore_eos": True}
        before, cpu_before = self._scrape(), sum(psutil.Process().cpu_times()[:2])
        bodies = [{"prompt": prompt, **common} for prompt in self._prompts]
        seconds, streams = run_streams(self._server.url, bodies, self._is_patient)
        cpu, after = sum(psutil.Process().cpu_times()[:2]) - cpu_before, self._scrape()
        return _http_run(seconds, streams, before, after, cpu), [stream.token_ids for stream in streams]

    def _scrape(self) -> Scrape:
        return parse(self._server.request("/metrics")[2].decode())


def _http_run(seconds: float, streams: Sequence[Stream], before: Scrape, after: Scrape, cpu: float) -> HttpRun:
    if not all(stream.is_whole for stream in streams):
        raise KvLLMError("a stream has ended without [DONE]")
    tokens = sum(len(stream.token_ids) for stream in streams)
    steps, step_seconds, phase_seconds = (after.values[name] - before.values[name] for name in COUNTERS)
    firsts = [stream.first_seconds for stream in streams]
    return HttpRun(
        tokens_per_s=tokens / seconds,
        **_times(seconds, steps, step_seconds, phase_seconds),
        first_token=median(firsts),
        last_first_token=max(firsts),
        deltas=sum(stream.deltas for stream in streams) / tokens,
        client_cpu=cpu / tokens,
    )


def _times(seconds: float, steps: float, step_seconds: float, model_seconds: float) -> dict[str, float]:
    return {
        "step": step_seconds / steps,
        "model": model_seconds / steps,
        "around": (seconds - step_seconds) / steps,
    }


def _cpu_seconds(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def show(pairs: Sequence[Pair]) -> str:
    """A table with the medians of each model, and the least and the most of the ratios."""
    header = ["model", "side", "tokens/s", "step, ms", "model\nin it, ms", "around\nit, ms", "first\ntoken, ms"]
    rows = []
    for name in dict.fromkeys(pair.model for pair in pairs):
        of_model = [pair for pair in pairs if pair.model == name]
        for side in ("generate", "http"):
            runs: list[Run] = [getattr(pair, side) for pair in of_model]
            middle = {field: median(getattr(run, field) for run in runs) for field in Run.__struct_fields__}
            firsts = [run.first_token for run in runs if isinstance(run, HttpRun)]
            rows.append(
                [
                    name,
                    {"generate": "LLM.generate", "http": "kvllm serve"}[side],
                    f"{middle['tokens_per_s']:,.0f}",
                    *(f"{1e3 * middle[field]:.2f}" for field in ("step", "model", "around")),
                    f"{1e3 * median(firsts):.0f}" if firsts else "",
                ]
            )
    return report.table(header, rows)


def describe(pairs: Sequence[Pair]) -> str:
    """A line for each model: how much of the speed is left."""
    lines = []
    for name in dict.fromkeys(pair.model for pair in pairs):
        of_model = [pair for pair in pairs if pair.model == name]
        ratios = [pair.ratio for pair in of_model]
        deltas, cpu = (median(getattr(p.http, field) for p in of_model) for field in ("deltas", "client_cpu"))
        lines.append(
            f"{name}: {median(ratios):.3f} of LLM.generate ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} "
            f"rounds); {deltas:.2f} events a token; client {1e6 * cpu:.1f} us a token; other processes kept "
            f"{median(pair.other_load for pair in of_model):.2f} cores busy"
        )
    return "\n".join(lines)


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
    print(f"\n{title}\n\n{show(pairs)}\n\n{describe(pairs)}")
    content = [{**msgspec.to_builtins(pair), "ratio": pair.ratio} for pair in pairs]
    report.write_json(args.output / "http_overhead.json", {**provenance, "pairs": content})
    panels = {
        name: {
            "LLM.generate": [pair.generate.tokens_per_s for pair in pairs if pair.model == name],
            "kvllm serve": [pair.http.tokens_per_s for pair in pairs if pair.model == name],
        }
        for name in args.models
    }
    report.plot_bars(args.output / "http_overhead.png", title, "tokens/s", panels, highlighted=("kvllm serve",))
    print(f"\nWritten: {args.output / 'http_overhead.json'}, {args.output / 'http_overhead.png'}")


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
