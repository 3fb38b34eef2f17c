"""A decoder over one whole text in float64, of any family, with its own scale, soft cap and learned sinks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from kvllm.compression.gates import Gates
from kvllm.compression.mass import Softmax
from tests.helpers.dense_decoder import DensePass, attend


@dataclass
class _Run:
    """One pass. visible, cached: as `DenseDecoder` has them. softmax: of each layer, as transformers asks for it."""

    visible: Tensor
    cached: DensePass | None
    found: DensePass = field(default_factory=lambda: DensePass(torch.empty(0), [], [], []))
    softmax: list[Softmax] = field(default_factory=list)


class TransformersDecoder:
    """`DenseDecoder` for what transformers has: all is computed there, but attention, which is written out here."""

    def __init__(self, path: Path) -> None:
        AttentionInterface.register("written_out", _attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="written_out", experts_implementation="eager"
        ).eval()
        self.statistics: dict[str, Tensor] = {}
        self.gates: dict[str, Gates] = {}
        self._softmax: list[Softmax] = []

    @property
    def frequencies(self) -> Tensor:
        """The rotation's, of models whose layers all have the same."""
        return self.model.model.rotary_emb.inv_freq.float()

    def softmax(self, layer: int) -> Softmax:
        """The softmax of a layer in the passes so far."""
        return self._softmax[layer]

    def forward(self, token_ids: list[int], visible: Tensor) -> DensePass:
        """As `DenseDecoder.forward`."""
        return self._forward(token_ids, list(range(len(token_ids))), _Run(visible, None))

    def recompute(self, text: DensePass, token_ids: list[int], positions: list[int], visible: Tensor) -> DensePass:
        """As `DenseDecoder.recompute`."""
        return self._forward([token_ids[position] for position in positions], positions, _Run(visible, text))

    @torch.no_grad()
    def _forward(self, token_ids: list[int], positions: list[int], run: _Run) -> DensePass:
        ids, places = torch.tensor([token_ids]), torch.tensor([positions])
        run.found.logits = self.model(ids, position_ids=places, use_cache=False, run=run).logits[0]
        self._softmax = run.softmax
        return run.found


def _attend(
    module: Any,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    run: _Run,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer of transformers: `[1, heads, T, d]` -> `[1, T, Hq, d]`."""
    found = run.found
    layer = len(found.queries)  # among those with attention
    found.queries.append(queries[0])
    found.keys.append(keys[0] if run.cached is None else run.cached.keys[layer])
    found.values.append(values[0] if run.cached is None else run.cached.values[layer])
    run.softmax.append(Softmax(scaling, softcap, None if s_aux is None else s_aux.float()))
    attended = attend(queries[0], found.keys[layer], found.values[layer], run.visible[layer], run.softmax[layer])
    return attended.transpose(0, 1)[None], None
