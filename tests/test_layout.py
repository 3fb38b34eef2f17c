"""The subpackages: no cycle between them, and what works without torch or Ray does."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvllm"


def subpackage(module: str) -> str:
    """The first part of a module's name below the package: a folder, or a file of the package itself."""
    return (module + ".__init__").split(".")[1]


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules that run time imports name; those for type checkers alone are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        yield from imports(node)


def test_no_cycle_between_subpackages() -> None:
    needed: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        here = subpackage(".".join(file.relative_to(ROOT).with_suffix("").parts))
        found = {subpackage(name) for name in imports(ast.parse(file.read_text())) if name.split(".")[0] == "kvllm"}
        needed.setdefault(here, set()).update(found - {here})
    assert "core" in needed["worker"] and "worker" in needed["distributed"]
    graphlib.TopologicalSorter(needed).prepare()  # raises CycleError


@pytest.mark.parametrize("part", ["core", "compression/specs.py", "config", "sampling_params.py", "simulation"])
def test_needs_no_torch(part: str) -> None:
    """Checked in a process where torch cannot be imported."""
    path = PACKAGE / part
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert modules
    code = f"import sys, importlib; sys.modules['torch'] = None; [importlib.import_module(m) for m in {modules}]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
