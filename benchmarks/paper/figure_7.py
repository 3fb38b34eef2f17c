"""The survivors of a window, before and after Token2Chunk, drawn over the text (figure 7 of the Kara paper).

    python -m benchmarks.paper.figure_7

The engine answers one problem, and the script observes one of the windows that Kara compresses meanwhile. Every layer
and KV head chooses for itself, so the drawing shows the share of them that keep a token. It has three sets: the
candidates, which are the best scores alone; the KV pairs that Kara keeps, where Token2Chunk has completed chunks
between candidates; and as many of the best scores, which Kara would keep without Token2Chunk. The window's last KV
pairs, the buffer, are always kept.

The sets and all scores go to figure_7.json and a drawing to figure_7.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import command_line, machine, report
from benchmarks.common.internals import engine_of, executor_of
from benchmarks.paper import settings
from benchmarks.reasoner.tasks import DEFAULT_SIZE
from benchmarks.reasoner.tokenizer import encode
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.methods import kara
from kvllm.config import require
from kvllm.core.executor import BlockingExecutor
from kvllm.core.protocol import StepPlan, StepResult
from kvllm.errors import ConfigError
from kvllm.worker.inline import InlineExecutor

CANDIDATES, KEPT, PLAIN = "before: candidates", "after Token2Chunk", "as many, without Token2Chunk"
COLUMNS = 16
"""Tokens of a line in the drawing."""


class Window:
    """The observations of one window, a tensor for each layer.

    position: of the window in the text. scores: float32 `[kv_heads, scored]`. kept: by set, int64 `[kv_heads, kept]`,
        ascending offsets without the buffer.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.scores: list[Tensor] = []
        self.kept: dict[str, list[Tensor]] = {CANDIDATES: [], KEPT: [], PLAIN: []}

    def shares(self, name: str) -> list[float]:
        """The share of layers and heads that keep a token, for each token before the buffer."""
        pairs = zip(self.scores, self.kept[name], strict=True)
        return torch.cat([torch.zeros_like(scores).scatter(-1, kept, 1.0) for scores, kept in pairs]).mean(0).tolist()


class Observer(BlockingExecutor):
    """Runs the plans of one sequence, and observes the selection from every window."""

    def __init__(self, inner: InlineExecutor) -> None:
        self.inner = inner
        self.windows: list[Window] = []
        self._dropped = 0
        compressor = inner.runner.compressor
        if compressor is None:
            raise ConfigError("nothing is compressed: choose a retention below 1")
        selector = compressor.selector
        self._block_size = selector.block_size
        self._retain = selector.config.retained(selector.block_size)
        self._select = selector.select
        self._score, selector.score = selector.score, self._observe

    def execute(self, plan: StepPlan) -> StepResult:
        for job in plan.compressions:
            # The standalone policy compresses a window as soon as there is one: all drops so far were before it.
            (own,) = job.parts
            self.windows.append(Window(own.first_block * self._block_size + self._dropped))
            self._dropped += own.dropped
        return self.inner.execute(plan)

    def _observe(self, queries: Tensor, keys: Tensor, *, buffer: int, chunk_budget: int, **options: Any) -> Tensor:
        """Stands in for the scores; called once for each layer."""

        def select(retain: int, chunk_budget: int) -> Tensor:
            return self._select(queries, keys, retain=retain, buffer=buffer, chunk_budget=chunk_budget, **options)

        sets = {
            CANDIDATES: select(max(buffer, self._retain - chunk_budget), 0),
            KEPT: select(self._retain, chunk_budget),
            PLAIN: select(self._retain, 0),
        }
        self.windows[-1].scores.append(kara.scores(queries, keys, buffer)[0].cpu())
        for name, chosen in sets.items():
            self.windows[-1].kept[name].append(chosen[0, :, : chosen.shape[-1] - buffer].cpu())
        return self._score(queries, keys, buffer=buffer, chunk_budget=chunk_budget, **options)

    def close(self) -> None:
        self.inner.close()


