"""The methods of examples/more_methods, as an installed package registers them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from kvllm.compression.registry import Method
from kvllm.compression.specs import SPECS

sys.path.append(str(Path(__file__).parents[2] / "examples/more_methods"))
_own = set(SPECS)
import_module("more_methods")
EXAMPLES: dict[str, Method] = {name: Method(SPECS.pop(name)) for name in list(SPECS) if name not in _own}
"""They are taken from the list again, so that other tests do not depend on them."""
