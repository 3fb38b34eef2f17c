"""What Mamba-2 heads beside attention have, read from `config.json`. Free of torch."""

from __future__ import annotations

import msgspec


class Mamba(msgspec.Struct, frozen=True, kw_only=True):
    """Mamba-2 heads in every layer, beside attention of the same input; their sizes are those of `RecurrentLayers`.

    conv_bias: the convolution has a bias. norm: the output of each group is normalized, "before" or "after" it is
        multiplied by its gate; None: it is not.
    gate, x, b, c, step: what the projections to these are multiplied by. output: the same of the output.
    attention_input, attention_output: of attention. mlp_gate, mlp_down: of projections of the MLP.
    """

    conv_bias: bool
    norm: str | None
    gate: float
    x: float
    b: float
    c: float
    step: float
    output: float
    attention_input: float
    attention_output: float
    mlp_gate: float
    mlp_down: float
