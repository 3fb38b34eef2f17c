"""Triton's interpreter without the work that it repeats at every call of a function, which is half of its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch


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
        patch.object(interpreter, "_patch_lang", make_interpreted_once),
        patch.object(interpreter, "_get_np_dtype", dtype_of_any),
    ):
        try:
            yield
        finally:
            for scope in reversed(scopes.values()):
                scope.restore()
