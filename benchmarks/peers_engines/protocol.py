"""Children that run one engine each: a job goes in as JSON on stdin, a result comes out as JSON on stdout.

A child runs in the environment of its engine, so this module and the children import nothing of KvLLM. All of them
measure with the same code, `measure`.

A job has: `action` ("prepare": convert the checkpoint; "run"; "losses"), `checkpoint` (a directory or a GGUF file),
`prepared` (that, or the directory of a converted one), `options` (of the engine), `prompts` (token ids),
`output_lengths`, `vocab_size`, `kv_numbers` (numbers in the KV cache), `pool_fraction` (KV blocks over those that all
requests fill at their ends), `threads` and `spawned` (seconds since 1970).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
WARM_UP_TOKENS = 8
REASON_LENGTH = 400
KV_ITEMSIZE = {"f32": 4, "bf16": 2, "f16": 2, "u8": 1, "q8_0": 34 / 32}
WEIGHT_FILES = ("*.safetensors", "*.gguf", "openvino_model.bin")
Job = dict[str, Any]
Tokens = list[list[int]]


class ChildFailed(Exception):
    """A child gave no result. The message is the reason, in one line."""


# The side of the parent


def call(
    python: Path | str, module: str, job: Job, log: Path, variables: Mapping[str, str], timeout: float
) -> dict[str, Any]:
    """Run `python -m module` on a job and return its result. All that the child prints goes to `log`.

    variables: of the environment, in addition to those of this process.

    Raises:
        ChildFailed: the child printed no result, or not in `timeout` seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            text, _ = child.communicate(json.dumps(job | {"spawned": time.time()}).encode(), timeout)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"no result after {timeout:.0f} s") from None
        finally:
            _end_session(child)
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise ChildFailed(reason(child.returncode, log)) from None


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """End the child and the processes that it started: an engine's workers may outlive it."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def reason(code: int, log: Path) -> str:
    """The last error that the child printed."""
    if code < 0 and code != -signal.SIGKILL:
        return f"ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if "error:" in line.lower()]
    text = " ".join(lines[errors[-1] :] if errors else lines[-1:])
    return text[:REASON_LENGTH] or f"exit code {code}"


# The side of the child


class Engine(Protocol):
    """A loaded engine.

    kv: the format of its KV cache. kv_itemsize: bytes of a number in it, scales included.
    prompt_seconds: of the last `generate`, until all requests had their first token; None where that is not told.
    Those that load GGUF files have `losses(prompts)`, too: minus the log of the probability of each token of the
    prompts but the first, in lists.
    """

    kv: str
    kv_itemsize: float
    prompt_seconds: float | None

    def generate(self, prompts: Tokens, output_lengths: Sequence[int]) -> Tokens:
        """The greedy tokens of each prompt, exactly as many as asked for."""
        ...


def answer(run: Callable[[Job], dict[str, Any]]) -> None:
    """Call `run` with the job of stdin, and print what it returns."""
    job = json.load(sys.stdin)
    results = os.dup(1)
    os.dup2(2, 1)  # what an engine prints is no part of the result
    result = run(job)
    with open(results, "w") as file:
        json.dump(result, file)


def serve(distribution: str, load: Callable[[Job], Engine], prepare: Callable[[Job], None] | None = None) -> None:
    """Run the job of stdin.

    distribution: the name of the engine's package. load: load the checkpoint. prepare: convert it.
    """

    def run(job: Job) -> dict[str, Any]:
        if job["action"] == "prepare":
            if prepare is not None:
                prepare(job)
            return {}
        if job["action"] == "losses":
            return {"losses": load(job).losses(job["prompts"])}
        return measure(load(job), job) | {"version": version(distribution)}

    answer(run)


def measure(engine: Engine, job: Job) -> dict[str, Any]:
    """Generate one token, warm up on prompts of the same lengths with other tokens, and time the requests.

    start_seconds: from the start of the process to the first token, after a prompt as long as the first.
    decode_tokens_per_s: of all tokens but the first ones, after these; a few of the others may be earlier.
    overhead_bytes: the peak of resident memory without the weights, as they lie on disk, and without the KV pairs of
    all requests.
    """
    prompts, lengths = job["prompts"], job["output_lengths"]
    others = [[(i + 1) % job["vocab_size"]] * len(prompt) for i, prompt in enumerate(prompts)]
    engine.generate(others[:1], [1])
    start_seconds = time.time() - job["spawned"]
    engine.generate(others, [min(WARM_UP_TOKENS, length) for length in lengths])
    begin = time.perf_counter()
    outputs = engine.generate(prompts, lengths)
    seconds = time.perf_counter() - begin
    if [len(output) for output in outputs] != lengths:
        raise RuntimeError(f"Error: the requests generated {[len(output) for output in outputs]} tokens, not {lengths}")
    peak, weights, kv = peak_memory_bytes(), weight_bytes(job), job["kv_numbers"] * engine.kv_itemsize
    until_first = engine.prompt_seconds
    return {
        "seconds": seconds,
        "output_tokens_per_s": sum(lengths) / seconds,
        "prompt_seconds": until_first,
        "decode_tokens_per_s": until_first and (sum(lengths) - len(lengths)) / (seconds - until_first),
        "start_seconds": start_seconds,
        "peak_memory_bytes": peak,
        "weight_bytes": weights,
        "kv": engine.kv,
        "kv_itemsize": engine.kv_itemsize,
        "kv_bytes": kv,
        "overhead_bytes": peak - weights - kv,
        "first_tokens": [int(output[0]) for output in outputs],
    }


def pool_blocks(lengths: Sequence[int], block_size: int, fraction: float) -> int:
    """Blocks of a pool: this fraction of those that sequences of these lengths fill, and enough for each alone."""
    blocks = [-(-length // block_size) for length in lengths]
    return max(*blocks, int(fraction * sum(blocks)))


def weight_bytes(job: Job) -> int:
    """Bytes of the weights that the engine loads, as they lie on disk."""
    prepared = Path(job["prepared"])
    if prepared.is_file():
        return prepared.stat().st_size
    directory = prepared if prepared.is_dir() else Path(job["checkpoint"])
    return sum(file.stat().st_size for pattern in WEIGHT_FILES for file in directory.glob(pattern))


def peak_memory_bytes() -> int:
    """The sum of the peaks of resident memory of this process and of all that it started."""
    lines = [line for directory in _processes() for line in (directory / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _processes() -> list[Path]:
    """The folders in /proc of this process and of all that it started and that still run."""
    todo, found = [os.getpid()], []
    while todo:
        directory = Path("/proc") / str(todo.pop())
        with suppress(OSError):  # it has ended meanwhile
            children = [file.read_text() for file in (directory / "task").glob("*/children")]
            found.append(directory)
            todo += map(int, " ".join(children).split())
    return found
