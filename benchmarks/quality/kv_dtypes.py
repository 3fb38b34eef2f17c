"""Right answers at equal bytes: KV pairs of fewer bits, fewer KV pairs, and both.

    python -m benchmarks.quality.kv_dtypes --dtype bfloat16
    python -m benchmarks.quality.kv_dtypes --dtype bfloat16 --shares 0.2 --methods kara_sharp keydiff

Each kv_cache_dtype answers the same questions with all KV pairs. Then each method drops as many as it takes to end with
a share of the full cache's bytes, which are those of the activations' dtype. Bytes of a KV pair include its scales, and
the scores that some methods keep beside it. A method by windows keeps the same number of every window, the largest for
which the questions together end with the share; a method by threshold has a budget for each question. Prompts stay
whole, so a share may be too small for a dtype of many bits: the tables have a "-" there. `--unprotected` compresses
prompts, too. A name like `int4+32` has a residual: the last 32 tokens as they are, whose bytes count.

`--resume` goes on with a run that was cut short. The figures go to kv_dtypes.json, a plot to kv_dtypes.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from operator import lt
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from benchmarks.common import accuracy, answer_tables, command_line, compressions, machine, report
from benchmarks.common.intervals import paired_difference, percent
from benchmarks.common.trials import FULL, Outcome, Trial, prompts_of, run_all
from kvllm.comparison.kv_caches import check_kv_cache, kv_cache_options
from kvllm.compression.specs import SPECS
from kvllm.config import CompressionConfig, require
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.models.config import load_model_config

DTYPES = ("int4", "int8", "auto")
SHARES = ("0.1", "0.15", "0.2", "0.3")
METHODS = ("kara_sharp", "kara", "keydiff", "rkv")

Outcomes = Mapping[str, Outcome]


class Line(NamedTuple):
    """A line of the tables. windows: whether the method compresses windows, instead of cutting a cache to a budget."""

    kv_cache_dtype: str
    method: str
    windows: bool

    @property
    def name(self) -> str:
        either = self.windows and SPECS[self.method].refusal("threshold") is None
        return f"{self.method}, windows" if either else self.method

    @property
    def label(self) -> str:
        return f"{self.kv_cache_dtype}, {self.name}"


Cells = Mapping[tuple[Line, str], Trial]
"""The trial of each line and share; none where the share is too small."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.quality.kv_dtypes", __doc__)
    add = parser.add_argument
    dtypes = f"default: {' '.join(DTYPES)}; the first line of the tables is what others are compared with"
    add("--kv-cache-dtypes", nargs="+", default=DTYPES, metavar="D", help=dtypes)
    shares = f"of the full cache's bytes (default: {' '.join(SHARES)})"
    add("--shares", nargs="+", default=SHARES, metavar="S", help=shares)
    methods = f"default: {' '.join(METHODS)}; by windows where they refuse a threshold"
    add("--methods", nargs="+", choices=tuple(SPECS), default=METHODS, metavar="M", help=methods)
    add("--windows", nargs="+", choices=tuple(SPECS), default=(), metavar="M", help="methods by windows, besides")
    add("--unprotected", action="store_true", help="compress prompts, too")
    compressions.add_window_arguments(parser)
    compressions.add_baseline_arguments(parser)
    args = parser.parse_args(arguments)
    for option in ("kv_cache_dtypes", "shares", "methods", "windows"):
        command_line.require_unique(f"--{option.replace('_', '-')}", getattr(args, option))
    for name in args.kv_cache_dtypes:
        check_kv_cache("--kv-cache-dtypes", name)
    for share in args.shares:
        compressions.check_retention("--shares", share)
    for method in args.windows:
        refusal = SPECS[method].refusal("standalone")
        require(refusal is None, "--windows", method, f"one that cuts windows: {refusal}")
    return args


def lines_of(args: argparse.Namespace) -> list[Line]:
    methods = [(method, SPECS[method].refusal("threshold") is not None) for method in args.methods]
    methods += [(method, True) for method in args.windows if (method, True) not in methods]
    return [Line(dtype, *method) for method in methods for dtype in args.kv_cache_dtypes]


