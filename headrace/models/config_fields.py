"""`Fields`: checked access to the values of a config.json dict. Torch-free."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from headrace.base.errors import ConfigError, HeadraceError

T = TypeVar("T")

LARGEST, MOST_LAYERS = 2**31 - 1, 4096
"""Bounds on what a file may say, checked before anything is allocated."""

CLASSIFIERS, BARE = ("ForSequenceClassification",), "Model"
"""Suffixes of architectures with a classifier instead of the LM head, and of those without any head."""


@contextlib.contextmanager
def explain_errors(place: str) -> Iterator[None]:
    """Turn errors that a value of a wrong type raises in the body into a `ConfigError` that names ``place``, the file
    or section of the value."""
    try:
        yield
    except HeadraceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{place} holds a value that its model family cannot read: {type(error).__name__}: {error}"
        ) from error


class Fields:
    """A config.json dict whose values are checked as they are read; null counts as absent."""

    def __init__(self, config: dict[str, Any]):
        self.config = config

    def __contains__(self, name: str) -> bool:
        return self.config.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above 0 (or the default, unchecked)."""
        return self._read(name, default, (int,), "a whole number above 0", lambda value: 0 < value <= LARGEST)

    def count(self, name: str, default: int) -> int:
        """A whole number, 0 or more."""
        return self._read(name, default, (int,), "a whole number, 0 or more", lambda value: 0 <= value <= LARGEST)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0 (or the default, unchecked)."""
        return float(self._read(name, default, (int, float), "a number above 0", lambda value: 0 < value < math.inf))

    def section(self, name: str) -> dict[str, Any]:
        """An object; empty when there is none."""
        return self._read(name, {}, (dict,), "an object", lambda value: True)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number (or the default, unchecked)."""
        return float(self._read(name, default, (int, float), "a number", math.isfinite))

    def flag(self, name: str, default: bool) -> bool:
        return self._read(name, default, (bool,), "true or false", lambda value: True)

    def choice(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """``choices[value]``; raises `ConfigError` for a value that is no key."""
        value = self.config.get(name) or default
        if value not in choices:
            raise ConfigError(
                f"config.json: {name} is {value!r}; this model family serves {', '.join(choices)}", param=name
            )
        return choices[value]

    def _read(
        self, name: str, default: Any, types: tuple[type, ...], wanted: str, is_right: Callable[[Any], bool]
    ) -> Any:
        value = self.config.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"config.json has no {name}; it must be {wanted}", param=name)
            return default
        # bool is a subclass of int: `true` is no number
        if not isinstance(value, types) or (bool not in types and isinstance(value, bool)) or not is_right(value):
            raise ConfigError(f"config.json: {name} must be {wanted}, got {value!r}", param=name)
        return value


def read_num_layers(fields: Fields) -> int:
    """``num_hidden_layers``."""
    count = fields.integer("num_hidden_layers")
    if count > MOST_LAYERS:
        raise ConfigError(
            f"config.json: num_hidden_layers must be at most {MOST_LAYERS}, got {count}", param="num_hidden_layers"
        )
    return count


def read_num_classes(config: dict[str, Any]) -> int:
    """Classes of a classifier: those that have names, ``num_labels``, or 2; 0 for another architecture."""
    if not architecture_of(config).endswith(CLASSIFIERS):
        return 0
    return len(config.get("id2label") or ()) or Fields(config).integer("num_labels", 2)


def architecture_of(config: dict[str, Any]) -> str:
    """The Hugging Face class name; empty where there is none."""
    return (config.get("architectures") or [""])[0]
