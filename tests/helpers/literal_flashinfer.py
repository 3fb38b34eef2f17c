"""FlashInfer's wrappers, written out: what is planned lies in tensors, and what they launch reads those alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.helpers.cuda_stand_in import Device
from tests.helpers.literal_attention import attend_with_sums

BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")


class Wrapper:
    """What both wrappers do: plan on the host, then attend in any number of layers.

    calls: what the wrappers of a test were called with: class, method, positional and named arguments.
    device: a stand-in for a CUDA device, if tensors are on one.
    """

    calls: ClassVar[list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]] = []
    device: ClassVar[Device | None] = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self.workspace, layout = args
        assert layout == "HND" and self.workspace.dtype == torch.uint8
        self.calls.append((type(self).__name__, "__init__", args, options))
        self.buffers: list[torch.Tensor] | None = None
        if options.get("use_cuda_graph"):
            self.buffers = [options[name] for name in BUFFERS]
            assert len(self.buffers[0]) == len(self.buffers[2]) + 1
        self.pinned: torch.Tensor | None = None
        self.plans = torch.empty(1 << 12, dtype=torch.uint8, device=self.workspace.device)

    def reset_workspace_buffer(self, *args: torch.Tensor) -> None:
        self.calls.append((type(self).__name__, "reset_workspace_buffer", args, {}))
        self.workspace, self.plans = args

    def plan(self, *args: Any, **options: Any) -> None:
        self.calls.append((type(self).__name__, "plan", args, options))
        starts, indices, last_page_len, heads, kv_heads, head_dim, self.page_size = args[-7:]
        assert starts.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(starts) == len(last_page_len) + 1 and starts[-1] == len(indices)
        assert ((last_page_len >= 1) & (last_page_len <= self.page_size)).all()
        self.sizes, self.options = (heads, kv_heads, head_dim), options
        query_starts = args[0] if len(args) == 8 else torch.arange(len(starts), dtype=torch.int32)
        lengths = (starts.diff() - 1) * self.page_size + last_page_len
        self._place((starts, indices, last_page_len), torch.cat((query_starts, lengths)))

    def _place(self, pages: tuple[torch.Tensor, ...], work: torch.Tensor) -> None:
        """In a graph a wrapper has one batch size, and copies to where it was. What kernels shall do (where query
        tokens begin, then lengths) goes through pinned memory, which the next plan writes over."""
        device = self.workspace.device
        if self.buffers is None:
            self.pages = [each.to(device, non_blocking=True) for each in pages]
            self.pinned = None
        else:
            assert len(pages[2]) == len(self.buffers[2]) and len(pages[1]) <= len(self.buffers[1])
            for buffer, values in zip(self.buffers, pages, strict=True):
                buffer[: len(values)].copy_(values, non_blocking=True)
            self.pages = self.buffers
        if self.pinned is None:
            self.pinned = torch.empty(len(work), dtype=torch.int32, pin_memory=self.device is not None)
            self.work = self.plans[: 4 * len(work)].view(torch.int32)
        self.pinned.copy_(work)
        self.work.copy_(self.pinned, non_blocking=True)

    def run(self, q: torch.Tensor, paged_kv_cache: Any, **options: Any) -> Any:
        self.calls.append((type(self).__name__, "run", (q, paged_kv_cache), options))
        assert (q.shape[1], paged_kv_cache[0].shape[1], q.shape[2]) == self.sizes
        output, sums = torch.empty_like(q), q.new_empty(q.shape[:2])
        arguments = (output, sums, q, *paged_kv_cache, *self.pages, self.work)
        if self.device:
            name = SimpleNamespace(fn=type(self).__name__)
            self.device.launch(lambda _, *tensors: self._attend(*tensors), name, arguments, {})
        else:
            self._attend(*arguments)
        return (output, sums) if options.get("return_lse") else output

    def _attend(
        self,
        output: torch.Tensor,
        sums: torch.Tensor,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        work: torch.Tensor,
    ) -> None:
        query_starts, lengths = work.split((len(starts), len(last_page_len)))
        for i, length in enumerate(lengths.tolist()):
            rows = slice(int(query_starts[i]), int(query_starts[i + 1]))
            pages = indices[starts[i] : starts[i + 1]].long()
            assert length == (len(pages) - 1) * self.page_size + last_page_len[i]
            pairs = [part[pages].transpose(1, 2).flatten(0, 1)[:length] for part in (keys, values)]
            num_rows = rows.stop - rows.start
            visible = torch.ones(num_rows, length).tril(length - num_rows).bool()
            if self.options["window_left"] >= 0:
                visible = visible.triu(length - num_rows - self.options["window_left"])
            found, log_sums = attend_with_sums(
                q[rows], *pairs, visible, self.options["sm_scale"], self.options["logits_soft_cap"]
            )
            output[rows], sums[rows] = found, log_sums / math.log(2)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    pass


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(self, *args: Any, **options: Any) -> None:
        assert options["causal"] and (args[0].diff() > 1).all(), "decodes do not come here"
        super().plan(*args, **options)


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Wrapper]]:
    """As long as this lasts, the package flashinfer has these wrappers."""
    library = ModuleType("flashinfer")
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(library, wrapper.__name__, wrapper)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", library)
        patch.delitem(sys.modules, "kvllm.attention.flashinfer", raising=False)
        Wrapper.calls.clear()
        yield Wrapper
    sys.modules.pop("kvllm.attention.flashinfer", None)