def observe(args: argparse.Namespace, compression: CompressionConfig) -> tuple[list[str], list[Window]]:
    """Solve the problem. Returns the tokens of the prompt and the answer, and the windows that were compressed."""
    (problem,) = settings.make_problems(1, (args.size, args.size), args.seed)
    llm = LLM(args.model, dtype=args.dtype, block_size=1, max_num_seqs=1, compression=compression)
    observer = Observer(executor_of(llm))
    engine_of(llm).executor = observer
    params = SamplingParams(temperature=0, max_tokens=len(encode(problem.working)) + 16)
    output = llm.generate(problem.prompt, params, use_tqdm=False)[0]
    assert llm.tokenizer is not None  # or the prompt could not have been read
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids
    return [llm.tokenizer.decode([token_id]) for token_id in token_ids], observer.windows


# Figures


def visible(token: str) -> str:
    """The text of a token without characters that would break a line."""
    return "".join(c if c.isprintable() else {"\n": "¶", "\t": "→"}.get(c, "�") for c in token) or "∅"


def draw(axes: Axes, title: str, tokens: Sequence[str], values: Sequence[float]) -> Any:
    """A field for each token. `values` colour the first tokens; the buffer, which has none, is grey."""
    rows = -(-len(tokens) // COLUMNS)
    padded = [*values, *[float("nan")] * (rows * COLUMNS - len(values))]
    grid = torch.tensor(padded).view(rows, COLUMNS).numpy()
    axes.set_facecolor("lightgrey")
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="YlOrRd", aspect="auto")
    for i, (token, value) in enumerate(zip(tokens, padded, strict=False)):
        colour = "white" if value > 0.7 else "black"
        text = visible(token).strip() or "␣"
        axes.text(i % COLUMNS, i // COLUMNS, text, ha="center", va="center", fontsize=6, color=colour)
    axes.set_title(title, fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    return image


def plot(path: Path, title: str, tokens: Sequence[str], window: Window) -> None:
    """Draw for each set the share of layers and heads that keep a token."""
    rows = -(-len(tokens) // COLUMNS)
    figure = Figure(figsize=(11, len(window.kept) * (0.28 * rows + 0.5) + 0.6), layout="constrained")
    for axes, name in zip(figure.subplots(len(window.kept)), window.kept, strict=True):
        image = draw(axes, f"{name} ({window.kept[name][0].shape[-1]} KV pairs)", tokens, window.shares(name))
        figure.colorbar(image, ax=axes, label="layers and heads")
    figure.suptitle(title, fontsize=10)
    report.save(path, figure)


# The script


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.figure_7", __doc__)
    settings.add_problem_arguments(parser)
    add = parser.add_argument
    add("--size", type=int, default=DEFAULT_SIZE, help=f"size of its problem (default {DEFAULT_SIZE})")
    add("--event", type=int, default=1, metavar="I", help="the I-th window that is compressed (default: the first)")
    add("--retention", default="0.3", help="default 0.3")
    add("--window", type=int, default=192, help="KV pairs of a window (default 192: as many as fit a page)")
    add("--buffer", type=int, default=64, help="its last KV pairs, which are always kept (default 64)")
    command_line.add_output_argument(parser)
    return parser.parse_args(arguments)


def run_figure(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    compression = settings.kara(args.retention, window=args.window, buffer=args.buffer)
    provenance = machine.announce("benchmarks.paper.figure_7", arguments)
    tokens, windows = observe(args, compression)
    require(1 <= args.event <= len(windows), "--event", args.event, f"from 1 to {len(windows)}, this text's windows")
    window = windows[args.event - 1]
    tokens = tokens[window.position : window.position + args.window]
    title = f"Window {args.event} of {len(windows)}, from position {window.position}"
    print(title)
    content = {
        **provenance,
        "compression": msgspec.to_builtins(compression),
        "position": window.position,
        "tokens": tokens,
        "scores": [scores.tolist() for scores in window.scores],
        "sets": {name: [kept.tolist() for kept in by_layer] for name, by_layer in window.kept.items()},
    }
    report.write_json(args.output / "figure_7.json", content)
    plot(args.output / "figure_7.png", title, tokens, window)
    print(f"Written: {args.output / 'figure_7.json'}, {args.output / 'figure_7.png'}")


if __name__ == "__main__":
    command_line.run_script(run_figure)
