"""Installs of the package, and what they can import."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An editable install of a clone named kvllm: the clone, and what would be in site-packages. The operators, which
    take minutes to compile, are left out with setup.py."""
    pytest.importorskip("setuptools", minversion="77", reason="needs the package that builds this one")
    folder = tmp_path_factory.mktemp("above")
    clone, wheels, site = folder / "kvllm", folder / "wheels", folder / "site"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "kvllm", clone / "kvllm", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(wheels)], cwd=clone, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return clone, site


@pytest.mark.parametrize("where", [".", "kvllm", "site"])
def test_an_editable_install_is_found_from_everywhere(installed: tuple[Path, Path], where: str) -> None:
    """In the folder above the clone, the clone itself looks like a package without __init__.py."""
    clone, site = installed
    code = (
        "import site, sys; site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[2])\n"
        "import kvllm; print(kvllm.CompressionConfig and kvllm.__file__)"
    )
    # Without what the interpreter's own site-packages makes importable: that is another install of this package.
    command = [sys.executable, "-S", "-c", code, str(site), sysconfig.get_path("purelib")]
    done = subprocess.run(command, cwd=clone.parent / where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == clone / "kvllm" / "__init__.py"


def test_no_message_names_a_benchmark() -> None:
    """The installed package has none of them."""
    assert not [text for file in (ROOT / "kvllm").rglob("*.py") for text in messages(file) if "-m benchmarks" in text]


def messages(file: Path) -> Iterator[str]:
    """The source of all texts that hold values."""
    return (ast.unparse(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.JoinedStr))
