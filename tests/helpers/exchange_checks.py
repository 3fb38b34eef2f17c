"""Exchanges of recall against those of float64."""

from __future__ import annotations

import pytest
import torch

from kvllm.compression.recall import exchange

INF = torch.inf


def literal(
    resident: torch.Tensor,
    dropped: torch.Tensor,
    upper: torch.Tensor,
    movable: torch.Tensor,
    most: int,
    limit: float | None,
    sinks: torch.Tensor,
) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """One row and head in float64: the exchanges in order, and the largest bound after them."""
    resident, dropped, upper = (each.double().clone() for each in (resident, dropped, upper))

    def missing() -> tuple[torch.Tensor, torch.Tensor]:
        mass = torch.cat((resident, sinks.double()[:, None]), dim=-1).logsumexp(-1)
        return torch.sigmoid(upper.logsumexp(-1) - mass), mass

    share, mass = missing()
    if limit is not None and share.max() <= limit:
        return [], share.max()
    gain = (dropped - mass[:, None]).amax(0)
    loss = (resident - mass[:, None]).amax(0).masked_fill(~movable, INF)
    pairs = zip(gain.argsort(descending=True).tolist(), loss.argsort().tolist(), strict=False)
    after = share.clone()
    found: list[tuple[int, int]] = []
    for arriving, leaving in list(pairs)[:most]:
        if not gain[arriving] > loss[leaving]:
            break
        found.append((arriving, leaving))
        after += (1 - share) * ((resident[:, leaving] - mass).exp() - (dropped[:, arriving] - mass).exp())
        if limit is not None and after.max() <= limit:
            break
    for arriving, leaving in found:
        left = resident[:, leaving].clone()
        resident[:, leaving] = dropped[:, arriving]
        dropped[:, arriving] = upper[:, arriving] = left
    return found, missing()[0].max()


def assert_exchanges(
    seed: int,
    sizes: tuple[int, int, int, int],
    pairs: tuple[int, int],
    most: int,
    limit: float | None,
    has_sinks: bool,
) -> None:
    """Of random scores. sizes: sequences, KV heads, query tokens, query heads of each KV head. pairs: residents, and
    dropped ones."""
    rows, heads, tokens, group = sizes
    rng = torch.Generator().manual_seed(seed)
    resident, dropped, more = (
        3 * torch.randn(rows, heads, tokens * group, count, generator=rng) for count in (*pairs, pairs[1])
    )
    resident[:, :, :, int(0.7 * pairs[0]) + 1 :] = -INF
    dropped[0, :, :, int(0.7 * pairs[1]) + 1 :] = -INF
    upper = dropped + more.abs()
    movable = torch.rand(rows, pairs[0], generator=rng) < 0.7
    movable[:, int(0.7 * pairs[0]) + 1 :] = False
    sinks = torch.randn(heads * group, generator=rng) if has_sinks else None
    expected = {}
    for row in range(rows):
        for head in range(heads):
            of_head = sinks[head * group :][:group].repeat(tokens) if sinks is not None else None
            none = torch.full((tokens * group,), -INF)
            given = resident[row, head], dropped[row, head], upper[row, head], movable[row]
            expected[row, head] = literal(*given, most, limit, none if of_head is None else of_head)
    before = [each.clone() for each in (resident, dropped, upper)]
    found = exchange(resident, dropped, upper, movable, most, limit, sinks)
    named = list(zip(*(each.tolist() for each in found[1:]), strict=True))
    for (row, head), (exchanges, bound) in expected.items():
        assert [each[2:] for each in named if each[:2] == (row, head)] == exchanges
        assert found.bounds[row, head].item() == pytest.approx(bound.item(), abs=1e-5)
    for row, head, arriving, leaving in named:
        assert torch.equal(resident[row, head, :, leaving], before[1][row, head, :, arriving])
        for scores in (dropped, upper):
            assert torch.equal(scores[row, head, :, arriving], before[0][row, head, :, leaving])