# Trials


def all_pairs(kv_cache_dtype: str) -> Trial:
    name = FULL if kv_cache_dtype == "auto" else f"{kv_cache_dtype}, all pairs"
    return Trial(name=name, kv_cache_dtype=kv_cache_dtype)


def cells_of(args: argparse.Namespace, full: Outcome) -> Cells:
    cells = {(line, share): trial_of(args, line, share, full) for line in lines_of(args) for share in args.shares}
    return {cell: trial for cell, trial in cells.items() if trial}


def trial_of(args: argparse.Namespace, line: Line, share: str, full: Outcome) -> Trial | None:
    """A line with a share of the full cache's bytes; None where what it always keeps takes more."""
    compression = compression_of(args, line, Fraction(1), args.recent)
    relative = relative_bytes(args, line.kv_cache_dtype, compression)
    kept = (Fraction(share) - residual_share(line.kv_cache_dtype, full)) / relative
    if kept >= 1:
        return all_pairs(line.kv_cache_dtype)
    prompts = [0] * len(full.tokens) if args.unprotected else prompts_of(full)
    budgets, retention, recent = None, Fraction(1), args.recent
    if line.windows:
        retention = retention_of(args, kept, full.logical_lengths, prompts)
        if retention is None:
            return None
    else:
        residual = kv_cache_options(line.kv_cache_dtype).kv_residual_tokens
        budgets = [max(0, int((Fraction(share) * length - residual) / relative)) for length in full.logical_lengths]
        if any(map(lt, budgets, compressions.least_budgets(compression, prompts))):
            return None
        recent = compressions.recent_of(line.method, args.recent, budgets, prompts)
    compression = compression_of(args, line, retention, recent)
    name = f"{line.label} {share}"
    return Trial(name=name, compression=compression, budgets=budgets, kv_cache_dtype=line.kv_cache_dtype)


def compression_of(args: argparse.Namespace, line: Line, retention: Fraction, recent: int) -> CompressionConfig:
    """retention: of windows. recent: KV pairs that a cut always keeps."""
    if not line.windows:
        return compressions.threshold(line.method, recent=recent, gap=args.gap, protect_prompt=not args.unprotected)
    return compressions.kara(
        retention, method=line.method, window=args.window, buffer=args.buffer, compress_prompt=args.unprotected
    )


def retention_of(
    args: argparse.Namespace, kept: Fraction, lengths: Sequence[int], starts: Sequence[int]
) -> Fraction | None:
    """The largest share of windows that leaves at most `kept` of all KV pairs. None if the buffers take more."""
    texts = zip(lengths, starts, strict=True)
    windows = sum(compressions.windows_of(length, start, args.window, args.buffer) for length, start in texts)
    each, wanted = args.window - args.buffer, ceil((1 - kept) * sum(lengths))
    dropped = ceil(Fraction(wanted, windows)) if windows else each + 1  # of each window
    return None if dropped > each else Fraction(each - dropped, each)


# Bytes


def relative_bytes(args: argparse.Namespace, kv_cache_dtype: str, compression: CompressionConfig | None) -> Fraction:
    """Bytes of a KV pair over those in the full cache."""
    return Fraction(bytes_per_pair(args, kv_cache_dtype, compression), bytes_per_pair(args, "auto", None))


def bytes_per_pair(args: argparse.Namespace, kv_cache_dtype: str, compression: CompressionConfig | None) -> int:
    """Of one KV pair in one layer and head, with its scales and its score."""
    model, dtype = load_model_config(accuracy.path_of(args)), accuracy.dtype_of(args)
    activations = getattr(torch, model.dtype if dtype == "auto" else dtype)
    scored = compression is not None and compression.observes_scores
    kv_format = KV_FORMATS.get(kv_cache_options(kv_cache_dtype).kv_cache_dtype)
    return CacheShape(1, 1, model.head_dim, 1, activations, scored=scored, kv_format=kv_format).bytes_per_block


