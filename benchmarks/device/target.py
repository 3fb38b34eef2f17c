"""The device under test: a GPU, or in a dry run this machine's CPU in its place."""

from __future__ import annotations

import gc
import subprocess
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvllm.errors import KvLLMError

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """Where tensors live. A dry run does the same with tiny shapes on the CPU: its figures say nothing of a device."""

    device: torch.device
    dry_run: bool

    @staticmethod
    def find(dry_run: bool) -> Target:
        """Raises KvLLMError where there is no GPU, unless for a dry run."""
        if dry_run:
            return Target(torch.device("cpu"), True)
        if not torch.cuda.is_available():
            raise KvLLMError(
                "torch finds no CUDA device here (nvidia-smi says what the driver sees): run this on a machine with a "
                "GPU and a CUDA build of torch, or look at it on the CPU with --dry-run"
            )
        return Target(torch.device("cuda", 0), False)

    def size(self, on_device: T, in_dry_run: T) -> T:
        return in_dry_run if self.dry_run else on_device

    @property
    def cache_bytes(self) -> int:
        """Bytes of the last cache before memory; a dry run does not look."""
        return 0 if self.dry_run else torch.cuda.get_device_properties(self.device).L2_cache_size

    @property
    def free_bytes(self) -> float:
        """Bytes of free memory; a dry run has enough."""
        return float("inf") if self.dry_run else torch.cuda.mem_get_info(self.device)[0]

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def randn(self, *size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device).normal_(generator=self.generator(seed))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """Give back what dropped objects held, captured graphs too."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        if self.dry_run:
            return {"name": "dry run on the CPU, no device"}
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cache_bytes": self.cache_bytes,
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
