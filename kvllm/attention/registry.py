"""The attention backends by name, and the limits of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from kvllm.attention.base import AttentionBackend
from kvllm.attention.layer import LayerAttention
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops import registry as operations
from kvllm.kvcache.ops.cpu import why_not_quantize


@dataclass(frozen=True)
class AttentionSpec:
    """A request to a backend.

    layers: as in AttentionBackend. ragged: heads hold different numbers of KV pairs. mass: attention probabilities
    are added up. residual: recent KV pairs are attended as they were before they were rounded.
    """

    cache: PagedKVCache
    num_query_heads: int
    layers: Sequence[LayerAttention] = ()
    ragged: bool = False
    mass: bool = False
    residual: bool = False


def _why_not_options(spec: AttentionSpec) -> str | None:
    """The reason of a backend that attends all earlier KV pairs, with scores that have no bound."""
    for options in spec.layers:
        if options.window is not None:
            return f"attends all earlier tokens, the model has layers with a sliding window of {options.window}"
        if options.soft_cap is not None:
            return f"does not bound scores, the model has layers with a soft cap of {options.soft_cap:g}"
    return None


def _why_not_sinks(spec: AttentionSpec) -> str | None:
    if any(options.sinks for options in spec.layers):
        return "knows no learned scores beside those of KV pairs, the model has layers with attention sinks"
    return None


def why_not_cpu(spec: AttentionSpec) -> str | None:
    """The reason why the compiled CPU operators cannot serve a spec, None if they can. So do the functions below."""
    shape = spec.cache.shape
    group = spec.num_query_heads // shape.num_kv_heads
    if not spec.cache.data.is_cpu:
        return f"cannot read a cache on {spec.cache.data.device}"
    if group > 64:
        return f"shares a KV head among at most 64 query heads, the model has {group}"
    if shape.dtype not in (torch.float32, torch.bfloat16) or shape.head_dim % 2:
        return f"reads float32 or bfloat16 with an even head_dim, not {shape.dtype} with head_dim {shape.head_dim}"
    if shape.kv_format and (reason := why_not_quantize(shape)):
        return reason
    return None


def why_not_triton(spec: AttentionSpec) -> str | None:
    shape = spec.cache.shape
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if not spec.cache.data.is_cuda:
        if os.environ.get("TRITON_INTERPRET") != "1":
            return f"runs on CUDA devices, not on {spec.cache.data.device}"
        if shape.dtype == torch.bfloat16:
            return "cannot use bfloat16 in Triton's interpreter, whose bfloat16 arithmetic is wrong"
    if shape.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes in bfloat16, float16 or float32, not {shape.dtype}"
    if shape.block_size < 16 or shape.block_size & (shape.block_size - 1):
        return f"needs a block_size that is a power of two from 16 on, not {shape.block_size}"
    if shape.head_dim % 16 or not 16 <= shape.head_dim <= (576 if shape.shared else 512):
        return f"needs a head_dim that is a multiple of 16 up to 512, or 576 in latent attention, not {shape.head_dim}"
    return operations.why_not_triton(spec.cache)


def why_not_flash_attn(spec: AttentionSpec) -> str | None:
    if spec.cache.shape.block_size % 256:
        return f"needs a block_size that is a multiple of 256, not {spec.cache.shape.block_size}"
    return _why_not_flash_head_dim(spec) or _why_not_library(spec, "flash_attn", "flash-attn")


def why_not_flash_attn_3(spec: AttentionSpec) -> str | None:
    if reason := _why_not_flash_head_dim(spec) or _why_not_library(spec, "flash_attn_interface", "flash-attn-3"):
        return reason
    major, minor = torch.cuda.get_device_capability(spec.cache.data.device)
    if major not in (8, 9):
        return f"runs on GPUs of compute capability 8 and 9, not {major}.{minor}"
    return None


def _why_not_flash_head_dim(spec: AttentionSpec) -> str | None:
    head_dim = spec.cache.shape.head_dim
    if head_dim % 8 or head_dim > 256:
        return f"needs a head_dim that is a multiple of 8 up to 256, not {head_dim}"
    return None


def why_not_flashinfer(spec: AttentionSpec) -> str | None:
    if spec.cache.shape.head_dim not in (64, 128, 256):
        return f"needs a head_dim of 64, 128 or 256, not {spec.cache.shape.head_dim}"
    return _why_not_library(spec, "flashinfer", "flashinfer-python")


def why_not_xformers(spec: AttentionSpec) -> str | None:
    shape = spec.cache.shape
    if shape.block_size % 64:
        return f"needs a block_size that is a multiple of 64, not {shape.block_size}"
    if shape.head_dim not in (16, 32, 64, 128, 256):
        return f"needs a head_dim that is a power of two from 16 to 256, not {shape.head_dim}"
    return _why_not_options(spec) or _why_not_sinks(spec) or _why_not_library(spec, "xformers", "xformers")


def _why_not_library(spec: AttentionSpec, module: str, package: str) -> str | None:
    """Limits that the attention libraries have in common."""
    if spec.cache.shape.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {spec.cache.shape.dtype}"
    if spec.ragged:
        return "cannot leave out KV pairs of single heads, which the compression method asks for"
    if spec.mass:
        return "does not tell the attention probabilities, which the compression method adds up"
    if find_spec(module) is None:
        return f"needs the package {package}, which is not installed"
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed, to write the cache"
    if not spec.cache.data.is_cuda:
        return f"runs on CUDA devices, not on {spec.cache.data.device}"
    return None


@dataclass(frozen=True)
class Entry:
    """module, type: where the backend is; it is imported only when it is asked for.

    reads: quantized caches that it reads, whatever else a spec has; with_residual: beside a residual, too. limits: the
        reason why it cannot serve a spec.
    """

    module: str
    type: str
    limits: Callable[[AttentionSpec], str | None]
    reads: tuple[str, ...] = ()
    with_residual: bool = False

    def why_not(self, spec: AttentionSpec) -> str | None:
        """The reason why it cannot serve a spec, None if it can."""
        kv_format = spec.cache.shape.kv_format
        if kv_format and kv_format.name not in self.reads:
            return f"does not read a KV cache of {kv_format.name}"
        if spec.residual and not self.with_residual:
            return "does not read kv_residual_tokens"
        return self.limits(spec)


BACKENDS = {
    "cpu": Entry("kvllm.attention.cpu", "CpuBackend", why_not_cpu, tuple(KV_FORMATS), with_residual=True),
    "flash_attn": Entry("kvllm.attention.flash_attn", "FlashAttentionBackend", why_not_flash_attn),
    "flash_attn_3": Entry("kvllm.attention.flash_attn_3", "FlashAttention3Backend", why_not_flash_attn_3),
    "flashinfer": Entry("kvllm.attention.flashinfer", "FlashInferBackend", why_not_flashinfer),
    "reference": Entry("kvllm.attention.reference", "ReferenceBackend", lambda spec: None, tuple(KV_FORMATS)),
    "triton": Entry("kvllm.attention.triton", "TritonBackend", why_not_triton, tuple(KV_FORMATS)),
    "xformers": Entry("kvllm.attention.xformers", "XformersBackend", why_not_xformers),
}
FASTEST = ("cpu", "triton", "flash_attn_3", "flash_attn", "flashinfer", "xformers", "reference")
"""The backends that "auto" tries; those of other packages add shapes of blocks and heads that triton does not take."""


def make_backend(
    name: str,
    cache: PagedKVCache,
    num_query_heads: int,
    scale: float,
    layers: Sequence[LayerAttention] = (),
    *,
    ragged: bool = False,
    mass: bool = False,
    residual: bool = False,
) -> AttentionBackend:
    """The backend `name` over `cache`; "auto" takes the fastest one that can do it.

    layers, ragged, mass, residual: as in AttentionSpec.
    Raises ConfigError for a name that is not in BACKENDS, for a backend that cannot serve the cache, and where only the
    reference reads a quantized cache, unless it is asked for.
    """
    spec = AttentionSpec(cache, num_query_heads, layers, ragged, mass, residual)
    able = [other for other in FASTEST if BACKENDS[other].why_not(spec) is None]
    if not able:
        raise ConfigError(f"no attention backend for {cache.data.device} reads kv_residual_tokens: leave it out")
    if name == "auto":
        name = able[0]
        if name == "reference" and cache.shape.kv_format:
            raise ConfigError(
                f"kv_cache_dtype={cache.shape.kv_format.name!r}: no attention backend for {cache.data.device} reads it "
                "but 'reference', which is too slow to serve with: name that one, or take another kv_cache_dtype"
            )
    if name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}: use 'auto' or one of {', '.join(sorted(BACKENDS))}")
    if reason := BACKENDS[name].why_not(spec):
        alternatives = " or ".join(repr(other) for other in able)
        raise ConfigError(f"the attention backend {name!r} {reason}: use {alternatives}")
    backend: type[AttentionBackend] = getattr(import_module(BACKENDS[name].module), BACKENDS[name].type)
    return backend(cache, num_query_heads, scale, layers)


def explain(asked: str, spec: AttentionSpec) -> str:
    """The name of the backend that `make_backend` takes when `asked` for one, and why, for a log."""
    if asked != "auto":
        return f"{asked} (as asked)"
    chosen = next(name for name in FASTEST if BACKENDS[name].why_not(spec) is None)
    faster = [name for name in FASTEST[: FASTEST.index(chosen)] if name != "cpu" or spec.cache.data.is_cpu]
    reasons = [f"{name} {BACKENDS[name].why_not(spec)}" for name in faster]
    return f"{chosen} ({'; '.join(reasons) or 'the fastest here'})"
