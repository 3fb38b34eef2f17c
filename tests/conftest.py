"""Test data that lives beside the checkout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Vectors = tuple[dict[str, np.ndarray], dict[str, Any]]


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with golden vectors and examples."""
    path = Path(__file__).parents[1].parent / "shared"
    if not path.is_dir():
        pytest.skip(f"needs the test data folder {path}, which is absent")
    return path


@pytest.fixture(scope="session")
def load_vectors(shared_dir: Path) -> Callable[[str], Vectors]:
    """`load_vectors(name)` reads one file of golden vectors: its arrays by name, and its meta entry."""

    def load(name: str) -> Vectors:
        with np.load(shared_dir / "fixtures" / f"{name}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        return arrays, json.loads(str(arrays.pop("meta")))

    return load