def residual_share(kv_cache_dtype: str, outcome: Outcome) -> Fraction:
    """Bytes of the last tokens as they are, as a share of the full cache's at the end."""
    tokens = kv_cache_options(kv_cache_dtype).kv_residual_tokens
    return Fraction(sum(min(tokens, length) for length in outcome.logical_lengths), sum(outcome.logical_lengths))


def share_held(args: argparse.Namespace, trial: Trial, outcome: Outcome) -> float:
    """Bytes held at the end, as a share of the full cache's."""
    pairs = outcome.kept * float(relative_bytes(args, trial.kv_cache_dtype, trial.compression))
    return pairs + float(residual_share(trial.kv_cache_dtype, outcome))


# The script


def show_dtypes(args: argparse.Namespace, trials: Sequence[Trial], outcomes: Outcomes) -> str:
    """A line for each dtype with all KV pairs, with its difference to the full cache."""
    rows = []
    for trial in trials:
        outcome = outcomes[trial.name]
        minus_full = paired_difference(outcome.right, outcomes[FULL].right).text
        figures = [f"{100 * mean(outcome.exact):.1f}", f"{100 * share_held(args, trial, outcome):.1f}", minus_full]
        rows.append([trial.name, percent(outcome.right), *figures])
    header = ["", "right, %\n[95% interval]", "exact\nworkings, %", "bytes, %", "minus the full\ncache, points"]
    return report.table(header, rows)


def show_shares(args: argparse.Namespace, cells: Cells, outcomes: Outcomes) -> str:
    """Right answers of every line at every share, paired differences, memory and cost."""

    def held(line: Line, share: str) -> str:
        trial = cells.get((line, share))
        return f"{100 * share_held(args, trial, outcomes[trial.name]):.1f}" if trial else "-"

    lines = lines_of(args)
    named = {f"{line.label} {share}": outcomes[trial.name] for (line, share), trial in cells.items()}
    rows = [[line.label, *(held(line, share) for share in args.shares)] for line in lines]
    header = ["", *(f"share {share}" for share in args.shares)]
    return (
        f"{answer_tables.show([line.label for line in lines], 'share', args.shares, {**outcomes, **named})}\n\n"
        f"Bytes held at the end, % of the full cache's\n{report.table(header, rows)}"
    )


def plot(path: Path, args: argparse.Namespace, cells: Cells, outcomes: Outcomes) -> None:
    """Right answers over bytes: a panel for each method, a line for each dtype."""
    panels: dict[str, dict[str, dict[float, Outcome]]] = {}
    for (line, _), trial in cells.items():
        outcome = outcomes[trial.name]
        points = panels.setdefault(line.name, {}).setdefault(line.kv_cache_dtype, {})
        points[100 * share_held(args, trial, outcome)] = outcome
    answer_tables.plot(path, "bytes (% of the full cache's)", panels, outcomes[FULL])


def run_table(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    setting, processes = accuracy.setting_of(args)
    header = accuracy.provenance("benchmarks.quality.kv_dtypes", arguments, setting)
    print(f"{machine.describe(header['machine'])}\n{setting.questions.load().describe()}", flush=True)
    path = args.output / "kv_dtypes.json"
    log = accuracy.Log(path, header, setting, args.resume)
    whole = [all_pairs(dtype) for dtype in dict.fromkeys(("auto", *args.kv_cache_dtypes))]
    outcomes = run_all(setting, whole, processes, log, log.known)
    cells = cells_of(args, outcomes[FULL])
    outcomes |= run_all(setting, [t for t in cells.values() if t not in whole], processes, log, log.known)
    print(f"\nAll KV pairs\n{show_dtypes(args, whole, outcomes)}\n\n{show_shares(args, cells, outcomes)}")
    plot(path.with_suffix(".png"), args, cells, outcomes)
    print(f"Written: {path}, {path.with_suffix('.png')}")


def main() -> None:
    command_line.run_script(run_table)


if __name__ == "__main__":
    main()
