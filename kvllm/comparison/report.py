"""A comparison for people: the table, the recommendation, and the figure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvllm.comparison.equal_memory import Fit
from kvllm.comparison.figures import CONFIDENCE, Choice, Figures, choose
from kvllm.comparison.measurement import Result
from kvllm.comparison.variants import engine_options, in_few_words

STYLES = ("-", "--", ":", "-.")
HEADER = (
    "",
    "pairs,\n%",
    "bytes,\n%",
    "KL, nats,\nlast quarter",
    "minus\nrandom",
    "KL, nats,\nall",
    "perplexity",
    "same\ntop, %",
    "needles,\noutput",
    "prompt",
    "tokens/s",
)


def show(results: Mapping[str, Result], figures: Mapping[str, Figures]) -> str:
    """The table of all variants."""
    rows, refused = [], []
    for name, result in results.items():
        if name in figures:
            rows.append([name, *_cells(result, figures[name])])
        else:
            rows.append([name, *[""] * (len(HEADER) - 2), "refused"])
            refused.append(f"{name}: refused, {in_few_words(result.refused or '')}")
    of_prompts = {
        f"{each.method}: prompts are not compressed, {in_few_words(each.prompts_refused)}": None
        for each in results.values()
        if each.prompts_refused and not each.refused
    }
    return "\n".join([table(HEADER, rows), *([""] if refused or of_prompts else []), *refused, *of_prompts])


def _cells(result: Result, figures: Figures) -> list[str]:
    measures, needles = figures.measures, result.needles
    found, in_prompt = "", ""
    if needles is not None:
        found = f"{needles.found_in_output}/{needles.number}"
        in_prompt = "-" if needles.found_in_prompt is None else f"{needles.found_in_prompt}/{needles.number}"
    return [
        f"{100 * result.pairs_share:.1f}",
        f"{100 * result.bytes_share:.1f}",
        measures["kl_last_quarter"].show(".4f"),
        figures.minus_random.show("+.4f") if figures.minus_random else "",
        f"{measures['kl'].mean:.4f}",
        f"{figures.perplexity:.3f}",
        f"{100 * measures['same_top'].mean:.1f}",
        found,
        in_prompt,
        f"{result.tokens_per_second:,.0f}",
    ]


def recommend(results: Mapping[str, Result], memory: Iterable[float], model: str) -> Iterator[str]:
    """For some shares of the bytes, what loses least, and how to ask for it."""
    for budget in memory:
        choice = choose(results, budget)
        yield _verdict(choice)
        if choice.best is not None:
            yield f"    {in_python(choice.best, model)}"
            yield f"    {on_a_command_line(choice.best, model)}"


def _verdict(choice: Choice) -> str:
    best, second, difference = choice.best, choice.second, choice.difference
    if best is None:
        return f"{choice.budget:.1%} of the bytes: nothing that was compared fits"
    loss = sum(piece.kl_last_quarter for piece in best.pieces) / len(best.pieces)
    text = f"{choice.budget:.1%} of the bytes: {best.name} ({best.bytes_share:.1%}), KL {loss:.4f}"
    if second is None or difference is None:
        return f"{text}; nothing else fits"
    clear = "beyond" if difference.is_clear else "within"
    if difference.half_width is None:
        clear = "one text tells no"
    return f"{text}; next {second.name}, {difference.show('+.4f')}, {clear} the {CONFIDENCE:.0%} interval"


def _options(result: Result) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of an engine for a variant, and those of its compression that are not defaults."""
    compression = result.compression
    options = engine_options(result.kv_cache_dtype, compression and Fit(compression, result.share))
    options.pop("compression", None)
    return options, compression.flat() if compression else {}


def in_python(result: Result, model: str) -> str:
    options, compression = _options(result)
    parts = [repr(model), *(f"{name}={value!r}" for name, value in options.items() if value != "auto")]
    if compression:
        parts.append(f"compression=CompressionConfig({', '.join(f'{k}={v!r}' for k, v in compression.items())})")
    return f"LLM({', '.join(parts)})"


def on_a_command_line(result: Result, model: str) -> str:
    options, compression = _options(result)
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value != "auto"]
    if compression:
        settings = (f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in compression.items())
        flags.append(f"--compression {','.join(settings)}")
    return " ".join(["kvllm serve", shlex.quote(model), *flags])


def plot(path: Path, title: str, results: Mapping[str, Result], figures: Mapping[str, Figures]) -> None:
    """KL of the last quarter over the bytes held, a colour for each method and a style for each dtype."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, found in figures.items():
        result = results[name]
        line = ("bits alone", "auto") if result.method is None else (result.method, result.kv_cache_dtype)
        loss = found.measures["kl_last_quarter"].mean
        if loss > 0:  # the axis is of logarithms
            lines.setdefault(line, []).append((100 * result.bytes_share, loss))
    methods, dtypes = (list(dict.fromkeys(each[i] for each in lines)) for i in (0, 1))
    for (method, dtype), points in lines.items():
        label = method if dtype == "auto" else f"{method}, {dtype}"
        x, y = zip(*sorted(points), strict=True)
        color, style = f"C{methods.index(method) % 10}", STYLES[dtypes.index(dtype) % len(STYLES)]
        axes.plot(x, y, color=color, linestyle=style, marker="o", markersize=3, linewidth=1.2, label=label)
    axes.set(xlabel="bytes held at the end of a text, % of the full cache", title=title)
    axes.set_ylabel("KL(full || variant), nats, last quarter")
    if lines:
        axes.set_yscale("log")
        figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first is aligned left, the others right. A header may have several lines."""
    heads = [head.split("\n") for head in header]
    height = max(len(head) for head in heads)
    lines = [[head[i] if i < len(head) else "" for head in heads] for i in range(height)]
    widths = [max(len(line[column]) for line in [*lines, *rows]) for column in range(len(header))]

    def aligned(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "   ".join([first, *others]).rstrip()

    rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
    return "\n".join([*map(aligned, lines), rule, *map(aligned, rows)])
