"""Triton's interpreter, mended and made faster: nearly all of a kernel's time went into describing types and shapes
anew for each value, checking for overflows of which nothing is told, and replacing the language's functions anew for
each call of a device function. What kernels compute is the same."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

from triton import language
from triton.language import core
from triton.runtime import interpreter

_is_builtin = core.is_builtin
_replace_language, _replace_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
_equals, _find_numpy_dtype = core.dtype.__eq__, interpreter._get_np_dtype
_broadcast = interpreter.TritonSemantic.broadcast_impl_value
_UINT64 = _find_numpy_dtype(core.pointer_type(core.int8))


class Shape(NamedTuple):
    """Of a block: as its type states it, and as a tensor does."""

    sizes: Any
    numel: int
    constant_sizes: Any
    constant_numel: Any


@functools.cache
def _describe(sizes: tuple[int, ...]) -> Shape:
    """Checks them as well; shared by all blocks of these sizes, which change none of it."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    numel = core.validate_block_shape(sizes)
    return Shape(core.tuple(sizes), numel, core.tuple(map(core.constexpr, sizes)), core.constexpr(numel))


NO_SHAPE = Shape(None, 1, core.tuple([]), core.constexpr(1))


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, (list, core.tuple))
    self.element_ty = element_ty
    self.described = _describe(tuple([size.value if isinstance(size, core.constexpr) else size for size in shape]))
    self.shape, self.numel = self.described.sizes, self.described.numel


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    described = type.described if isinstance(type, core.block_type) else NO_SHAPE
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = described.constant_sizes, described.constant_numel


def _broadcast_others(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Two blocks of the same sizes, or two scalars, are left as they are."""
    if getattr(left.type, "described", None) is getattr(right.type, "described", None):
        return left, right
    return _broadcast(self, left, right)


def _is_equal(self: Any, other: Any) -> bool:
    return self is other or _equals(self, other)


@functools.cache
def _find_numpy_dtype_of(name: str) -> Any:
    return _find_numpy_dtype(core.dtype(name))


def _find_numpy_dtype_once(type: Any) -> Any:
    element = type.scalar
    return _UINT64 if isinstance(element, core.pointer_type) else _find_numpy_dtype_of(element.name)


@functools.cache
def _find_languages(function: Any) -> list[Any]:
    return [value for value in function.__globals__.values() if value is language or value is core]


@functools.cache
def _find_builtins(place: Any) -> list[tuple[str, Any]]:
    return [(name, _interpret(member)) for name, member in inspect.getmembers(place) if _is_builtin(member)]


def _interpret(builtin: Any) -> Any:
    """The builtin as the interpreter calls it."""
    function = inspect.unwrap(builtin)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


def _replace_builtins(place: Any, builder: Any, scope: Any) -> None:
    for name, member in _find_builtins(place):
        scope.set_attr(place, name, member)


def _replace_language_once(function: Any) -> Any:
    """Within a kernel, whose own replacement holds until it ends, there is nothing left to replace."""
    if any(_is_builtin(each.load) for each in _find_languages(function)):
        return _replace_language(function)
    return interpreter._LangPatchScope()


def _replace_tensor_with_index(tensor: Any, scope: Any) -> None:
    """A loop bound of a one-element array is made by ``int(array)``, which NumPy 2.4 refuses."""
    _replace_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def mend() -> None:
    """Call before the first interpreted kernel."""
    interpreter._patch_lang, interpreter._patch_lang_tensor = _replace_language_once, _replace_tensor_with_index
    interpreter._patch_builtin, interpreter._get_np_dtype = _replace_builtins, _find_numpy_dtype_once
    core.block_type.__init__, core.tensor.__init__ = _make_block_type, _make_tensor
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.dtype.__eq__ = _is_equal
    interpreter.TritonSemantic.broadcast_impl_value = _broadcast_others
    # They are computed, and asserted only with the option ``debug``, which is off.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
