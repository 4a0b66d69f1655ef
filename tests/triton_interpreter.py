"""Triton's interpreter, mended and made faster: half of a kernel's time went into replacing the language's functions
anew for each call of a device function."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton import language
from triton.runtime import interpreter

_is_builtin = language.core.is_builtin
_replace_language, _replace_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor


@functools.cache
def _find_languages(function: Any) -> list[Any]:
    return [value for value in function.__globals__.values() if value is language or value is language.core]


@functools.cache
def _find_builtins(place: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(place) if _is_builtin(member)]


def _replace_builtins(place: Any, builder: Any, scope: Any) -> None:
    for name, member in _find_builtins(place):
        interpreter._patch_attr(place, name, member, builder, scope)


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
    interpreter._patch_builtin = _replace_builtins
