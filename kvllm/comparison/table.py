"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


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
