"""The backends that are made of other packages: what is passed to these, and what the backends refuse.

Their kernels need a GPU. On the CPU the packages' functions are written out here, over xFormers' own masks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvllm import LLM
from kvllm.attention import registry as backends
from kvllm.attention.base import HostRows
from kvllm.attention.layer import LayerAttention
from kvllm.attention.registry import make_backend
from kvllm.attention.runs import runs_of
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from tests.helpers import attention_cases, literal_flashinfer
from tests.helpers.compressions import paper_compression
from tests.helpers.literal_attention import attend, attend_with_sums

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs the package triton, which is not installed"
)

# Runs of rows


def test_runs() -> None:
    """A decode, a chunk after cached entries, rows of a recomputation, and a decode that follows none of them."""
    case = attention_cases.make_case([[64], list(range(40, 59)), [3, 6, 7, 8], [9]])
    runs = runs_of(case.batch)
    assert runs.starts.tolist() == [0, 1, 20, 21, 24, 25]
    assert runs.sequences.tolist() == [0, 1, 2, 2, 3]
    assert runs.lengths.tolist() == [65, 59, 4, 9, 10]
    assert runs.sizes.tolist() == [1, 19, 1, 3, 1]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with literal_flashinfer.installed(monkeypatch):
        yield


@needs_triton
@pytest.mark.usefixtures("flash_attn_3", "flashinfer")
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flashinfer"])
def test_nothing_is_read_back_of_what_the_host_knows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The rows on the device are tensors that nothing can be read from."""
    install_flash_attn(monkeypatch, "2.8.3")
    case = attention_cases.make_case(attention_cases.MIXED, block_size=256)
    starts, index = case.batch.query_start_loc, case.batch.last_kv_index
    on_device = {"query_start_loc": starts.to("meta"), "last_kv_index": index.to("meta")}
    batch = replace(case.batch, on_host=HostRows(starts.numpy(), index.numpy()), **on_device)
    types = {"flash_attn": "FlashAttentionBackend", "flash_attn_3": "FlashAttention3Backend"}
    backend = on_the_cpu(f"kvllm.attention.{name}", types.get(name, "FlashInferBackend"), case)
    found = backend.run(0, case.queries, backend.plan(batch))
    monkeypatch.delitem(sys.modules, "kvllm.attention.flash_attn", raising=False)
    torch.testing.assert_close(found.double(), attention_cases.dense_attention(case), atol=3e-6, rtol=3e-6)


# FlashAttention


