"""A stand-in for a CUDA device: tensors that say they are on one, whose content is in the host's memory.

Programs for a GPU run on it as they are, kernels in Triton's interpreter, and what a CPU forgives is an error:

- Operands on different devices, other than single numbers of the CPU.
- Memory of the host that changes while a copy from it may still be under way. What is copied to the host without
  waiting arrives when an event after it is waited for, and is garbage before.
- In the capture of a graph, whatever waits for the device or copies from or to the host.
- Memory that one stream reads while another one may still write it, or writes while another one may still use it, or
  that is given back while a stream other than its own may still use it.

A graph's replay repeats operations on tensors, not the Python code around them, and begins with the memory of all
graphs overwritten. `Device.waits`, `downloads` and `replays` tell what a program did, `Device.streams` what memory its
tensors have. Threads that are started meanwhile have the device, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from kvllm.worker import build, transfer
from tests.helpers.device_memory import Storage
from tests.helpers.device_streams import Stream, Streams
from tests.helpers.quick_interpreter import quick_interpreter

aten = torch.ops.aten
COPIES = {aten._to_copy.default: 0, aten.copy_.default: 1}
"""Which argument is the source."""
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default}
GARBAGE = 0x7F  # as bytes: a large number, in integers and in floating point


class DeviceTensor(torch.Tensor):
    """held: the content, a tensor on the CPU. memory: where it is, None if it is empty.

    To torch's C++ code it is on the meta device: without CUDA that cannot switch to a CUDA device.
    """

    held: torch.Tensor
    memory: Storage | None
    device = property(lambda self: torch.device("cuda", 0))
    is_cuda = True
    is_meta = is_cpu = False

    def record_stream(self, stream: Stream) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.memory:
            self.memory.recorded.append(stream.number)

    @staticmethod
    def __new__(cls, held: torch.Tensor, memory: Storage | None) -> DeviceTensor:
        with torch.inference_mode(False):  # views of tensors from outside of it could not be wrapped
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device="meta",
            )
        tensor.held, tensor.memory = held, memory
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


@dataclass
class Copy:
    """A copy between host and device that nobody waited for, by an operation of a stream at some time.

    address: of the host's memory. arrives: whether it is written there. finish: what happens at its end.
    """

    stream: int
    time: int
    address: int
    arrives: bool
    finish: Callable[[], Any]


class Operations(TorchDispatchMode):
    """Gives the operations of a thread to a device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with Operations(self.device):  # for the operations that it consists of
                return func.decompose(*args, **kwargs)
        with self.device.lock:
            return self.device.operate(func, args, kwargs)


