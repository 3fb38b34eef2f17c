"""Texts embedded per second beside sentence-transformers and OpenVINO: one model, one thread, the same texts.

    python -m benchmarks.embeddings --model models/SmolLM2-135M-Instruct

Every run is a process of its own, and the engines take turns. Ratios are of processor time within a round, so that
other work on the machine counts little. Beside them stands the least cosine of an embedding and KvLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import command_line, machine, report
from benchmarks.common.summary import show_spread, spread_of
from benchmarks.peers_engines.environments import PeerFiles
from benchmarks.peers_engines.protocol import call

TEXTS = Path(__file__).parents[2] / "shared/data/datasets/gsm8k/test.jsonl"
ENGINES = {"kvllm": None, "sentence-transformers": "embeddings", "openvino": "embeddings"}
"""By name, their environments."""


def benchmark(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.embeddings", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--texts", type=int, default=24, help="questions with their answers (default 24)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine (default 3)")
    parser.add_argument("--environments", type=Path, default=Path(".venv-peers"), metavar="DIR", help="as of peers")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "texts", "rounds")
    files, problems = PeerFiles(args.environments), map(json.loads, TEXTS.read_text().splitlines()[: args.texts])
    texts = [f"{problem['question']}\n{problem['answer']}" for problem in problems]
    provenance = machine.announce("benchmarks.embeddings", arguments)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    for number in range(args.rounds):
        for name in ENGINES if number % 2 == 0 else reversed(ENGINES):
            job = {"engine": name, "checkpoint": str(args.model.resolve()), "texts": texts}
            python, module = files.python(ENGINES[name]), "benchmarks.peers_engines.run_embeddings"
            runs[name].append(call(python, module, job, files.log(name), {"OMP_NUM_THREADS": "1"}, 1800))
            print(f"round {number + 1} of {args.rounds}, {name}: {runs[name][-1]['seconds']:.2f} s", flush=True)
    rows, first = [], runs["kvllm"]
    for name, found in runs.items():
        figures = [[len(texts) / run[figure] for run in found] for figure in ("seconds", "processor_seconds")]
        pairs = zip(first, found, strict=True)
        figures.append([run["processor_seconds"] / kvllm["processor_seconds"] for kvllm, run in pairs])
        cosines = np.sum(np.array(first[0]["embeddings"]) * np.array(found[0]["embeddings"]), axis=1)
        rows.append([name, *(show_spread(spread_of(each), "{:.2f}") for each in figures), f"{cosines.min():.6f}"])
    header = ["engine", "texts/s", "of processor\ntime", "kvllm / it", "least cosine"]
    print(report.table(header, rows))
    report.write_json(args.output / "embeddings.json", provenance | {"rows": rows})


if __name__ == "__main__":
    command_line.run_script(benchmark)
