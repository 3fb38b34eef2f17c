"""Memory of a process that serves varied traffic for a long time.

    python -m benchmarks.soak --steps 12000

Two engines, one that compresses and one that does not, take turns step by step. Requests are of random kinds: prompts
have random lengths, are tokens or text, and some begin as others do; tokens are greedy or sampled, with penalties, log
probabilities or several completions. Some requests are aborted, and short pools make the engines preempt. The memory is
read now and then, and all readings go to soak.json. The KV pools count once their blocks have been in use.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import string
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import torch

from benchmarks.common import command_line, machine, report
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL

BLOCK_SIZE = 16
NUM_BLOCKS = 256
SHARED_PREFIXES = 8


class Reading(msgspec.Struct):
    """Bytes of this process after some steps, and the processor's seconds.

    resident: in RAM. malloc_used, malloc_free: bytes allocated from glibc, and those it holds beside them for the next
    allocations; None with another C library. code: machine code that was generated at run time. objects: containers
    that Python's garbage collector tracks, a number.
    """

    step: int
    cpu_seconds: float
    resident: int
    malloc_used: int | None
    malloc_free: int | None
    code: int
    objects: int


class Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`. See mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def read_memory(step: int, cpu_seconds: float) -> Reading:
    gc.collect()
    process = psutil.Process()
    used = free = None
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2:
        mallinfo2.restype = Mallinfo2
        info = mallinfo2()
        used, free = info.uordblks + info.hblkhd, info.fordblks
    generated = (each for each in process.memory_maps(grouped=False) if "x" in each.perms and each.path == "[anon]")
    code = sum(each.rss for each in generated)
    return Reading(step, cpu_seconds, process.memory_info().rss, used, free, code, len(gc.get_objects()))


class Traffic:
    """Requests of random kinds for one engine, of which up to `most` are unfinished at once."""

    def __init__(self, llm: LLM, rng: random.Random, most: int) -> None:
        self.engine = llm.llm_engine
        self.rng = rng
        self.most = most
        self.longest = llm.config.max_model_len
        self.vocab_size = llm.model_config.vocab_size
        self.unfinished: list[str] = []
        self.added = self.aborted = 0
        self.prefixes = [self.tokens(rng.randint(16, 256)) for _ in range(SHARED_PREFIXES)]

    def tokens(self, length: int) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=length)

    def step(self) -> None:
        """Let requests come and go, then run one step."""
        if not self.unfinished or (len(self.unfinished) < self.most and self.rng.random() < 0.2):
            request_id = str(self.added)
            self.engine.add_request(request_id, self.prompt(), self.sampling_params())
            self.unfinished.append(request_id)
            self.added += 1
        elif self.rng.random() < 0.01:
            request_id = self.rng.choice(self.unfinished)
            self.engine.abort(request_id)
            self.unfinished.remove(request_id)
            self.aborted += 1
        for output in self.engine.step():
            if output.finished:
                self.unfinished.remove(output.request_id)

    def prompt(self) -> str | list[int]:
        length = min(int(self.rng.lognormvariate(5, 1)) + 1, self.longest // 2)
        kind = self.rng.random()
        if kind < 0.3:
            return "".join(self.rng.choices(string.digits, k=length))
        shared = self.rng.choice(self.prefixes) if kind < 0.6 else []
        return shared + self.tokens(length)

    def sampling_params(self) -> SamplingParams:
        rng = self.rng
        temperature = rng.choice((0.0, 0.7, 1.0))
        return SamplingParams(
            n=rng.choice((1, 1, 2, 4)) if temperature else 1,
            temperature=temperature,
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 0, 20)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
            logprobs=rng.choice((None, None, None, 3)),
            max_tokens=rng.randint(1, 400),
            ignore_eos=rng.random() < 0.7,
        )


def make_engines(model: Path, rng: random.Random, most: int) -> list[Traffic]:
    compression = CompressionConfig(
        method="kara", policy="periodic", period=32, window_blocks=3, buffer=8, chunk_budget=8
    )
    llms = [
        LLM(
            model,
            block_size=BLOCK_SIZE,
            max_model_len=2048,
            max_num_seqs=4 * most,
            num_gpu_blocks_override=NUM_BLOCKS,
            compression=each,
            device="cpu",
        )
        for each in (None, compression)
    ]
    return [Traffic(llm, rng, most) for llm in llms]


def soak(engines: Sequence[Traffic], steps: int, every: int) -> list[Reading]:
    """Run steps of the engines in turn, and read the memory now and then."""
    begin = time.process_time()
    readings = []
    for step in range(1, steps + 1):
        engines[step % len(engines)].step()
        if step % every == 0 or step == steps:
            readings.append(read_memory(step, time.process_time() - begin))
            show(readings[-1])
    return readings


def show(reading: Reading) -> None:
    used, free = ("?" if n is None else report.mib(n) for n in (reading.malloc_used, reading.malloc_free))
    print(
        f"{reading.step:6} steps, {reading.cpu_seconds:5.0f} s: resident {report.mib(reading.resident)}; malloc: "
        f"{used} in use, {free} free; generated code {report.mib(reading.code)}; {reading.objects} objects",
        flush=True,
    )


def run(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    torch.set_num_threads(1)
    provenance = machine.announce("benchmarks.soak", arguments)
    engines = make_engines(args.model, random.Random(args.seed), args.requests)
    readings = soak(engines, args.steps, args.every)
    content = {
        **provenance,
        "requests": sum(each.added for each in engines),
        "aborted": sum(each.aborted for each in engines),
        "readings": msgspec.to_builtins(readings),
    }
    report.write_json(args.output / "soak.json", content)
    print(f"Written: {args.output / 'soak.json'}")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.soak", __doc__)
    add = parser.add_argument
    add("--model", type=Path, default=DEFAULT_MODEL, help="directory of a checkpoint (default: the package's model)")
    add("--steps", type=int, default=12000)
    add("--every", type=int, default=500, metavar="STEPS", help="between two readings")
    add("--requests", type=int, default=12, help="most unfinished requests of an engine")
    add("--seed", type=int, default=0)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "steps", "every", "requests")
    return args


if __name__ == "__main__":
    command_line.run_script(run)
