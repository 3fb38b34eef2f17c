"""KvLLM and other engines side by side on this machine: tokens per second, time to the first token, and memory.

    python -m benchmarks.peers --model 50m --workloads A B C --rounds 3

Each peer runs in a virtual environment of its own, which is made from PyPI on first use (several GB for all of them;
llama.cpp is compiled). An engine that cannot be installed or does not run on this CPU is listed with the reason. All
engines get the same token ids and generate the same number of tokens, greedily. With `--pool-fraction` the KV cache is
smaller than the demand: engines let requests wait, preempt them, or drop KV pairs. Every run is a process of its own.
The engines take turns, in the opposite order in every other round, and ratios are taken within a round. The figures go
to peers.json.

`--model FILE.gguf` gives KvLLM and llama.cpp the same file as it is, each with several KV caches; others do not run.
`--model 4b.gguf` is a shape with random weights, as Q4_K_M mixes them.
`--perplexity TEXT` adds that of each of them on windows of 512 tokens.

Beside the seconds until all first tokens (prompt), and the tokens per second after them (decode), stands the floor: the
bytes of weights and KV pairs over the bandwidth, and the products over the peak of 8-bit products, both measured here.

`--busy-processes` adds a run of each engine beside processes that compute without end, and the share of its speed that
it keeps there.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.common import command_line, limits, machine, report, shapes, tasks, workloads
from benchmarks.common.limits import Floor, Peak
from benchmarks.common.summary import Spread, show_spread, spread_of
from benchmarks.common.workloads import Request
from benchmarks.peers_engines.environments import PeerFiles
from benchmarks.peers_engines.protocol import ChildFailed, Job, call
from benchmarks.peers_engines.registry import ENGINES, Engine
from kvllm.config import require
from kvllm.files.checkpoint import open_checkpoint
from kvllm.files.gguf.paths import find_gguf
from kvllm.models.config import ModelConfig, load_model_config

TIMEOUT = 1800
"""Seconds that a run or a conversion may take."""
WINDOW = 512
"""Tokens, of which the last half count for the perplexity, as llama-perplexity has them."""


class Run(Struct):
    """A run of an engine. See `benchmarks.peers_engines.protocol.measure`.

    prompt_seconds, decode_tokens_per_s: None where the engine does not tell when first tokens came.
    first_tokens: of each request. kv: the format of the KV cache. version: of the engine's package.
    kept_beside_work: tokens per second beside the busy processes, over those without them; None if there are none.
    """

    seconds: float
    output_tokens_per_s: float
    prompt_seconds: float | None
    decode_tokens_per_s: float | None
    start_seconds: float
    peak_memory_bytes: int
    weight_bytes: int
    kv: str
    kv_itemsize: float
    kv_bytes: float
    overhead_bytes: float
    first_tokens: list[int]
    version: str
    kept_beside_work: float | None = None


Runs = dict[str, list[Run]]
"""By the name of the engine, a run of each round."""
RATES: dict[str, Callable[[Run], float]] = {
    "output tokens/s": lambda run: run.output_tokens_per_s,
    "prompt": lambda run: 1 / run.prompt_seconds if run.prompt_seconds else 0.0,
    "decode tokens/s": lambda run: run.decode_tokens_per_s or 0.0,
}
"""What is compared with the best peer; 0 where an engine does not tell."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.peers", __doc__)
    add = parser.add_argument
    add("--model", default="50m", help=shapes.MODEL_HELP)
    named = "A: 16 short requests; B: one; C: 8 long ones (the default is these); C512: half as long; "
    named += "P: one prompt of 6,000; PL: four of 3,000; the others: one text each, which engines with drafts are for"
    names = (*workloads.WORKLOADS, *tasks.TASKS)
    add("--workloads", nargs="+", choices=names, metavar="NAME", default=("A", "B", "C"), help=named)
    add("--engines", nargs="+", choices=tuple(ENGINES), metavar="NAME", help=", ".join(ENGINES))
    pool = "KV blocks over those that all requests fill at their ends (default 1)"
    add("--pool-fraction", type=float, default=1.0, metavar="SHARE", help=pool)
    add("--rounds", type=int, default=3, help="runs of each engine (default 3)")
    text = "file of text, of which the first 4,000 tokens count, for the perplexity; --model is GGUF then"
    add("--perplexity", type=Path, metavar="TEXT", help=text)
    busy = "every run is followed by another one beside N processes that compute without end (default 0)"
    add("--busy-processes", type=int, default=0, metavar="N", help=busy)
    folder = "folder of the environments and of converted checkpoints, kept for later runs (default .venv-peers)"
    add("--environments", type=Path, default=Path(".venv-peers"), metavar="DIR", help=folder)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "rounds")
    require(args.busy_processes >= 0, "--busy-processes", args.busy_processes, "at least 0")
    require(0 < args.pool_fraction <= 1, "--pool-fraction", args.pool_fraction, "above 0 and at most 1")
    args.gguf = find_gguf(PeerFiles(args.environments).model(args.model))
    require(
        args.perplexity is None or args.gguf is not None, "--perplexity", args.perplexity, "only with a --model of GGUF"
    )
    fitting = default_engines(args.pool_fraction, args.gguf is not None)
    args.engines = args.engines or fitting
    unlimited = [name for name in args.engines if not ENGINES[name].pooled and args.pool_fraction < 1]
    require(not unlimited, "--engines", unlimited, f"--pool-fraction needs one of {fitting}")
    return args


