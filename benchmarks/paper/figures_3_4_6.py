"""Causal against bidirectional attention: to a token, in a window, over the layers (figures 3, 4, 6 of the Kara paper).

    python -m benchmarks.paper.figures_3_4_6

The model reads one solved problem, and the script looks at a window of its working. With causal attention a query token
attends to the KV pairs of the window up to its own. With bidirectional attention, which is Kara's, it attends to all of
them, later ones too. The last KV pairs of a window, the buffer, only ask.

Figure 3 shows the attention that one token gets from every query token of the window, both ways. Figure 4 shows the
attention of all query tokens to all KV pairs of one layer and head. Figure 6 shows for each layer what the two sums
over the query tokens have in common when each keeps its best KV pairs: how many of them are the same, and how much of
the attention of the text behind the window each set catches, as a share of what the best set of that size would.

The figures go to figures_3_4_6.json and to figure_3.png, figure_4.png and figure_6.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common import accuracy, command_line, machine, report
from benchmarks.common.questions import QuestionSource, ReasonerQuestions
from benchmarks.reasoner.tasks import DEFAULT_SIZE
from kvllm.calibration.dense import DenseModel
from kvllm.config import require
from kvllm.tokenizer import load_tokenizer

CAUSAL, BIDIRECTIONAL = "causal", "bidirectional"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.figures_3_4_6", __doc__)
    accuracy.add_model_arguments(parser)
    add = parser.add_argument
    add("--size", type=int, default=DEFAULT_SIZE, help=f"size of its problem (default {DEFAULT_SIZE})")
    add("--text", type=Path, metavar="FILE", help="a text instead of a problem")
    add("--start", type=int, help="first token of the window (default: the working's first; of a text, 0)")
    add("--window", type=int, default=384, help="KV pairs of the window (default 384)")
    add("--buffer", type=int, default=128, help="its last KV pairs, which only ask (default 128)")
    add("--retention", type=float, default=0.2, help="share of the others that figure 6 keeps (default 0.2)")
    add("--token", type=int, help="figure 3: offset of the token in the window (default: the most attended one)")
    add("--layer", type=int, help="figures 3 and 4: layer, from 0 (default: the last)")
    add("--head", type=int, help="figures 3 and 4: KV head, from 0 (default: the one with the sharpest attention)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    require(0 <= args.buffer < args.window, "--buffer", args.buffer, f"less than --window {args.window}, not negative")
    require(0 < args.retention <= 1, "--retention", args.retention, "above 0 and at most 1")
    return args


def read_text(args: argparse.Namespace) -> tuple[list[int], list[str], int]:
    """Token ids, their texts, and where the window begins."""
    tokenizer = load_tokenizer(args.model)
    if args.text:
        require(args.text.is_file(), "--text", args.text, "an existing file")
        token_ids, start = tokenizer.encode(args.text.read_text()), 0
    else:
        source = QuestionSource(task=args.task, sizes=(args.size, args.size), count=1, seed=args.seed)
        problem = ReasonerQuestions(source).problems[0]
        start = len(tokenizer.encode(problem.prompt))
        token_ids = tokenizer.encode(problem.prompt + problem.working)
    start = start if args.start is None else args.start
    last = len(token_ids) - args.window - 1  # at least one token behind the window
    require(0 <= start <= last, "--start", start, f"from 0 to {last}: the text has {len(token_ids)} tokens")
    return token_ids, [tokenizer.decode([token_id]) for token_id in token_ids], start


# Attention


def attention(queries: Tensor, keys: Tensor, first_query: int | None = None) -> Tensor:
    """Attention probabilities `[Hkv, group, queries, keys]`.

    queries: `[Hq, queries, d]`. keys: `[Hkv, keys, d]`. first_query: index of the first query token among the keys,
    where no query attends to a later key; None: all queries attend to all keys.
    """
    grouped = queries.unflatten(0, (keys.shape[0], -1))
    logits = grouped @ keys[:, None].mT * keys.shape[-1] ** -0.5
    if first_query is not None:
        rows = first_query + torch.arange(queries.shape[1])
        logits = logits.masked_fill(rows[:, None] < torch.arange(keys.shape[1]), -torch.inf)
    return logits.softmax(dim=-1)


class Layer:
    """Attention in the window of one layer, mean over the query heads of a KV head.

    maps: by kind, `[Hkv, window, scored]`. behind: `[Hkv, scored]`, what the text behind the window pays them in all,
    by attention to the whole text.
    """

    def __init__(self, queries: Tensor, keys: Tensor, start: int, window: int, buffer: int) -> None:
        end, scored = start + window, start + window - buffer
        inside = queries[:, start:end], keys[:, start:scored]
        self.maps = {
            CAUSAL: attention(*inside, first_query=0).mean(dim=1),
            BIDIRECTIONAL: attention(*inside).mean(dim=1),
        }
        later = attention(queries[:, end:], keys, first_query=end)
        self.behind = later.mean(dim=1)[..., start:scored].sum(dim=1)

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


# Figures


def plot_token(path: Path, title: str, layer: Layer, head: int, token: int) -> None:
    """Figure 3: the attention that a token gets from each query token."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for (name, of_kind), colour in zip(layer.maps.items(), report.COLOURS, strict=False):
        axes.plot(of_kind[head, :, token], color=colour, linewidth=1, label=name)
    axes.axvline(token, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        title=title, xlabel="query token in the window (dotted: the token itself)", ylabel="attention", ylim=(0, 1)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    report.save(path, figure)


def plot_window(path: Path, title: str, layer: Layer, head: int) -> None:
    """Figure 4: the attention of all query tokens to all KV pairs."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    image = None
    for axes, (name, of_kind) in zip(figure.subplots(1, 2, sharey=True), layer.maps.items(), strict=True):
        shown = of_kind[head].clamp(min=1e-4).log10().numpy()
        image = axes.imshow(shown, cmap="viridis", vmin=-4, vmax=0, aspect="auto", interpolation="nearest")
        axes.set(title=name, xlabel="KV pair")
    assert image is not None
    figure.axes[0].set_ylabel("query token")
    figure.colorbar(image, ax=figure.axes, label="attention, log10")
    figure.suptitle(title, fontsize=10)
    report.save(path, figure)


def plot_layers(path: Path, title: str, rows: Sequence[dict[str, float]]) -> None:
    """Figure 6: a group of bars for each layer."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(rows[0])
    for i, (name, colour) in enumerate(zip(rows[0], report.COLOURS, strict=False)):
        places = [layer + i * width for layer in range(len(rows))]
        axes.bar(places, [100 * row[name] for row in rows], width, color=colour, label=name)
    axes.set(title=title, xlabel="layer", ylabel="%", ylim=(0, 100))
    axes.set_xticks([layer + 0.4 - width / 2 for layer in range(len(rows))], labels=map(str, range(len(rows))))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    report.save(path, figure)


# The script


def choose(args: argparse.Namespace, layers: Sequence[Layer]) -> tuple[int, int, int]:
    """Layer, KV head and token of figures 3 and 4."""
    index = len(layers) - 1 if args.layer is None else args.layer
    require(0 <= index < len(layers), "--layer", index, f"from 0 to {len(layers) - 1}")
    causal = layers[index].maps[CAUSAL]
    head = causal.amax(dim=-1).mean(dim=-1).argmax().item() if args.head is None else args.head
    require(0 <= head < len(causal), "--head", head, f"from 0 to {len(causal) - 1}")
    # The tokens themselves and their next ones attend to nearly every token: a look-up comes later.
    lookups = causal[int(head)].tril(diagonal=-8).square().sum(dim=0)
    token = lookups.argmax().item() if args.token is None else args.token
    require(0 <= token < len(lookups), "--token", token, f"from 0 to {len(lookups) - 1}")
    return index, int(head), int(token)


def run_figures(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    provenance = machine.provenance("benchmarks.paper.figures_3_4_6", arguments)
    token_ids, tokens, start = read_text(args)
    with torch.inference_mode():
        read, _ = DenseModel(args.model, len(token_ids)).read(token_ids)
        layers = [
            Layer(run.queries.cpu().transpose(0, 1), run.keys.cpu().transpose(0, 1), start, args.window, args.buffer)
            for run in read
        ]
    index, head, token = choose(args, layers)
    rows = [layer.compare(args.retention) for layer in layers]
    place = f"layer {index}, KV head {head}"
    context = "".join(tokens[start + max(0, token - 6) : start + token])
    print(f"{machine.describe(provenance['machine'])}\nWindow of {args.window} tokens from position {start}, {place}")
    print(f"Figure 3: token {token}, {tokens[start + token]!r} behind {context!r}\n")
    cells = [[str(layer), *(f"{100 * value:.1f}" for value in row.values())] for layer, row in enumerate(rows)]
    print(report.table(["layer", *(f"{name}, %" for name in rows[0])], cells))
    shown: dict[str, Any] = {name: of_kind[head, :, token].tolist() for name, of_kind in layers[index].maps.items()}
    content = {"start": start, "layer": index, "head": head, "token": token, "figure_3": shown, "figure_6": rows}
    report.write_json(args.output / "figures_3_4_6.json", {**provenance, **content, "tokens": tokens})
    plot_token(args.output / "figure_3.png", f"Attention to token {token}, {place}", layers[index], head, token)
    plot_window(args.output / "figure_4.png", f"Attention in a window, {place}", layers[index], head)
    share = f"{100 * args.retention:g}% kept of {args.window - args.buffer} KV pairs"
    plot_layers(args.output / "figure_6.png", f"Causal and bidirectional scores, {share}", rows)
    print("\nWritten:", ", ".join(str(args.output / name) for name in ("figures_3_4_6.json", "figure_3.png, ...")))


if __name__ == "__main__":
    command_line.run_script(run_figures)