class Device:
    """waits: what made the host wait for the device, other than events. downloads: copies to the host.

    copies: those under way.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.downloads = self.replays = 0
        self.copies: list[Copy] = []
        self.graphs: list[Graph] = []
        self.streams = Streams(lambda: self._finish(lambda copy: copy.time <= self.streams.host[copy.stream]))
        self.lock = threading.RLock()
        self._pinned: dict[int, tuple[torch.Tensor, Storage]] = {}
        self._capturing: Graph | None = None

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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
        if not self._capturing:
            self._note(func, plain_args, plain_kwargs)
        result = func(*plain_args, **plain_kwargs)
        if self._capturing:
            self._record(self._capturing, func, plain_args, plain_kwargs, result)
        known = {id(tensor.held): tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DeviceTensor)}

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return known[id(value)] if id(value) in known else self._wrap(value, is_written=is_written)

        is_written = not self._capturing and "empty" not in func.name()
        return tree_map(wrapped, result)

    def _wrap(self, value: torch.Tensor, *, is_written: bool = True) -> DeviceTensor:
        return DeviceTensor(value, self.streams.memory(value, is_written=is_written))

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        with _disable_current_modes():
            self.streams.note(func, args, kwargs)

    def launch(self, start: Callable[..., None], executor: Any, args: Any, kwargs: Any) -> None:
        """Run a kernel of Triton's interpreter, which `start` starts."""
        tensors = tensors_in((args, kwargs))
        assert all(isinstance(tensor, DeviceTensor) for tensor in tensors), f"{executor.fn} of tensors on the CPU"
        plain_args, plain_kwargs = tree_map(held, args), tree_map(held, kwargs)

        def run() -> None:
            with _disable_current_modes():
                start(executor, *plain_args, **plain_kwargs)

        def run_on_stream() -> None:
            with self.streams.running(executor.fn, tensors_in((plain_args, plain_kwargs))):
                run()

        if self._capturing:
            run()
            self._capturing.operations.append(run_on_stream)
        else:
            run_on_stream()

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
        plain = tree_map(held, args)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(plain)}
        # It comes after those before it to that memory; to there, after those from there, too.
        self._finish(lambda copy: copy.address in addresses and (copy.arrives or not on_device))
        self._note(func, plain, kwargs)
        result = func(*plain, **kwargs)
        if on_device:
            self._uploaded(source, waits)
        else:
            self._downloaded(result, waits)
        return args[0] if func is aten.copy_.default else self._wrap(result) if on_device else result

    def _uploaded(self, source: torch.Tensor, waits: bool) -> None:
        if waits or not self._is_pinned(source):
            self.wait("a copy from the host")
            return
        before = bytes_of(source)

        def check() -> None:
            assert bytes_of(source) == before, "the host's memory was overwritten while the device was reading it"

        self._copying(source, check, arrives=False)

    def _downloaded(self, target: torch.Tensor, waits: bool) -> None:
        self.downloads += 1
        if waits or not self._is_pinned(target):
            self.wait("a copy to the host")
            return
        arriving = target.clone()
        target.view(-1).view(torch.uint8).fill_(GARBAGE)
        self._copying(target, lambda: target.copy_(arriving), arrives=True)

    def _copying(self, host: torch.Tensor, finish: Callable[[], Any], *, arrives: bool) -> None:
        stream = self.streams.current
        time, address = int(stream.clock[stream.number]), host.untyped_storage().data_ptr()
        self.copies.append(Copy(stream.number, time, address, arrives, finish))

    def _finish(self, is_over: Callable[[Copy], bool]) -> None:
        with self.lock:
            over = [copy for copy in self.copies if is_over(copy)]
            self.copies = [copy for copy in self.copies if copy not in over]
            with _disable_current_modes(), torch.inference_mode():
                for copy in over:
                    copy.finish()

    def wait(self, reason: str) -> None:
        """The host waits for the current stream."""
        assert not self._capturing, f"{reason} in the capture of a graph"
        self.waits.append(reason)
        self.streams.join_host(self.streams.current.clock)

    def synchronize(self, *_: Any) -> None:
        for stream in self.streams.all:
            self.streams.join_host(stream.clock)
        self.wait("synchronize")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address and address not in self._pinned:
            self._pinned[address] = tensor, self.streams.host_memory(tensor)
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

            def write() -> None:
                self._note(func, args, kwargs)
                func(*args, **kwargs)

            graph.operations.append(write)
            return
        if any(each.alias_info for each in func._schema.returns):
            return  # a view of what is there
        outputs = tensors_in(result)
        graph.memory += outputs

        def repeat() -> None:
            self._note(func, args, kwargs)
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
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    device, start, run_thread = Device(), GridExecutor.__call__, threading.Thread.run
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    streams = device.streams

    def reset_peak(*_: Any) -> None:
        streams.peak_bytes = streams.live_bytes

    def run_on_device(thread: threading.Thread) -> None:
        with Operations(device), Calls():
            run_thread(thread)

    def noted_load(builder: Any, pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        streams.note_pointers(pointers.data, mask.data, writes=False)
        return load(builder, pointers, mask, *args, **kwargs)

    def noted_store(builder: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        streams.note_pointers(pointers.data, mask.data, writes=True)
        return store(builder, pointers, value, mask, *args)

    functions = {
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (0, 0),  # too old for compiled operators
        "mem_get_info": lambda *_: (memory - streams.live_bytes, memory),
        "memory_allocated": lambda *_: streams.live_bytes,
        "max_memory_allocated": lambda *_: streams.peak_bytes,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "synchronize": device.synchronize,
        "graph_pool_handle": lambda: None,
        "Stream": streams.stream_type,
        "stream": streams.use,
        "current_stream": lambda *_: streams.current,
        "Event": streams.event_type,
        "CUDAGraph": Graph,
        "graph": device.capture,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: device.pin(tensor.clone())))
        stack.enter_context(quick_interpreter())
        launch = lambda executor, *args, **kwargs: device.launch(start, executor, args, kwargs)  # noqa: E731
        stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        stack.enter_context(patch.object(InterpreterBuilder, "create_masked_load", noted_load))
        stack.enter_context(patch.object(InterpreterBuilder, "create_masked_store", noted_store))
        stack.enter_context(patch.object(threading.Thread, "run", run_on_device))
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device="cuda") begins on the CPU
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(streams.following_threads())
        stack.callback(transfer._upload_stream.cache_clear)  # it ends with its device
        with Operations(device), Calls():
            yield device
            device.synchronize()
        assert not streams.races, streams.races


@contextmanager
def without_first_launches() -> Iterator[None]:
    """Engines that are made here launch no kernels first: nothing is compiled, and interpreting takes long."""
    nothing = {
        name: lambda *_: None
        for name in ("check_attention", "check_integers", "launch_rare_kernels", "run_heaviest_steps")
    }
    with patch.multiple(build, **nothing):
        yield
