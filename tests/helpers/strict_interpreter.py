"""Triton's interpreter as a device that forgives nothing: programs in any order, and no access outside of the tensors
that a launch was given."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.helpers.devices import poisoned
from tests.helpers.quick_interpreter import quick_interpreter


def print_failures(checks: Mapping[str, Callable[[], None]]) -> None:
    """Run each of the checks in a strict interpreter; print the traces of those that fail as JSON, by their names."""
    failures = {}
    for name, check in checks.items():
        try:
            with strict_interpreter():
                check()
        except Exception:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


def memory_of(argument: Any) -> Iterator[tuple[int, int]]:
    """The addresses of an argument's first byte and of the one after its last, of every tensor in it."""
    if isinstance(argument, tuple):
        for each in argument:
            yield from memory_of(each)
    elif hasattr(argument, "base") and hasattr(argument, "block_shape"):
        yield from memory_of(argument.base)
    elif isinstance(argument, torch.Tensor) and argument.numel():
        last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
        yield argument.data_ptr(), argument.data_ptr() + (last + 1) * argument.element_size()


class Memory:
    """What the kernel that runs may touch: sorted ranges of addresses, those that overlap as one."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        merged: list[list[int]] = []
        for begin, end in sorted(memory_of(arguments)):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        self.begins, self.ends = np.array(merged, dtype=np.uint64).reshape(-1, 2).T

    def check(self, pointers: Any, mask: Any, what: str) -> None:
        """Raise IndexError unless all elements that are not masked lie in one of the ranges."""
        masked_in = np.asarray(mask.data).astype(bool)  # of a descriptor a mask is an array, and its data a memoryview
        touched = pointers.data[np.broadcast_to(masked_in, pointers.data.shape)]
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        ranges = np.searchsorted(self.begins, touched, side="right") - 1
        outside = (ranges < 0) | (touched + size > self.ends[ranges])
        if outside.any():
            raise IndexError(f"{what} of {int(outside.sum())} elements outside of the tensors of the launch")


def assert_no_overflow(semantic: Any, left: Any, right: Any, operation: Any) -> None:
    """Triton's check of integers of 32 bits by one operation of numpy, where Triton interprets seven."""
    dtype = left.handle.data.dtype
    if dtype.kind in "iu" and dtype.itemsize < 8:
        exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
        result, limits = exact(left.handle.data, right.handle.data, dtype=np.int64), np.iinfo(dtype)
        fits = ((limits.min <= result) & (result <= limits.max)).all()
        assert fits, f"{dtype} overflow of operation {operation.__name__}"


@contextmanager
def strict_interpreter(seed: int = 0) -> Iterator[None]:
    """Every launch runs its programs in an order of its own, backwards in one of three, and fails with an access out of
    bounds or an integer of 32 bits that overflows. What torch allocates is NaN. Triton must be in its interpreter."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder, chance = interpreter.InterpreterBuilder, random.Random(seed)
    load, store = builder.create_masked_load, builder.create_masked_store
    memory = Memory(())

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal memory
        names = self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount]
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        memory = Memory(tuple(given.values()))
        constants = self.constexprs
        scope = interpreter._patch_lang(self.fn)
        try:
            values = {k: v if k in constants else interpreter._implicit_cvt(v) for k, v in given.items()}
            grid = (*self.grid, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*grid)
            programs = list(product(*map(range, grid)))
            if chance.random() < 1 / 3:
                programs.reverse()
            else:
                chance.shuffle(programs)
            for program in programs:
                interpreter.interpreter_builder.set_grid_idx(*program)
                self.fn(**values)
        finally:
            scope.restore()

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        memory.check(pointers, mask, "a load")
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.check(pointers, mask, "a store")
        return store(self, pointers, value, mask, *rest)

    checks = {"create_masked_load": checked_load, "create_masked_store": checked_store}
    with (
        quick_interpreter(),
        patch.object(interpreter.GridExecutor, "__call__", call),
        patch.multiple(builder, **checks),
        patch.object(TritonSemantic, "binary_op_sanitize_overflow_impl", assert_no_overflow),
        poisoned(),
    ):
        yield