def paged(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first entries `[length, kv_heads, d]` of a cache `[blocks, block_size, kv_heads, d]`."""
    return cache[block_table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    return_softmax_lse: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q `[S, 1, query_heads, d]`: the newest row of each sequence."""
    assert return_softmax_lse and len(q) == len(cache_seqlens) == len(block_table)
    output, sums = [], []
    for row, n, table in zip(q, cache_seqlens.tolist(), block_table, strict=True):
        visible = in_window(torch.ones(1, n).bool(), window_size)
        pairs = paged(k_cache, table, n), paged(v_cache, table, n)
        found, log_sums = attend_with_sums(row, *pairs, visible, softmax_scale, softcap)
        output.append(found)
        sums.append(log_sums.T)
    return torch.stack(output), torch.stack(sums)


def in_window(visible: torch.Tensor, window_size: tuple[int, int]) -> torch.Tensor:
    """Without what is more than `window_size[0]` entries before a row's own; the last row's own is the last entry."""
    num_rows, length = visible.shape
    return visible if window_size == (-1, -1) else visible.triu(length - num_rows - window_size[0])


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    return_attn_probs: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """q `[T, query_heads, d]`; the last row of each sequence sees all of its entries, the one before one less. Decodes
    do not come here."""
    assert return_attn_probs and (cu_seqlens_q.diff() > 1).all()
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    sizes, lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max_seqlen_q == max(sizes) and max_seqlen_k == max(lengths)
    output, sums = [], []
    for rows, n, table in zip(q.split(sizes), lengths, block_table, strict=True):
        visible = in_window(torch.ones(len(rows), n).tril(n - len(rows)).bool(), window_size)
        pairs = paged(k, table, n), paged(v, table, n)
        found, log_sums = attend_with_sums(rows, *pairs, visible, softmax_scale, softcap)
        output.append(found)
        sums.append(log_sums)
    return torch.cat(output), torch.cat(sums).T, None


def on_the_cpu(module: str, name: str, case: attention_cases.AttentionCase) -> Any:
    """A backend over a cache on the CPU, which `make_backend` does not allow."""
    return getattr(import_module(module), name)(case.cache, case.queries.shape[1], case.scale, (case.options,))


def install_flash_attn(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    library = ModuleType("flash_attn")
    library.__version__ = version
    library.flash_attn_with_kvcache = flash_attn_with_kvcache
    library.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.delitem(sys.modules, "kvllm.attention.flash_attn", raising=False)


@pytest.mark.parametrize(
    "version, capturable", [("2.7.4", True), ("2.8.3.post1", True), ("2.8.4", False), ("2.10.0+cu13", False)]
)
def test_versions_of_flash_attn_that_wait_for_the_device_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, version: str, capturable: bool
) -> None:
    install_flash_attn(monkeypatch, version)
    backend = import_module("kvllm.attention.flash_attn").FlashAttentionBackend
    monkeypatch.delitem(sys.modules, "kvllm.attention.flash_attn")
    assert backend.capturable is capturable


@needs_triton
@pytest.mark.parametrize("rows", [attention_cases.MIXED, [[600], [0], [255]]], ids=["mixed", "decodes"])
@pytest.mark.parametrize("options", ["plain", "window 5", "window 100", "soft cap", "sinks", "all"])
def test_flash_attn(monkeypatch: pytest.MonkeyPatch, rows: list[list[int]], options: str) -> None:
    install_flash_attn(monkeypatch, "2.8.3")
    case = attention_cases.make_case(rows, block_size=256, head_dim=64, group=3)
    case = attention_cases.with_options(case, attention_cases.OPTIONS[options])
    backend = on_the_cpu("kvllm.attention.flash_attn", "FlashAttentionBackend", case)
    found = backend.run(0, case.queries, backend.plan(case.batch), case.sinks)
    monkeypatch.delitem(sys.modules, "kvllm.attention.flash_attn")
    torch.testing.assert_close(found.double(), attention_cases.dense_attention(case), atol=3e-6, rtol=3e-6)


# FlashAttention 3


def flash_attn_3_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[T, query_heads, d]`; the last row of each sequence sees all of its entries, the one before one less. Values
    after a sequence's last entry are multiplied by zero, as the kernel does in its last tile."""
    assert causal and return_softmax_lse and all(tensor.stride(-1) == 1 for tensor in (q, k_cache, v_cache, page_table))
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    assert cache_seqlens.is_contiguous() and len(cache_seqlens) == len(page_table) == len(cu_seqlens_q) - 1
    sizes = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max(sizes) and (max_seqlen_q == 1 or min(sizes) > 1), "decodes and chunks are apart"
    output, sums = [], []
    for rows, n, table in zip(q.split(sizes), cache_seqlens.tolist(), page_table, strict=True):
        whole = -(-n // k_cache.shape[1]) * k_cache.shape[1]
        visible = in_window(torch.ones(len(rows), n).tril(n - len(rows)).bool(), window_size)
        visible = torch.nn.functional.pad(visible, (0, whole - n))
        keys, values = paged(k_cache, table, whole), paged(v_cache, table, whole)
        assert values.isfinite().all()
        found, log_sums = attend_with_sums(rows, keys, values, visible, softmax_scale, softcap)
        output.append(found)
        sums.append(log_sums)
    return torch.cat(output), torch.cat(sums).T, torch.empty(0), torch.empty(0)


@pytest.fixture
def flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = ModuleType("flash_attn_interface")
    library.flash_attn_with_kvcache = flash_attn_3_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    monkeypatch.delitem(sys.modules, "kvllm.attention.flash_attn_3", raising=False)
    yield
    monkeypatch.delitem(sys.modules, "kvllm.attention.flash_attn_3", raising=False)


@pytest.mark.usefixtures("flash_attn_3")
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("rows", [attention_cases.MIXED, [[600], [0], [255]]], ids=["mixed", "decodes"])
@pytest.mark.parametrize("options", ["plain", "window 1", "window 100", "soft cap", "sinks", "all"])
def test_flash_attn_3(rows: list[list[int]], options: str, block_size: int) -> None:
    case = attention_cases.make_case(rows, block_size=block_size, head_dim=64, group=3)
    case = attention_cases.with_options(case, attention_cases.OPTIONS[options])
    backend = on_the_cpu("kvllm.attention.flash_attn_3", "FlashAttention3Backend", case)
    found = backend.run(0, case.queries, backend.plan(case.batch), case.sinks)
    torch.testing.assert_close(found.double(), attention_cases.dense_attention(case), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("capability, reason", [((9, 0), None), ((8, 6), None), ((10, 0), "10.0"), ((12, 0), "12.0")])
def test_flash_attn_3_has_no_kernels_for_later_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str | None
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda package: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cache = PagedKVCache(SHAPE, 1)
    with FakeTensorMode():
        cache.data = torch.empty(0, dtype=SHAPE.dtype, device="cuda")  # which needs no device
    assert backends.why_not_flash_attn_3(backends.AttentionSpec(cache, 4)) == (
        reason and f"runs on GPUs of compute capability 8 and 9, not {reason}"
    )


# xFormers


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_bias: Any,
    scale: float,
    op: Any = None,
) -> torch.Tensor:
    """`[1, T, heads, d]`, or `[1, T, groups, heads, d]`, with a mask as xFormers itself writes it out."""
    if op is not None:
        assert op.NAME.startswith("triton_splitK") and attn_bias.page_size % op.BLOCK_N == 0
    entries = attn_bias.k_seqinfo.seqstart_py[-1]
    visible = attn_bias.materialize((query.shape[1], entries), device=query.device) == 0
    queries, keys, values = (tensor[0].flatten(1, -2) for tensor in (query, key, value))
    hidden = torch.zeros(len(queries), len(keys) - visible.shape[1], dtype=torch.bool)
    return attend(queries, keys.nan_to_num(), values, torch.cat((visible, hidden), 1), scale).view_as(query)


@needs_triton
@pytest.mark.skipif(find_spec("xformers") is None, reason="needs the package xformers, which is not installed")
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "rows", [attention_cases.MIXED, [[300], [0]], [list(range(70))]], ids=["mixed", "decodes", "prompt"]
)
def test_xformers(monkeypatch: pytest.MonkeyPatch, rows: list[list[int]], group: int) -> None:
    from xformers.ops import fmha

    monkeypatch.setattr(fmha, "memory_efficient_attention_forward", memory_efficient_attention)
    case = attention_cases.make_case(rows, block_size=64, head_dim=32, group=group)
    tables = case.batch.block_tables
    unused = min(set(range(case.cache.num_blocks)) - set(tables.flatten().tolist()))
    case = replace(case, batch=replace(case.batch, block_tables=tables.where(tables >= 0, unused)))
    backend = on_the_cpu("kvllm.attention.xformers", "XformersBackend", case)
    found = backend.run(0, case.queries, backend.plan(case.batch))
    torch.testing.assert_close(found.double(), attention_cases.dense_attention(case), atol=3e-6, rtol=3e-6)


# What is refused

SHAPE = CacheShape(1, 2, 64, 256, torch.bfloat16)


PACKAGES = {
    "flash_attn": "flash-attn",
    "flash_attn_3": "flash-attn-3",
    "flashinfer": "flashinfer-python",
    "xformers": "xformers",
}
OWN_LIMITS = {
    "flash_attn": (
        ("multiple of 256, not 32", {"block_size": 32}, {}),
        ("multiple of 8 up to 256, not 300", {"head_dim": 300}, {}),
    ),
    "flash_attn_3": (("multiple of 8 up to 256, not 300", {"head_dim": 300}, {}),),
    "flashinfer": (("head_dim of 64, 128 or 256, not 96", {"head_dim": 96}, {}),),
    "xformers": (
        ("multiple of 64, not 32", {"block_size": 32}, {}),
        ("power of two from 16 to 256, not 300", {"head_dim": 300}, {}),
        ("knows no learned scores", {}, {"layers": (LayerAttention(sinks=True),)}),
    ),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_refusals(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for message, fields, options in (
        ("computes in bfloat16 or float16, not torch.float32", {"dtype": torch.float32}, {}),
        ("does not read a KV cache of int8", {"kv_format": KV_FORMATS["int8"]}, {}),
        ("cannot leave out KV pairs of single heads", {}, {"ragged": True}),
        ("does not tell the attention probabilities", {}, {"mass": True}),
        *OWN_LIMITS[name],
    ):
        with pytest.raises(ConfigError, match=f"'{name}' .*{message}.*: use 'cpu' or 'reference'"):
            make_backend(name, PagedKVCache(replace(SHAPE, **fields), 1), 4, 1.0, **options)
    with monkeypatch.context() as patch:
        patch.setattr(backends, "find_spec", lambda package: None)
        with pytest.raises(
            ConfigError, match=f"needs the package {PACKAGES[name]}, which is not installed: use 'cpu' or"
        ):
            make_backend(name, PagedKVCache(SHAPE, 1), 4, 1.0)
    monkeypatch.setattr(backends, "find_spec", lambda package: True)
    with pytest.raises(ConfigError, match="runs on CUDA devices, not on cpu: use 'cpu' or 'reference'"):
        make_backend(name, PagedKVCache(SHAPE, 1), 4, 1.0)


@pytest.mark.parametrize("name", ["window 5", "soft cap"])
def test_xformers_refuses_options_of_layers(name: str) -> None:
    message = {"window 5": "attends all earlier tokens.* sliding window of 5", "soft cap": "a soft cap of 0.5"}[name]
    with pytest.raises(ConfigError, match=f"'xformers' .*{message}: use 'cpu' or 'reference'"):
        make_backend("xformers", PagedKVCache(SHAPE, 1), 4, 1.0, (attention_cases.OPTIONS[name],))


@needs_triton
@pytest.mark.skipif(find_spec("xformers") is None, reason="needs the package xformers, which is not installed")
def test_holes_are_refused() -> None:
    case = attention_cases.make_ragged_case(block_size=64)
    backend = on_the_cpu("kvllm.attention.xformers", "XformersBackend", case)
    with pytest.raises(ConfigError, match="'xformers' cannot leave out KV pairs of single heads: use 'triton'"):
        backend.plan(case.batch)


def test_auto_goes_by_what_can_do_it() -> None:
    half = PagedKVCache(replace(SHAPE, dtype=torch.float16), 1)
    assert make_backend("auto", half, 4, 1.0).name == "reference"
    assert make_backend("auto", PagedKVCache(SHAPE, 1), 4, 1.0).name == "cpu"
    with pytest.raises(ConfigError, match="'cpu' shares a KV head among at most 64 query heads.*: use 'reference'"):
        make_backend("cpu", PagedKVCache(SHAPE, 1), 200, 1.0)


@pytest.mark.parametrize("method, reason", [("h2o", "attention probabilities"), ("adakv", "KV pairs of single heads")])
def test_the_engine_says_what_a_method_needs(method: str, reason: str) -> None:
    cache = {"policy": "threshold", "threshold_tokens": 512, "budget_tokens": 256}
    with pytest.raises(ConfigError, match=f"'flash_attn' .*{reason}.*: use 'cpu' or 'reference'"):
        LLM(
            attention_backend="flash_attn",
            device="cpu",
            dtype="bfloat16",
            block_size=256,
            compression=paper_compression(method=method, **cache),
        )
