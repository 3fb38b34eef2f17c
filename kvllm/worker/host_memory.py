"""How much memory this process may still take: of the machine, and of the control groups (containers) it is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller, "" in version 2: the files of the limit and of what is in use, and in `memory.stat` what of that are
cached files, which the kernel drops when memory runs short."""


def available_memory() -> int:
    """Bytes."""
    return min([psutil.virtual_memory().available, *_left_in_groups(CGROUPS, Path("/proc/self/cgroup"))])


def total_memory() -> int:
    """Bytes that this process could have if nothing else ran."""
    limits = (limit for _, _, limit in _limited_groups(CGROUPS, Path("/proc/self/cgroup")))
    return min([psutil.virtual_memory().total, *limits])


def _left_in_groups(mount: Path, membership: Path) -> Iterator[int]:
    """Bytes that each limited control group leaves."""
    for directory, controller, limit in _limited_groups(mount, membership):
        _, used_file, cached_key = FILES[controller]
        stat = dict(line.split() for line in _read(directory / "memory.stat").splitlines())
        used = int(_read(directory / used_file)) - int(stat.get(cached_key, 0))
        yield max(0, limit - used)


def _limited_groups(mount: Path, membership: Path) -> Iterator[tuple[Path, str, int]]:
    """The directory, the controller and the limit in bytes of each limited control group that this process is in. A
    container sees its own group as the root of the mount."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for _, controller, path in (line.split(":", 2) for line in lines):
        if controller not in FILES:
            continue
        limit_file = FILES[controller][0]
        root = mount / controller
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            limit = _read(directory / limit_file)
            if limit.isdecimal():  # version 2 says "max" where there is no limit, version 1 a number beyond any memory
                yield directory, controller, int(limit)
            if directory == root:
                break


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
