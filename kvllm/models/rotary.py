"""The table of rotations of a rotary embedding, and the order of channels that it is for.

Checkpoints that rotate only a part of each head rotate its first channels, and some pair neighbouring channels. Here
the rotated pairs are channels `i` and `i + head_dim / 2` of every head, and the other pairs turn by 0: the rows of the
projections to queries and keys are read in that order (`channel_order`), which leaves their products as they are. So
kernels and compression methods know one form of rotation alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvllm.errors import ConfigError
from kvllm.models.config import ModelConfig
from kvllm.models.rope import Rope, RopeScaling


def rotary_table(
    config: ModelConfig, num_positions: int, device: torch.device, rope: Rope | None = None
) -> torch.Tensor:
    """Cosines, then sines, of the rotation angles: float32 `[num_positions, head_dim]`.

    num_positions: those of the longest text, on which some scalings depend. rope: the default is that of `config`.
    """
    rope = rope or config.rope
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * _frequencies(rope, config, num_positions)
    factor = rope.scaling.attention_factor if rope.scaling else 1.0
    still = (num_positions, config.head_dim // 2 - angles.shape[1])
    cosines = torch.cat((angles.cos() * factor, torch.ones(still)), dim=1)
    sines = torch.cat((angles.sin() * factor, torch.zeros(still)), dim=1)
    return torch.cat((cosines, sines), dim=1).to(device)


def rotary_frequencies(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """Rotation of each pair of channels from one position to the next, in radians: float32 `[head_dim / 2]`.

    num_positions: those of the longest text.
    """
    frequencies = _frequencies(config.rope, config, num_positions)
    return torch.cat((frequencies, torch.zeros(config.head_dim // 2 - len(frequencies))))


def check_one_rotation(config: ModelConfig, windows: Sequence[int | None]) -> None:
    """Raise ConfigError if layers that are compressed, those without a window, differ in their rotation. Methods that
    reckon with it know the one of `config.rope`.

    windows: of each layer, with the length of the longest text.
    """
    others = [layer for layer in config.second_rope_layers if windows[layer] is None]
    if others and config.second_rope != config.rope:
        raise ConfigError(
            f"layers {', '.join(map(str, others))} of the model rotate keys in another way than its other layers, or "
            "not at all. This compression method reckons with one rotation: use one that does not, such as "
            "mean_attention or keydiff"
        )


def channel_order(config: ModelConfig) -> torch.Tensor | None:
    """The channel of the checkpoint's heads that each channel of a head is: int64 `[head_dim]`, None if it is the same
    one."""
    rotated = config.rope.rotated_channels(config.head_dim)
    if (rotated == config.head_dim and not config.rope.interleaved) or config.rope.proportional:
        return None
    turning, still = torch.arange(config.head_dim).split((rotated, config.head_dim - rotated))
    low, high = (turning[::2], turning[1::2]) if config.rope.interleaved else turning.chunk(2)
    first, second = still.chunk(2)
    return torch.cat((low, first, high, second))


def _frequencies(rope: Rope, config: ModelConfig, num_positions: int) -> torch.Tensor:
    """Those of the rotated pairs."""
    rotated = rope.rotated_channels(config.head_dim)
    width = config.head_dim if rope.proportional else rotated
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / width
    scaling, theta = rope.scaling, rope.theta
    if scaling is None:
        return 1.0 / theta**exponents
    if scaling.kind == "longrope":
        long = num_positions > scaling.original_max_position_embeddings
        return 1.0 / (torch.tensor(scaling.long_factor if long else scaling.short_factor) * theta**exponents)
    if scaling.kind == "yarn":
        return _yarn(scaling, theta, exponents)
    if scaling.kind == "dynamic":
        stretch = scaling.factor * max(1.0, num_positions / scaling.original_max_position_embeddings)
        theta = theta * (stretch - (scaling.factor - 1)) ** (rotated / (rotated - 2))
        return 1.0 / theta**exponents
    frequencies = 1.0 / theta**exponents
    return frequencies / scaling.factor if scaling.kind == "linear" else _llama3(scaling, frequencies)


def _llama3(scaling: RopeScaling, frequencies: torch.Tensor) -> torch.Tensor:
    # Operation for operation as in transformers: at position 100,000 a rounding error in a frequency shows.
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_max_position_embeddings / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(scaling: RopeScaling, theta: float, exponents: torch.Tensor) -> torch.Tensor:
    # Operation for operation as in transformers, too.
    pairs = len(exponents)

    def pair_with(turns: float) -> float:
        """The pair, not a whole number, that makes so many turns over the pretraining length."""
        length = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return 2 * pairs * math.log(length) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    powers = theta**exponents
    kept = 1 - ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
