"""Linear maps that are learned while an engine runs: ridge regression, for each KV head of a layer by itself."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3
"""Of features and targets whose variance is 1."""
FORGET = 1 / 32
"""What a window that is added takes from the weight of each one before."""


class LinearFit:
    """From F features of a KV pair to a target, for each KV head, by the windows that are added, the last ones most.

    It has no constant: what is predicted serves to compare KV pairs of a head.
    windows: added so far. weights: float32 `[Hkv, F]`, by these windows; None before the first.
    """

    def __init__(self) -> None:
        self.windows = 0
        self.weights: Tensor | None = None
        self._products: Tensor | None = None  # of each window's rows (1, features, target) with themselves, summed

    @staticmethod
    def bytes_for(num_kv_heads: int, num_features: int) -> int:
        """The most bytes that the sums of one layer take."""
        return 8 * num_kv_heads * (num_features + 2) ** 2

    @torch.no_grad()
    def add(self, features: Tensor, targets: Tensor) -> None:
        """Learn from windows, one after the other.

        features: float32 `[S, Hkv, n, F]`. targets: float32 `[S, Hkv, n]`.
        """
        products = self._products
        for of_window in zip(features, targets, strict=True):
            product = _products(*of_window)
            products = product if products is None else (1 - FORGET) * products + product
        if products is not None:
            self._products, self.weights = products, _solve(products)
        self.windows += len(features)

    def predict(self, features: Tensor) -> Tensor:
        """Targets less a constant: float32 `[S, Hkv, n]`, bit-identical for a window whatever the others are. Zeros
        before anything was learned."""
        if self.weights is None:
            return torch.zeros_like(features[..., 0])
        return (features * self.weights[:, None]).sum(dim=-1)


def _products(features: Tensor, targets: Tensor) -> Tensor:
    """float64 `[Hkv, F + 2, F + 2]` from `[Hkv, n, F]` and `[Hkv, n]`."""
    ones = torch.ones_like(targets)[..., None]
    rows = torch.cat((ones, features, targets[..., None]), dim=-1).double()
    return torch.bmm(rows.mT, rows)


def _solve(products: Tensor) -> Tensor:
    """The weights, from sums of `_products`."""
    means = products[:, 0, 1:] / products[:, :1, 0]
    covariance = products[:, 1:, 1:] / products[:, :1, :1] - means[:, :, None] * means[:, None]
    variances = covariance.diagonal(dim1=1, dim2=2)[:, :-1]
    # A feature that never varies has a weight of 0, whatever it is divided by.
    scale = torch.where(variances > 1e-12, variances, 1).sqrt()
    correlation = covariance[:, :-1, :-1] / (scale[:, :, None] * scale[:, None])
    correlation.diagonal(dim1=1, dim2=2).add_(RIDGE)
    of_target = covariance[:, :-1, -1] / scale
    return (torch.linalg.solve(correlation, of_target) / scale).float()
