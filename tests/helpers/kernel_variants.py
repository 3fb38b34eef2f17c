"""Which variants of Triton's kernels a program launches: what a GPU would compile, told in the interpreter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from torch.utils._pytree import tree_map

from tests.helpers.cuda_stand_in import held


@cache
def binder_of(function: Any) -> Callable[..., Any]:
    """Triton's own function of a kernel's arguments: what they are specialized on, by the marks of `triton.jit`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import KernelParam, create_function_from_signature

    signature = inspect.signature(function.fn)

    def is_in(option: str, number: int, name: str) -> bool:
        listed = function.kwargs[option] or ()
        return number in listed or name in listed

    parameters = [
        KernelParam(
            number,
            parameter,
            is_in("do_not_specialize", number, name),
            is_in("do_not_specialize_on_alignment", number, name),
        )
        for number, (name, parameter) in enumerate(signature.parameters.items())
    ]
    return create_function_from_signature(signature, parameters, make_backend(GPUTarget("cuda", 90, 32)))


@contextmanager
def recorded_variants() -> Iterator[set[str]]:
    """The variants that are launched as long as this lasts: kernel, dtypes, divisible and constant arguments, options.
    Triton must be in its interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[str] = set()
    start = InterpretedFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        _, specialization, options = binder_of(self)(*tree_map(held, args), **tree_map(held, kwargs))
        found.add(f"{self.__name__} {specialization} {sorted(options.items())}")
        return start(self, *args, grid=grid, warmup=warmup, **kwargs)

    with patch.object(InterpretedFunction, "run", record):
        yield found
