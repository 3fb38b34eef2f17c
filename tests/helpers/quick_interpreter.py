"""Triton's interpreter without the work that it repeats at every call of a function and for every tensor, which is
two thirds of its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch


def make_builtin_interpreted(module: Any, name: str, function: Any, builder: Any, scope: Any) -> None:
    """Triton's `_patch_attr` without the checks in the compiler's wrapper of a function."""
    from triton.runtime.interpreter import interpreter_semantic

    inner = getattr(function, "__wrapped__", function)

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return inner(*args, **kwargs)

    scope.set_attr(module, name, interpreted)


@contextmanager
def quick_types(core: Any) -> Iterator[None]:
    """Shapes are checked and wrapped once, and not for every tensor that has them."""
    block_type, constexpr, of_shapes = core.block_type, core.constexpr, {}
    make_block, make_tensor = block_type.__init__, core.tensor.__init__

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([each.value if isinstance(each, constexpr) else each for each in shape])
        if key not in of_shapes:
            make_block(self, element_ty, shape)
            of_shapes[key] = self.shape, self.numel, as_tensors_have_it(self)
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensors = of_shapes[key]

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        found = block_type.__new__(block_type)
        found.element_ty, found.shape, found.numel, found.of_tensors = (
            element_ty,
            self.shape,
            self.numel,
            self.of_tensors,
        )
        return found

    def as_tensors_have_it(dtype: Any) -> tuple[Any, Any]:
        tensor = core.tensor.__new__(core.tensor)
        make_tensor(tensor, None, dtype)
        return tensor.shape, tensor.numel

    of_scalars = as_tensors_have_it(core.int32)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if isinstance(type, block_type) else of_scalars

    name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    with (
        patch.multiple(block_type, __init__=init_block, with_element_ty=with_element_ty),
        patch.object(block_type, "name", name, create=True),
        patch.object(core.tensor, "__init__", init_tensor),
    ):
        yield


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Triton's language is made one of the interpreter once, and not in every call. Triton must be in its
    interpreter."""
    from triton import language
    from triton.runtime import interpreter

    scopes: dict[frozenset[int], Any] = {}
    make_interpreted: Callable[[Any], Any] = interpreter._patch_lang
    modules = {id(language), id(language.core)}

    def make_interpreted_once(function: Any) -> Any:
        visible = frozenset(modules.intersection(map(id, function.__globals__.values())))
        if visible not in scopes:
            scopes[visible] = make_interpreted(function)
        return interpreter._LangPatchScope()

    dtype_of = interpreter._get_np_dtype
    dtype_of_scalar = cache(dtype_of)

    def dtype_of_any(given: Any) -> Any:  # types of pointers have no hash
        scalar = given.scalar
        return dtype_of(scalar) if scalar.is_ptr() else dtype_of_scalar(scalar)

    with (
        quick_types(language.core),
        patch.object(interpreter, "_patch_attr", make_builtin_interpreted),
        patch.object(interpreter, "_patch_lang", make_interpreted_once),
        patch.object(interpreter, "_get_np_dtype", dtype_of_any),
    ):
        try:
            yield
        finally:
            for scope in reversed(scopes.values()):
                scope.restore()
