"""The order of tests on a GPU, which may be lent for minutes, in parts: what says most comes first."""

from __future__ import annotations

PARTS = (
    (
        "up_to_rounding[qwen3-float32-eager",
        "test_graphs.py",
        "test_memory_errors.py",
    ),
    ("/kernels/", "/attention/", "/kvcache/", "/compression/"),
    (
        "test_first_requests.py",
        "test_every_token_has_the_largest_logit_up_to_rounding",
        "test_engine_on_cuda.py",
        ".py",
    ),
)
"""Of each part, what the names of its tests have in them, one after the other."""


def place(node_id: str) -> tuple[int, int]:
    """Of a test: its part, from 1 on, and its place there."""
    every = ((part, number, name) for part, names in enumerate(PARTS, 1) for number, name in enumerate(names))
    return next((part, number) for part, number, name in every if name in node_id)
