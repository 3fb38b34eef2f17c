"""The golden vectors on the target: choices and moves of independent float64 code."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.device.log import Log
from benchmarks.device.target import Target
from kvllm.compression.methods import adakv, chunkkv, kara, keydiff, rkv, snapkv, token2chunk
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.registry import make_operations

VECTORS = Path(__file__).parents[2] / "tests" / "fixtures"
CLOSE = {"rtol": 1e-4, "atol": 0.0, "check_dtype": False}


class Vectors:
    """One file of vectors: its cases, and their arrays on the target."""

    def __init__(self, target: Target, file: Path) -> None:
        self.device = target.device
        with np.load(file) as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}
        self.meta: dict[str, Any] = json.loads(str(self.arrays.pop("meta")))

    def __call__(self, case: int, name: str) -> torch.Tensor:
        """An array of a case as a batch of one."""
        return torch.from_numpy(self.arrays[f"c{case}_{name}"])[None].to(self.device)

    @property
    def cases(self) -> list[tuple[int, dict[str, Any]]]:
        return list(enumerate(self.meta["cases"]))


def run(target: Target, log: Log) -> None:
    for name, check in CHECKS.items():
        log.check(name, partial(_check, target, VECTORS / f"{name}.npz", check))


def _check(target: Target, file: Path, check: Callable[[Vectors], None]) -> None:
    check(Vectors(target, file))


def kara_scores(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        scores = kara.scores(vectors(i, "q"), vectors(i, "k"), case["U"])
        torch.testing.assert_close(scores, vectors(i, "scores_sum"), **CLOSE)


def kara_indices(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        total, _ = kara.budget(case["W"] - case["U"], case["r"], case["alpha"])
        options = {"buffer": case["U"], "chunk_budget": case["alpha"], "max_chunk": case["gamma"]}
        kept = kara.select(vectors(i, "q"), vectors(i, "k"), retain=total + case["U"], **options)
        assert torch.equal(kept, vectors(i, "window_kept")), case


def kara_window(vectors: Vectors) -> None:
    meta = vectors.meta
    options = {"buffer": meta["U"], "chunk_budget": meta["alpha"], "max_chunk": meta["gamma"]}
    kept = kara.select(vectors(0, "q"), vectors(0, "k"), retain=meta["keep_total"], **options)
    assert torch.equal(kept, vectors(0, "window_kept"))


def kara_ablations(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        queries, buffer, chunk_budget = vectors(i, "q"), case["U"], case["alpha"]
        total, _ = kara.budget(case["W"] - buffer, case["r"], chunk_budget)
        if case["variant"] == "no_bi":
            queries = queries[:, :, -buffer:]
        else:
            chunk_budget = 0
        options = {"buffer": buffer, "chunk_budget": chunk_budget, "max_chunk": case["gamma"]}
        kept = kara.select(queries, vectors(i, "k"), retain=total + buffer, **options)
        assert torch.equal(kept, vectors(i, "window_kept")), case


def chunks(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        total = case["candidates"] + case["alpha"]
        kept = token2chunk.expand(vectors(i, "A"), total, case["alpha"], case["gamma"])
        assert torch.equal(kept, vectors(i, "kept")), case["what"]


def snapkv_kept(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        queries, keys = vectors(i, "q_last"), vectors(i, "k")
        options = {"kernel": case["kernel"], "pool": {"avg": "average", "max": "max"}[case["pool"]]}
        scores = snapkv.scores(queries, keys, case["w"], **options)
        torch.testing.assert_close(scores, vectors(i, "scores"), **CLOSE)
        kept = snapkv.select(queries, keys, retain=case["N"], buffer=case["w"], **options)
        if case["pool"] == "max":  # neighbours tie exactly: any of them is right
            of_kept = scores.gather(-1, kept[..., : -case["w"]]).sum(dim=-1)
            torch.testing.assert_close(of_kept, vectors(i, "kept_mass"), **CLOSE)
        else:
            assert torch.equal(kept, vectors(i, "kept")), case


def rkv_kept(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        kept = rkv.select(vectors(i, "q_last"), vectors(i, "k"), retain=case["N"], buffer=case["w"], mix=case["lam"])
        assert torch.equal(kept, vectors(i, "kept")), case


def keydiff_kept(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        kept = keydiff.select(None, vectors(i, "k"), retain=case["N"], buffer=case["recent"])
        assert torch.equal(kept, vectors(i, "kept")), case


def chunkkv_kept(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        kept = chunkkv.best_chunks(vectors(i, "scores"), case["N"] - case["w"], case["c"])
        assert torch.equal(kept, vectors(i, "kept")[..., : kept.shape[-1]]), case


def adakv_kept(vectors: Vectors) -> None:
    for i, case in vectors.cases:
        expected = vectors(i, "kept_padded")
        kept = adakv.kept_offsets(vectors(i, "scores"), case["N"], case["w"], expected.shape[-1], str(case["f"]))
        assert torch.equal(kept, expected), case


def paged_compaction(vectors: Vectors) -> None:
    """By the operations that serve on the device."""
    for i, case in vectors.cases:
        size, start = case["B"], case["start"]
        shape = CacheShape(case["L"], case["Hkv"], case["d"], size, torch.float32)
        cache = PagedKVCache(shape, case["num_blocks"], vectors.device)
        planes = [vectors(i, f"{kind}_cache")[0] for kind in "kv"]
        cache.data.copy_(torch.stack(planes, dim=1).transpose(3, 4))
        kept = vectors(i, "kept")[0].unsqueeze(1)
        behind = torch.arange(case["window_blocks"] * size, case["C"] - start, device=vectors.device)
        kept = torch.cat((kept, behind.expand(*kept.shape[:3], -1)), dim=-1)  # the tail survives whole
        table, after = vectors(i, "block_table"), vectors(i, "block_table_after")
        first = start // size
        make_operations(cache).compact(kept, table[:, first:].contiguous(), after[:, first:].contiguous())
        offsets = torch.arange(case["C_after"], device=vectors.device)
        for plane, kind in enumerate("kv"):
            logical = cache.data[:, plane, after[0, offsets // size], :, offsets % size].permute(1, 2, 0, 3)
            assert torch.equal(logical, vectors(i, f"{kind}_after_logical")[0]), case


CHECKS: dict[str, Callable[[Vectors], None]] = {
    "kara_scores": kara_scores,
    "kara_indices_mha": kara_indices,
    "kara_indices_gqa2": kara_indices,
    "kara_indices_gqa4": kara_indices,
    "kara_kvllm_768_a16": kara_window,
    "kara_kvllm_768_a32": kara_window,
    "kara_ablations": kara_ablations,
    "token2chunk": chunks,
    "snapkv": snapkv_kept,
    "rkv": rkv_kept,
    "keydiff": keydiff_kept,
    "chunkkv": chunkkv_kept,
    "adakv": adakv_kept,
    "paged_compaction": paged_compaction,
    "paged_compaction_256": paged_compaction,
}
"""By the name of the file."""
