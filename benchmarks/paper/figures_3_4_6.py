"""Causal against bidirectional attention: to a token, in a window, over the layers (figures 3, 4, 6 of the Kara paper).

    python -m benchmarks.paper.figures_3_4_6

The model reads one solved problem, and the script looks at a window of its working. With causal attention a query token
attends to the KV pairs of the window up to its own. With bidirectional attention, which is Kara's, it attends to all of
them, later ones too. The last KV pairs of a window, the buffer, only ask.

Figures 3 and 4 are of the last layer and the KV head with the sharpest attention: what the token gets that is looked up
most, from every query token of the window, both ways; and the attention of all query tokens to all KV pairs. Figure 6
shows for each layer what the two sums over the query tokens have in common when each keeps its best KV pairs: how many
of them are the same, and how much of the attention of the text behind the window each set catches, as a share of what
the best set of that size would.

The figures go to figures_3_4_6.json and to figure_3.png, figure_4.png and figure_6.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import command_line, machine, report
from benchmarks.paper import settings
from benchmarks.reasoner.tasks import DEFAULT_SIZE
from kvllm.calibration.dense import DenseModel
from kvllm.config import require
from kvllm.tokenizer import load_tokenizer

CAUSAL, BIDIRECTIONAL = "causal", "bidirectional"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.figures_3_4_6", __doc__)
    settings.add_problem_arguments(parser)
    add = parser.add_argument
    add("--size", type=int, default=DEFAULT_SIZE, help=f"size of the problem (default {DEFAULT_SIZE})")
    add("--window", type=int, default=settings.WINDOW, help=f"KV pairs of the window (default {settings.WINDOW})")
    add("--buffer", type=int, default=settings.BUFFER, help=f"its last, which only ask (default {settings.BUFFER})")
    add("--retention", type=float, default=0.2, help="share of the others that figure 6 keeps (default 0.2)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    require(0 <= args.buffer < args.window, "--buffer", args.buffer, f"less than --window {args.window}, not negative")
    require(0 < args.retention <= 1, "--retention", args.retention, "above 0 and at most 1")
    return args


# Attention


def attention(queries: Tensor, keys: Tensor, first_query: int | None = None) -> Tensor:
    """Attention probabilities, mean over the query heads of a KV head, `[Hkv, queries, keys]`.

    queries: `[Hq, queries, d]`. keys: `[Hkv, keys, d]`. first_query: index of the first query token among the keys,
    where no query attends to a later key; None: all queries attend to all keys.
    """
    grouped = queries.unflatten(0, (keys.shape[0], -1))
    logits = grouped @ keys[:, None].mT * keys.shape[-1] ** -0.5
    if first_query is not None:
        rows = first_query + torch.arange(queries.shape[1])
        logits = logits.masked_fill(rows[:, None] < torch.arange(keys.shape[1]), -torch.inf)
    return logits.softmax(dim=-1).mean(dim=1)


class Layer:
    """Attention in the window of one layer.

    maps: by kind, `[Hkv, window, scored]`. behind: `[Hkv, scored]`, what the text behind the window pays them in all,
    by attention to the whole text.
    """

    def __init__(self, queries: Tensor, keys: Tensor, start: int, window: int, buffer: int) -> None:
        end, scored = start + window, start + window - buffer
        inside = queries[:, start:end], keys[:, start:scored]
        self.maps = {CAUSAL: attention(*inside, first_query=0), BIDIRECTIONAL: attention(*inside)}
        self.behind = attention(queries[:, end:], keys, first_query=end)[..., start:scored].sum(dim=1)

    def compare(self, retention: float) -> dict[str, float]:
        """Figure 6's values, mean over the KV heads."""
        count = max(1, round(retention * self.behind.shape[-1]))
        kept = {name: of_kind.sum(dim=1).topk(count).indices for name, of_kind in self.maps.items()}
        best = self.behind.topk(count).values.sum(dim=-1)
        both = zip(*(indices.tolist() for indices in kept.values()), strict=True)
        common = [len(set(first) & set(second)) / count for first, second in both]
        caught = {
            f"caught, {name}": (self.behind.gather(-1, indices).sum(dim=-1) / best).mean().item()
            for name, indices in kept.items()
        }
        return {"in common": sum(common) / len(common), **caught}

    def choose(self) -> tuple[int, int]:
        """The KV head with the sharpest attention, and the token that is looked up most in it."""
        causal = self.maps[CAUSAL]
        head = int(causal.amax(dim=-1).mean(dim=-1).argmax())
        # The tokens themselves and their next ones attend to nearly every token: a look-up comes later.
        return head, int(causal[head].tril(diagonal=-8).square().sum(dim=0).argmax())


