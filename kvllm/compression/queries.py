"""Which query rows of a window are recomputed for its scores (paper, appendix C.2; stride: our addition).

Keys and values of a window are cached, so its queries come from an extra pass that reads the cache and writes none of
it. K and V being there already, rows do not depend on each other within the pass: any subset can be recomputed exactly.
"""

from __future__ import annotations

import numpy as np


def query_offsets(window: int, buffer: int, stride: int) -> np.ndarray:
    """Offsets in the window, ascending: every `stride`-th compressible one counted from the end, and the buffer."""
    compressible = window - buffer
    strided = np.arange(compressible - 1, -1, -stride)[::-1]
    return np.concatenate([strided, np.arange(compressible, window)])
