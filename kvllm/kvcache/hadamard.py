"""The rotation of vectors by a Hadamard matrix, which spreads a channel that exceeds the others over all of them."""

from __future__ import annotations

import torch

from kvllm._extension import operator


def hadamard(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors `[..., d]`, times the orthonormal Hadamard matrix in Sylvester's order -> float32 of the same shape.

    d is a power of two. The matrix is symmetric, so it is its own inverse, and products of vectors stay what they are.
    """
    size = vectors.shape[-1]
    if vectors.is_cpu and vectors.dtype in (torch.float32, torch.bfloat16) and 32 <= size <= 256:
        return operator("hadamard")(vectors.reshape(-1, size)).view(vectors.shape)
    return torch_hadamard(vectors)


def torch_hadamard(vectors: torch.Tensor) -> torch.Tensor:
    """The same in plain torch. Each sum adds channels in pairs, then pairs of pairs, as operators and kernels do: all
    of them get the same bits."""
    size, rotated = vectors.shape[-1], vectors.float()
    for _ in range(size.bit_length() - 1):  # each moves the lowest bit of a channel's index to the top
        first, second = rotated[..., ::2], rotated[..., 1::2]
        rotated = torch.cat((first + second, first - second), dim=-1)
    return rotated * size**-0.5