# Figures


def plot_window(path: Path, title: str, layer: Layer, head: int) -> None:
    """Figure 4: the attention of all query tokens to all KV pairs."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (name, of_kind) in zip(figure.subplots(1, 2, sharey=True), layer.maps.items(), strict=True):
        shown = of_kind[head].clamp(min=1e-4).log10().numpy()
        image = axes.imshow(shown, cmap="viridis", vmin=-4, vmax=0, aspect="auto", interpolation="nearest")
        axes.set(title=name, xlabel="KV pair")
        figure.colorbar(image, ax=axes, label="attention, log10")
    figure.axes[0].set_ylabel("query token")
    figure.suptitle(title, fontsize=10)
    report.save(path, figure)


def run_figures(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    provenance = machine.announce("benchmarks.paper.figures_3_4_6", arguments)
    (problem,), tokenizer = settings.make_problems(1, (args.size, args.size), args.seed), load_tokenizer(args.model)
    start, token_ids = len(tokenizer.encode(problem.prompt)), tokenizer.encode(problem.prompt + problem.working)
    longest = len(token_ids) - start - 1  # at least one token after the window
    require(args.window <= longest, "--window", args.window, f"at most {longest}: or a larger --size")
    with torch.inference_mode():
        read, _ = DenseModel(args.model, len(token_ids)).read(token_ids)
        layers = [
            Layer(run.queries.cpu().transpose(0, 1), run.keys.cpu().transpose(0, 1), start, args.window, args.buffer)
            for run in read
        ]
    last = layers[-1]
    head, token = last.choose()
    rows = [layer.compare(args.retention) for layer in layers]
    place = f"layer {len(layers) - 1}, KV head {head}"
    cells = [[str(layer), *(f"{100 * value:.1f}" for value in row.values())] for layer, row in enumerate(rows)]
    print(f"Window of {args.window} tokens from position {start}, {place}, token {token}\n")
    print(report.table(["layer", *(f"{name}, %" for name in rows[0])], cells))
    shown = {name: of_kind[head, :, token].tolist() for name, of_kind in last.maps.items()}
    content = {"start": start, "head": head, "token": token, "figure_3": shown, "figure_6": rows}
    report.write_json(args.output / "figures_3_4_6.json", {**provenance, **content})
    lines = {name: report.Line([*range(args.window)], values) for name, values in shown.items()}
    title = f"Attention to token {token}, {place}"
    report.plot_lines(args.output / "figure_3.png", title, "query token in the window", {"attention": lines})
    plot_window(args.output / "figure_4.png", f"Attention in a window, {place}", last, head)
    bars = {name: report.Line([*range(len(rows))], [100 * row[name] for row in rows]) for name in rows[0]}
    title = f"Causal and bidirectional scores, {args.retention:.0%} kept of {args.window - args.buffer} KV pairs"
    report.plot_lines(args.output / "figure_6.png", title, "layer", {"%": bars})
    print(f"\nWritten: figures_3_4_6.json and figures in {args.output}")


if __name__ == "__main__":
    command_line.run_script(run_figures)
