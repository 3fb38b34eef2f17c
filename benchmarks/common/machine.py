"""The machine that a benchmark runs on: processor, versions, memory bandwidth, and the load of other processes.

Every report carries this provenance, so that its figures can be judged and repeated.
"""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from kvllm.memory_pages import use_huge_pages

INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
PROBE_BYTES = 512 << 20


def announce(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Print the command and the machine. Returns them, with the versions, for the report: what is needed to judge and
    to repeat a run."""
    command, found = shlex.join(["python", "-m", module, *arguments]), machine()
    instructions = ", ".join(found["instructions"]) or "no vector extensions"
    parts = [f"{found['cpu']}, {found['cores']} cores ({instructions})", f"load average {found['load_average']}"]
    print("; ".join([command, *parts, *found["gpus"]]), flush=True)
    versions = {name: version(name) for name in ("kvllm", "torch", "transformers", "numpy")}
    return {"command": command, "machine": found, "versions": {"python": platform.python_version(), **versions}}


def machine() -> dict[str, Any]:
    """The processor, the memory and the GPUs.

    load_average: processes that ran in the last minute, this one included.
    """
    info = _cpu_info()
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "instructions": [name for name in INSTRUCTIONS if name in info.get("flags", "").split()],
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "load_average": round(os.getloadavg()[0], 2),
    }


def last_level_cache() -> int | None:
    """Bytes of the largest cache; None where the system does not tell."""
    sizes = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * 1024 for size in sizes if size.endswith("K")), default=None)


def read_bandwidth(repeats: int = 10) -> float:
    """The best rate, in bytes/s, at which torch's threads together read an array far larger than any cache."""
    size = max(PROBE_BYTES, 4 * (last_level_cache() or 0)) // 4
    array = use_huge_pages(torch.empty(size)).fill_(1)
    array.sum()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        array.sum()
        best = min(best, time.perf_counter() - begin)
    return array.nbytes / best


def int8_operations(size: int = 2048, repeats: int = 5) -> float:
    """Products and sums of 8 bits a second: the best rate of torch's float32 product, times the numbers of 8 bits that
    the same units take in its place: 4 with VNNI, else 2, as pairs of products are widened in an instruction more."""
    first, second, best = torch.rand(size, size), torch.rand(size, size), float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        torch.mm(first, second)
        best = min(best, time.perf_counter() - begin)
    vnni = {"avx_vnni", "avx512_vnni"} & set(machine()["instructions"])
    return 2 * size**3 / best * (4 if vnni else 2)


def cpu_seconds_of_others() -> float:
    """Seconds of processor time that all other processes used so far; the time that a hypervisor takes away counts."""
    everything, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = sum(everything) - everything.idle - getattr(everything, "iowait", 0.0)
    busy -= getattr(everything, "guest", 0.0) + getattr(everything, "guest_nice", 0.0)  # parts of user and nice
    return busy - own.user - own.system


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is no such file."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return {}
    first = file.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
