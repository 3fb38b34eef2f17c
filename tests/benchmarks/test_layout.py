"""The layout of benchmarks/: scripts import libraries, and no module imports a script."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = ("common", "paper", "peers_engines", "reasoner")
"""The folders that hold libraries. They may hold scripts, too; all other modules are scripts."""


def read_modules() -> dict[str, ast.Module]:
    """The syntax tree of every module in benchmarks/, by its dotted name."""
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): ast.parse(file.read_text())
        for file in files
        if file.name != "__init__.py"
    }


MODULES = read_modules()


def is_script(tree: ast.Module) -> bool:
    """Whether the module ends with `if __name__ == "__main__"`."""
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)


def imports(tree: ast.Module) -> set[str]:
    """The dotted names of all that a module imports, inside of functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_a_script(name: str) -> None:
    scripts = {other for other, tree in MODULES.items() if is_script(tree)}
    assert not imports(MODULES[name]) & scripts


def test_all_modules_outside_of_the_libraries_are_scripts() -> None:
    others = [name for name in MODULES if name.split(".")[1] not in LIBRARIES]
    assert "benchmarks.demo" in others and "benchmarks.peers" in others
    assert [name for name in others if not is_script(MODULES[name])] == []
