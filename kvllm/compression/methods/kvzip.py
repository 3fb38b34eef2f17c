"""KVzip (Kim et al., arXiv 2505.23416): keep what the model attends to when it repeats the text.

The text is given to the model once more, after what is cached of it, and the score of a KV pair is the highest
attention that it receives there. So no question needs to be known: what the text can be written from again is enough
to answer any. The paper asks for the repetition in words, and keeps more in some heads than in others. Here the tokens
alone follow, and all heads keep equally many.
"""

from __future__ import annotations

from torch import Tensor

from kvllm.compression.methods.token2chunk import choose
from kvllm.compression.region import everything, keeps_everything


def select(queries: Tensor | None, keys: Tensor, *, retain: int, buffer: int, received: Tensor) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says.

    received: as `kvllm.compression.repetition.attention_received` has it.
    """
    if received.shape != keys.shape[:3]:
        raise ValueError(f"received {tuple(received.shape)} must be [S, Hkv, C] for keys {tuple(keys.shape)}")
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    return choose(received[..., : keys.shape[2] - buffer], retain=retain, buffer=buffer)
