"""A stand-in for a CUDA device: tensors that say they are on one, whose content is in the host's memory.

Programs for a GPU run on it as they are, kernels in Triton's interpreter, and what a CPU forgives is an error:

- Operands on different devices, other than single numbers of the CPU.
- Memory of the host that changes while a copy from it may still be under way. What is copied to the host without
  waiting arrives when an event behind it is waited for, and is garbage before.
- Tensors that another stream has made, and that were not waited for.
- In the capture of a graph, whatever waits for the device or copies from or to the host.

A graph's replay repeats operations on tensors, not the Python code around them, and begins with the memory of all
graphs overwritten. `Device.waits`, `downloads` and `replays` tell what a program did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
COPIES = {aten._to_copy.default: 0, aten.copy_.default: 1}
"""Which argument is the source."""
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default}
GARBAGE = 0x7F  # as bytes: a large number, in integers and in floating point


class DeviceTensor(torch.Tensor):
    """held: the content, a tensor on the CPU. made: by which operation of a stream.

    To torch's C++ code it is on the meta device: without CUDA that cannot switch to a CUDA device.
    """

    held: torch.Tensor
    made: tuple[Stream, int] | None = None
    device = property(lambda self: torch.device("cuda", 0))
    is_cuda = True
    is_meta = is_cpu = False
    record_stream = lambda self, stream: None  # noqa: E731

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(False):  # views of tensors from outside of it could not be wrapped
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device="meta",
            )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} after the end of the device")


def held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def bytes_of(tensor: torch.Tensor) -> bytes:
    with _disable_current_modes():
        return tensor.numpy().tobytes()


def overwrite(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().fill_(GARBAGE)


class Stream:
    """work: how many operations it has got. seen: how many of those of other streams it has waited for."""

    def __init__(self, device: Any = None) -> None:
        self.work = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        self.seen[other] = other.work

    def check(self, tensors: list[torch.Tensor]) -> None:
        """Whatever an operation here reads has been made here, or was waited for."""
        for tensor in tensors:
            if isinstance(tensor, DeviceTensor) and tensor.made:
                stream, number = tensor.made
                assert stream is self or self.seen.get(stream, 0) >= number, "made on a stream that was not waited for"


@dataclass(eq=False)
class Graph:
    """operations: each repeats one that was captured. memory: what the capture has allocated."""

    operations: list[Callable[[], Any]] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    device: Device | None = None

    def replay(self) -> None:
        assert self.device
        self.device.replays += 1
        with _disable_current_modes():
            for graph in self.device.graphs:
                for tensor in graph.memory:
                    overwrite(tensor)
            for operation in self.operations:
                operation()


class Event:
    """device: set where this takes the place of torch's."""

    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        self.num_copies = 0

    def record(self) -> None:
        self.num_copies = len(self.device.copies)

    def synchronize(self) -> None:
        self.device.complete(self.num_copies)

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class Device(TorchDispatchMode):
    """waits: what made the host wait for the device, other than events. downloads: copies to the host.

    copies: what happens at the end of each copy that nobody waited for, of which `num_complete` have ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.downloads = self.replays = 0
        self.copies: list[Callable[[], Any]] = []
        self.num_complete = 0
        self.graphs: list[Graph] = []
        self._pinned: dict[int, torch.Tensor] = {}
        self._capturing: Graph | None = None
        self.stream = Stream()

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # for the operations that it consists of
                return func.decompose(*args, **kwargs)
        self.stream.check(tensors_in((args, kwargs)))
        self.stream.work += 1
        result = self._dispatch(func, args, kwargs)
        for tensor in tensors_in(result):
            if isinstance(tensor, DeviceTensor) and not tensor.made:
                tensor.made = self.stream, self.stream.work
        return result

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        here = any(isinstance(tensor, DeviceTensor) for tensor in tensors_in((args, kwargs)))
        pinned, target = kwargs.pop("pin_memory", None), kwargs.get("device")
        # Numbers that are assigned to elements are put where torch believes the tensor to be.
        on_device = here if target is None else torch.device(target).type in ("cuda", "meta")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if func in COPIES and (here or on_device):
            return self._copy(func, args, kwargs, on_device)
        if here:
            self._check(func, tensors_in((args, kwargs)))
        if on_device:
            return self._compute(func, args, kwargs)
        result = func(*tree_map(held, args), **tree_map(held, kwargs))
        return self.pin(result) if pinned else result

    # Computation

    def _check(self, func: Any, tensors: list[torch.Tensor]) -> None:
        strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0]
        assert not strangers, f"{func} of tensors on the CPU and on the device"
        by_mask = func in INDEXING and any(tensor.dtype == torch.bool for tensor in tensors[1:])
        if func in WAITING or by_mask:
            self.wait(str(func))

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        plain_args, plain_kwargs = tree_map(held, args), tree_map(held, kwargs)
        result = func(*plain_args, **plain_kwargs)
        if self._capturing:
            self._record(self._capturing, func, plain_args, plain_kwargs, result)
        known = {id(tensor.held): tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DeviceTensor)}

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return known[id(value)] if id(value) in known else DeviceTensor(value)

        return tree_map(wrapped, result)

    def launch(self, start: Callable[..., None], executor: Any, args: Any, kwargs: Any) -> None:
        """Run a kernel of Triton's interpreter, which `start` starts."""
        tensors = tensors_in((args, kwargs))
        assert all(isinstance(tensor, DeviceTensor) for tensor in tensors), f"{executor.fn} of tensors on the CPU"
        self.stream.check(tensors)
        plain_args, plain_kwargs = tree_map(held, args), tree_map(held, kwargs)

        def run() -> None:
            with _disable_current_modes():
                start(executor, *plain_args, **plain_kwargs)

        run()
        if self._capturing:
            self._capturing.operations.append(run)

    # Copies between host and device

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
        source = args[COPIES[func]]
        if func is aten.copy_.default:
            on_device = isinstance(args[0], DeviceTensor)
        if isinstance(source, DeviceTensor) == on_device:
            if func is aten._to_copy.default and kwargs.get("dtype") in (None, source.dtype):
                return source  # which torch takes to be elsewhere
            return self._compute(func, args, kwargs)
        assert not self._capturing, "a copy between host and device in the capture of a graph"
        waits = not kwargs.get("non_blocking", len(args) > 2 and args[2])
        result = func(*tree_map(held, args), **kwargs)
        if on_device:
            self._uploaded(source, waits)
        else:
            self._downloaded(result, waits)
        return args[0] if func is aten.copy_.default else DeviceTensor(result) if on_device else result

    def _uploaded(self, source: torch.Tensor, waits: bool) -> None:
        if waits or not self._is_pinned(source):
            self.wait("a copy from the host")
            return
        before = bytes_of(source)

        def check() -> None:
            assert bytes_of(source) == before, "the host's memory was overwritten while the device was reading it"

        self.copies.append(check)

    def _downloaded(self, target: torch.Tensor, waits: bool) -> None:
        self.downloads += 1
        if waits or not self._is_pinned(target):
            self.wait("a copy to the host")
            return
        arriving = target.clone()
        overwrite(target)
        self.copies.append(lambda: target.copy_(arriving))

    def complete(self, num_copies: int) -> None:
        """The device has come to the end of so many copies."""
        while self.num_complete < num_copies:
            self.num_complete += 1
            self.copies[self.num_complete - 1]()

    def wait(self, reason: str) -> None:
        assert not self._capturing, f"{reason} in the capture of a graph"
        self.waits.append(reason)
        self.complete(len(self.copies))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._pinned

    # Graphs

    @contextmanager
    def capture(self, graph: Graph, **options: Any) -> Iterator[None]:
        graph.device = self
        self.graphs.append(graph)
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing = None

    def _record(self, graph: Graph, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if any(each.alias_info and each.alias_info.is_write for each in func._schema.arguments):
            graph.operations.append(lambda: func(*args, **kwargs))
            return
        if any(each.alias_info for each in func._schema.returns):
            return  # a view of what is there
        outputs = tensors_in(result)
        graph.memory += outputs

        def repeat() -> None:
            for output, value in zip(outputs, tensors_in(func(*args, **kwargs)), strict=True):
                output.copy_(value)

        if "empty" not in func.name():
            graph.operations.append(repeat)


class Calls(TorchFunctionMode):
    """Says which CUDA device is meant, since torch without CUDA knows of no current one, and how to list elements."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def numbered(value: Any) -> Any:
            is_cuda = isinstance(value, torch.device) and value == torch.device("cuda")
            return torch.device("cuda", 0) if is_cuda else value

        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        return func(*map(numbered, args), **{name: numbered(value) for name, value in (kwargs or {}).items()})


@contextmanager
def stand_in(memory: int = 1 << 30) -> Iterator[Device]:
    """As long as this lasts, torch has a CUDA device of so many bytes. Kernels need Triton in its interpreter."""
    from triton.runtime.interpreter import GridExecutor

    device, start = Device(), GridExecutor.__call__
    functions = {
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (0, 0),  # too old for compiled operators
        "mem_get_info": lambda *_: (memory, memory),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: device.wait("synchronize"),
        "graph_pool_handle": lambda: None,
        "Stream": Stream,
        "stream": device.on_stream,
        "current_stream": lambda *_: device.stream,
        "Event": type("Event", (Event,), {"device": device}),
        "CUDAGraph": Graph,
        "graph": device.capture,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: device.pin(tensor.clone())))
        launch = lambda executor, *args, **kwargs: device.launch(start, executor, args, kwargs)  # noqa: E731
        stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device="cuda") begins on the CPU
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        with device, Calls():
            yield device
        device.complete(len(device.copies))
