"""Packages that add to this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_with_package(
    folder: Path, group: str, module: str, script: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a script beside an installed package whose entry point of a group names a module with this text."""
    installed = folder / "added-1.0.dist-info"
    installed.mkdir(parents=True)
    (folder / "added.py").write_text(module)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\nadded = added\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{script}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
