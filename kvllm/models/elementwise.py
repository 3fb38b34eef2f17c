"""The work between the matrix products: normalization, rotary embedding, gated activation.

CPU tensors go to the compiled operators, CUDA tensors to the Triton kernels if Triton is installed, all others to the
plain torch functions at the end of this file, which define the results. Arithmetic is in float32; values are rounded to
the tensor's dtype where Hugging Face's modules round them, except that the rotation rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from kvllm._extension import operator


@cache
def _implementation(name: str, device: str) -> Callable[..., Any]:
    """The function of this file `name`, for tensors on a type of device."""
    if device == "cpu":
        return operator("rotary_" if name == "rotary" else name)
    if device == "cuda" and find_spec("triton"):
        return getattr(import_module("kvllm.kernels.elementwise"), name)
    return globals()[f"torch_{name}"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension: contiguous `[T, D]`, weight `[D]` of the same dtype -> `[T, D]`.

    A weight of float32 for an `x` of 16 bits multiplies before the result is rounded, which happens once.
    """
    return _implementation("rms_norm", x.device.type)(x, weight, eps)


def add_rms_norm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to `residual` in place and return the RMSNorm of the sum, as `rms_norm`; both `[T, D]`."""
    return _implementation("add_rms_norm", x.device.type)(residual, x, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[T, 2 * I]`, gate in the first half -> `[T, I]`."""
    return _implementation("silu_mul", gate_up.device.type)(gate_up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` of `[T, 2 * I]`, gate in the first half -> `[T, I]`; GELU by its approximation with tanh."""
    return operator("gelu_mul")(gate_up) if gate_up.is_cpu else torch_gelu_mul(gate_up)


def rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Normalize (optionally) and rotate the query and key heads of `qkv` in place.

    qkv: contiguous `[T, >= (num_query_heads + num_kv_heads) * head_dim]`: query heads, key heads, then anything, which
        is left alone. `num_kv_heads` may be 0.
    positions: int64 `[T]`.
    cos_sin: float32 `[max_positions, head_dim]`, cosines in the first half of a row, sines in the second.
    q_weight, k_weight: `[head_dim]`, RMSNorm of each head before the rotation (Qwen3), or None. Of the dtype of `qkv`,
        or of float32 (`rms_norm`).
    """
    rotate = _implementation("rotary", qkv.device.type)
    rotate(qkv, positions, cos_sin, num_query_heads, num_kv_heads, head_dim, q_weight, k_weight, eps)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (scaled.to(weight.dtype) * weight).to(x.dtype)


def torch_add_rms_norm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch_rms_norm(residual.add_(x), weight, eps)


def torch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def torch_gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def torch_rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first = 0
    for num_heads, weight in ((num_query_heads, q_weight), (num_kv_heads, k_weight)):
        heads = qkv[:, first : first + num_heads * head_dim].unflatten(1, (num_heads, head_dim))
        first += num_heads * head_dim
        x = heads if weight is None else torch_rms_norm(heads, weight, eps)
        low, high = x.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
