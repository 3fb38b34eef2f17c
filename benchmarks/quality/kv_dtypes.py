"""Right answers over bytes: KV pairs of fewer bits, fewer KV pairs, and both.

    python -m benchmarks.quality.kv_dtypes --dtype bfloat16
    python -m benchmarks.quality.kv_dtypes --dtype bfloat16 --method kara --retentions 0.2 0.4

Each kv_cache_dtype answers the same questions with the full cache, then with a method that keeps a share of every
window. The bytes are those of the KV pairs held at the end with their scales, as a share of the full cache's in the
dtype of the activations. The figures go to kv_dtypes.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import mean

import torch

from benchmarks.common import accuracy, command_line, compressions, machine, report
from benchmarks.common.intervals import paired_difference
from benchmarks.common.trials import Outcome, Trial, percent, run_all
from kvllm.compression.specs import SPECS
from kvllm.config import require
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.formats import KV_CACHE_DTYPES, KV_FORMATS
from kvllm.models.config import load_model_config


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.quality.kv_dtypes", __doc__)
    add = parser.add_argument
    add("--kv-cache-dtypes", nargs="+", choices=KV_CACHE_DTYPES, default=["auto", "int8", "int4"], metavar="D")
    add("--method", choices=tuple(SPECS), default="kara_sharp", metavar="M", help="default: kara_sharp")
    add("--retentions", nargs="*", default=["0.6", "0.4"], metavar="R", help="shares of a window (default: 0.6 0.4)")
    compressions.add_window_arguments(parser)
    args = parser.parse_args(arguments)
    for retention in args.retentions:
        compressions.check_retention("--retentions", retention)
    refusal = SPECS[args.method].refusal("standalone")
    require(refusal is None, "--method", args.method, f"one that cuts windows: {refusal}")
    return args


def trials_of(args: argparse.Namespace) -> list[Trial]:
    trials = [Trial(name=f"{dtype}, all", kv_cache_dtype=dtype) for dtype in args.kv_cache_dtypes]
    for retention in args.retentions:
        compression = compressions.kara(retention, method=args.method, window=args.window, buffer=args.buffer)
        trials += [
            Trial(name=f"{dtype}, {args.method} {retention}", compression=compression, kv_cache_dtype=dtype)
            for dtype in args.kv_cache_dtypes
        ]
    return trials


def bytes_per_pair(args: argparse.Namespace, kv_cache_dtype: str) -> int:
    """Of one KV pair in one layer and head."""
    model, dtype = load_model_config(accuracy.path_of(args)), accuracy.dtype_of(args)
    activations = getattr(torch, model.dtype if dtype == "auto" else dtype)
    return CacheShape(1, 1, model.head_dim, 1, activations, kv_format=KV_FORMATS.get(kv_cache_dtype)).bytes_per_block


def table(args: argparse.Namespace, trials: Sequence[Trial], outcomes: Mapping[str, Outcome]) -> str:
    """A line for each trial, with its difference to the first one on the same questions."""
    first, rows = outcomes[trials[0].name], []
    for trial in trials:
        outcome = outcomes[trial.name]
        share = outcome.kept * bytes_per_pair(args, trial.kv_cache_dtype) / bytes_per_pair(args, "auto")
        difference = "" if outcome is first else paired_difference(outcome.right, first.right).text
        shares = [f"{100 * outcome.kept:.1f}", f"{100 * share:.1f}"]
        rows.append([trial.name, percent(outcome), f"{100 * mean(outcome.exact):.1f}", *shares, difference])
    header = ["", "right, %\n[95% interval]", "exact\nworkings, %", "KV pairs kept\nat the end, %"]
    return report.table([*header, "of the full\ncache's bytes, %", "minus the first,\npoints"], rows)


def run_table(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    setting, processes = accuracy.setting_of(args)
    header = accuracy.provenance("benchmarks.quality.kv_dtypes", arguments, setting)
    print(f"{machine.describe(header['machine'])}\n{setting.questions.load().describe()}", flush=True)
    trials, path = trials_of(args), args.output / "kv_dtypes.json"
    log = accuracy.Log(path, header, setting, args.resume)
    outcomes = run_all(setting, trials, processes, log, log.known)
    print(f"\n{table(args, trials, outcomes)}\nWritten: {path}")


def main() -> None:
    command_line.run_script(run_table)


if __name__ == "__main__":
    main()