def default_engines(pool_fraction: float, gguf: bool = False) -> list[str]:
    """Those that drop KV pairs, and all others whose pool can be small, if it is small; else all that drop none. For a
    GGUF file, KvLLM and llama.cpp have entries of their own."""
    others = {ENGINES[name].environment for name in ENGINES if ENGINES[name].weights == "file"} if gguf else {""}

    def fits(engine: Engine) -> bool:
        is_file = engine.weights == "file"
        fitting = gguf if is_file else engine.environment not in others
        return fitting and not engine.drafts and (engine.pooled if pool_fraction < 1 else not engine.evicts)

    return [name for name, engine in ENGINES.items() if fits(engine)]


# Runs


def make_requests(workload: str, checkpoint: Path, vocab_size: int) -> list[Request]:
    """Random tokens; for a task the first of its texts, with 600 of the page's tokens."""
    rng = random.Random(0)
    if workload in workloads.WORKLOADS:
        return workloads.random_requests(rng, workloads.WORKLOADS[workload](rng), vocab_size)
    tokenizer = open_checkpoint(checkpoint).read_tokenizer()
    chat = [{"role": "user", "content": tasks.prompts(tokenizer, 600)[workload][0]}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return [Request(tokenizer(str(prompt), add_special_tokens=False)["input_ids"], 256)]


def prepare(files: PeerFiles, names: Sequence[str], checkpoint: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Environments and converted checkpoints: the checkpoints that the engines load, and why others load none."""
    checkpoints: dict[str, Path] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            if (ENGINES[name].weights == "file") != checkpoint.is_file():
                loads = "safetensors" if checkpoint.is_file() else "GGUF files as they are"
                raise ChildFailed(f"it is given {loads} alone here")
            files.python(ENGINES[name].environment)
            checkpoints[name] = files.converted(name, checkpoint, TIMEOUT)
        except ChildFailed as error:
            failures[name] = str(error)
            print(f"{name}: {error}", flush=True)
    return checkpoints, failures


def make_job(
    name: str, checkpoint: Path, loaded: Path, model: ModelConfig, requests: Sequence[Request], pool_fraction: float = 1
) -> Job:
    numbers_of_pair = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return {
        "action": "run",
        "checkpoint": str(checkpoint),
        "prepared": str(loaded),
        "options": ENGINES[name].options,
        "prompts": [request.prompt_token_ids for request in requests],
        "output_lengths": [request.output_length for request in requests],
        "vocab_size": model.vocab_size,
        "kv_numbers": int(pool_fraction * numbers_of_pair * sum(request.kv_pairs for request in requests)),
        "pool_fraction": pool_fraction,
        "threads": machine.machine()["cores"],
    }


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """So many processes that compute without end, for as long as the context."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_engine(files: PeerFiles, name: str, job: Job, busy: int) -> Run:
    """Run an engine, and once more beside busy processes if there are to be any. Raises ChildFailed."""
    engine = ENGINES[name]
    python, log = files.python(engine.environment), files.log(name)

    def measured() -> Run:
        return msgspec.convert(call(python, engine.module, job, log, {}, TIMEOUT), Run)

    run = measured()
    if busy:
        with busy_processes(busy):
            run.kept_beside_work = measured().output_tokens_per_s / run.output_tokens_per_s
    return run


def run_rounds(files: PeerFiles, jobs: Mapping[str, Job], rounds: int, busy: int = 0) -> tuple[Runs, dict[str, str]]:
    """The runs of all engines that ran in every round, and why others did not."""
    runs: Runs = {name: [] for name in jobs}
    failures: dict[str, str] = {}
    names = list(jobs)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if name in failures:
                continue
            try:
                runs[name].append(run := run_engine(files, name, jobs[name], busy))
                shown = f"{run.output_tokens_per_s:.1f} output tokens/s, {run.seconds:.1f} s"
            except ChildFailed as error:
                shown = failures[name] = str(error)
            print(f"round {number + 1} of {rounds}, {name}: {shown}", flush=True)
    return {name: of_engine for name, of_engine in runs.items() if name not in failures}, failures


# Figures


def kvllm_of(name: str, runs: Runs) -> str | None:
    """KvLLM with the weights' format of an engine, dropping KV pairs if it does; None if it has no runs."""
    engine = ENGINES[name]
    alike = (n for n in runs if ENGINES[n].is_kvllm and ENGINES[n].weights == engine.weights)
    return next((n for n in alike if ENGINES[n].evicts == engine.evicts), None)


def ratio(first: Sequence[Run], second: Sequence[Run]) -> Spread:
    """Of tokens per second, within a round."""
    return spread_of([a.output_tokens_per_s / b.output_tokens_per_s for a, b in zip(first, second, strict=True)])


def ratios(runs: Runs) -> dict[str, Spread]:
    """KvLLM / peer of the same weights, by the name of the peer."""
    peers = {name: kvllm_of(name, runs) for name in runs if not ENGINES[name].is_kvllm}
    return {name: ratio(runs[kvllm], runs[name]) for name, kvllm in peers.items() if kvllm is not None}


def eviction_ratios(runs: Runs) -> dict[str, Spread]:
    """KvLLM that drops KV pairs / KvLLM that drops none."""
    dropping = [name for name in runs if ENGINES[name].is_kvllm and ENGINES[name].evicts]
    return {name: ratio(runs[name], runs["kvllm"]) for name in dropping if "kvllm" in runs}


def over_best_peers(runs: Runs) -> dict[str, dict[str, Spread]]:
    """Of each KvLLM and each figure: over the best peer with the same weights within a round."""
    found: dict[str, dict[str, Spread]] = {}
    for name, of_engine in runs.items():
        alike = [n for n in runs if not ENGINES[n].is_kvllm and ENGINES[n].weights == ENGINES[name].weights]
        for figure, rate in RATES.items() if ENGINES[name].is_kvllm else ():
            best = [max((rate(runs[n][i]) for n in alike), default=0.0) for i in range(len(of_engine))]
            if all(best):
                shares = [rate(run) / peer for run, peer in zip(of_engine, best, strict=True)]
                found.setdefault(name, {})[figure] = spread_of(shares)
    return found


def kept_shares(runs: Runs) -> dict[str, Spread]:
    """What engines keep of their speed beside busy processes, if there were any."""
    shares = {name: [run.kept_beside_work for run in of_engine] for name, of_engine in runs.items()}
    return {name: spread_of(kept) for name, of in shares.items() if (kept := [s for s in of if s is not None])}


def floor_of(name: str, run: Run, model: ModelConfig, requests: Sequence[Request], peak: Peak) -> Floor:
    """The floor of an engine, with the bytes that its weights and KV pairs have."""
    weights = ENGINES[name].weights
    numbers = limits.matrix_numbers(model)
    num_bytes = run.weight_bytes if weights == "file" else numbers * limits.BYTES_PER_WEIGHT[weights]
    lengths = [(len(request.prompt_token_ids), request.output_length) for request in requests]
    return limits.floor(model, lengths, num_bytes, run.kv_itemsize, peak)


# The report


def show(runs: Runs, failures: Mapping[str, str], floors: Mapping[str, Floor] | None = None) -> str:
    """A line for each engine with medians (least-most), and one for each engine that did not run.

    floors: of engines, in seconds; the share of it that an engine reached stands beside prompt and decode.
    """
    header = ["engine", "weights", "KV", "output tokens/s", "KvLLM / it", "prompt, s\n(floor: share)"]
    header += ["decode tokens/s\n(floor: share)", "start to first\ntoken, s", "peak memory\n/ weights"]
    header += ["memory beyond\nweights, KV, MiB", "first tokens\nas KvLLM's"]
    against, rows = ratios(runs), []
    for name, of_engine in runs.items():
        kvllm = kvllm_of(name, runs)
        figures = (
            ("{:.1f}", [run.output_tokens_per_s for run in of_engine]),
            ("{:.1f}", [run.start_seconds for run in of_engine]),
            ("{:.2f}", [run.peak_memory_bytes / run.weight_bytes for run in of_engine]),
            ("{:.0f}", [run.overhead_bytes / report.MIB for run in of_engine]),
        )
        rate, *others = (show_spread(spread_of(values), shape) for shape, values in figures)
        ratio = show_spread(against[name], "{:.2f}") if name in against else ""
        tokens = of_engine[0].first_tokens
        like = [a == b for a, b in zip(tokens, runs[kvllm][0].first_tokens, strict=True)] if kvllm else []
        same = f"{sum(like)} of {len(like)}" if like else ""
        rows.append([name, ENGINES[name].weights, of_engine[0].kv, rate, ratio])
        rows[-1] += [*_show_phases(of_engine, (floors or {}).get(name)), *others, same]
    lines = [report.table(header, rows)]
    for name, figures in over_best_peers(runs).items():
        shown = ", ".join(f"{figure} {show_spread(spread, '{:.2f}')}" for figure, spread in figures.items())
        lines.append(f"{name} / best peer: {shown}")
    lines += [f"{name} / kvllm: {show_spread(s, '{:.2f}')}" for name, s in eviction_ratios(runs).items()]
    lines += [f"{name} beside busy processes: {show_spread(s, '{:.0%}')}" for name, s in kept_shares(runs).items()]
    lines += [f"{name} did not run: {reason}" for name, reason in failures.items()]
    return "\n".join(lines)


def _show_phases(runs: Sequence[Run], floor: Floor | None) -> tuple[str, str]:
    """Seconds until all first tokens, and tokens per second after them, each with the floor."""
    prompts = [run.prompt_seconds for run in runs if run.prompt_seconds]
    rates = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s]
    if not prompts or not rates:
        return "", ""
    prompt, decode = spread_of(prompts), spread_of(rates)
    texts = show_spread(prompt, "{:.2f}"), show_spread(decode, "{:.1f}")
    if floor is None:
        return texts
    least, most = floor.prompt_seconds, floor.decode_tokens_per_s
    return (
        f"{texts[0]} ({least:.2f}: {least / prompt['median']:.0%})",
        f"{texts[1]} ({most:.1f}: {decode['median'] / most:.0%})",
    )


# Perplexity


def read_windows(text: Path, checkpoint: Path, num_tokens: int = 4000) -> list[list[int]]:
    """Whole windows of a text's first tokens. Where the tokenizer puts a token before texts, each begins with it."""
    tokenizer = open_checkpoint(checkpoint).read_tokenizer()
    ids: list[int] = tokenizer(text.read_text())["input_ids"][:num_tokens]
    start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    windows = [ids[begin : begin + WINDOW] for begin in range(0, len(ids) - WINDOW + 1, WINDOW)]
    return [start + window[len(start) :] for window in windows]


def perplexities(files: PeerFiles, jobs: Mapping[str, Job], windows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of each engine, over the tokens of each window after the one in its middle."""
    found = {}
    for name, job in jobs.items():
        job = job | {"action": "losses", "prompts": windows, "output_lengths": [1] * len(windows)}
        python, log = files.python(ENGINES[name].environment), files.log(f"perplexity-{name}")
        losses = call(python, ENGINES[name].module, job, log, {}, TIMEOUT)["losses"]
        found[name] = math.exp(mean(loss for of_window in losses for loss in of_window[WINDOW // 2 :]))
        print(f"perplexity of {len(windows)} windows, {name}: {found[name]:.4f}", flush=True)
    return found


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    files = PeerFiles(args.environments)
    model = load_model_config(args.gguf or shapes.find_model(args.model, args.environments / "configs"))
    provenance = machine.announce("benchmarks.peers", arguments)
    checkpoint = args.gguf or files.checkpoint(args.model)
    checkpoints, missing = prepare(files, args.engines, checkpoint)
    peak = limits.Peak(machine.read_bandwidth(), machine.int8_operations())
    print(f"{peak.read_bytes_per_s / 1e9:.1f} GB/s, {peak.operations_per_s / 1e9:.0f} G operations of 8 bits a second")
    content: dict[str, Any] = {}
    of_all = provenance | {"model": args.model, "peak": msgspec.to_builtins(peak), "workloads": content}
    if args.perplexity:
        requests = [Request([0] * WINDOW, 1)]
        jobs = {name: make_job(name, checkpoint, path, model, requests) for name, path in checkpoints.items()}
        of_all["perplexity"] = perplexities(files, jobs, read_windows(args.perplexity, checkpoint))
    for workload in args.workloads:
        requests = make_requests(workload, checkpoint, model.vocab_size)
        totals = workloads.totals(workload, requests)
        counts = "\nWorkload {name}: {requests} requests, {output_tokens} output tokens, ".format(**totals)
        print(f"{counts}{args.pool_fraction:.0%} of the KV blocks that all of them fill", flush=True)
        share, loaded = args.pool_fraction, checkpoints.items()
        jobs = {name: make_job(name, checkpoint, path, model, requests, share) for name, path in loaded}
        runs, failures = run_rounds(files, jobs, args.rounds, args.busy_processes)
        whole = args.pool_fraction == 1  # else sequences wait, or hold fewer pairs
        floors = {name: floor_of(name, each[0], model, requests, peak) for name, each in runs.items() if whole}
        print(f"\n{show(runs, missing | failures, floors)}\n", flush=True)
        content[workload] = {
            **totals,
            "ratios": ratios(runs),
            "over_best_peers": over_best_peers(runs),
            "floors": msgspec.to_builtins(floors),
            "eviction_ratios": eviction_ratios(runs),
            "kept_beside_work": kept_shares(runs),
            "failures": missing | failures,
            "engines": msgspec.to_builtins(runs),
        }
        report.write_json(args.output / "peers.json", of_all)
    print(f"Written: {args.output / 'peers.json'}")


if __name__ == "__main__":
    command_line.run_script(benchmark)
