"""`option`: a documented dataclass field. Flags, ``show-config`` and docs are generated from these and nothing else.
`suggest`: the allowed value nearest to a wrong one.
`read_object`: an option whose text is a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from headrace.base.errors import ConfigError

_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


_SYNONYMS = {
    "gpu": "cuda", "half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32",
    "fp8_e4m3fn": "fp8_e4m3"
}
"""Other words for values of options."""


def suggest(value: str, known: Iterable[Any], *, spell: Callable[[str], str] = str, otherwise: str = "") -> str:
    """``"; did you mean bfloat16?"`` for a value that is none of ``known`` but near one, in whatever case; else
    ``otherwise``. ``spell`` writes the known one as the user would."""
    names = {str(one).lower(): str(one) for one in known}
    plain = value[:64].lower()  # it may be a client's, and megabytes long
    synonym = _SYNONYMS.get(plain, plain)
    near = [synonym] if synonym in names else get_close_matches(plain, names, n=1)
    return f"; did you mean {spell(names[near[0]])}?" if near else otherwise


def option(
    default: Any, doc: str, *, choices: tuple[Any, ...] | None = None, low: float | None = None,
    high: float | None = None, metavar: str | None = None, letter: str | None = None,
    alias: str | None = None
) -> Any:
    """A dataclass field with its help text and bounds. ``low`` and ``high`` are inclusive. ``letter``: of a short flag.
    ``alias``: a second long flag, without its dashes. With a ``metavar`` that ends with ``...`` the flag takes several
    arguments, joined by blanks.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "doc": doc, "choices": choices, "low": low, "high": high, "metavar": metavar, "letter": letter,
            "alias": alias
        }
    )


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """A field of a config section, as the command line and ``show-config`` see it."""

    section: str
    name: str
    type: type
    optional: bool
    default: Any
    doc: str
    choices: tuple[Any, ...] | None
    low: float | None
    high: float | None
    metavar: str | None
    letter: str | None = None
    alias: str | None = None

    @property
    def takes_many(self) -> bool:
        """Whether the flag takes several arguments."""
        return self.metavar is not None and self.metavar.endswith("...")

    @property
    def flag(self) -> str:
        """``--max-model-len`` for ``max_model_len``."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> Any:
        """Return the value when it is allowed, else raise `ConfigError` naming the flag and what it takes."""
        if value is None and self.optional:
            return value
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.type) or (self.type is not bool and isinstance(value, bool)):
            noun = _NOUNS.get(self.type, f"a {self.type.__name__}")
            raise ConfigError(f"{self.name} takes {noun}, got {value!r}", param=self.name)
        if isinstance(value, float) and not math.isfinite(value):  # which no bound would refuse
            raise ConfigError(f"{self.name} takes a finite number, got {value!r}", param=self.name)
        # bytes that the locale cannot read
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(
                f"{self.name} must be UTF-8, got {value!r}; rename it, or choose a locale in which it can be read",
                param=self.name
            )
        if self.choices is not None and value not in self.choices:
            raise ConfigError(
                f"{self.name} must be one of {', '.join(map(str, self.choices))}; got {value!r}"
                f"{suggest(str(value), self.choices)}", param=self.name
            )
        if isinstance(value, int | float):
            self._check_bounds(value)
        return value

    def _check_bounds(self, value: float) -> None:
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            bounds = f"at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
            raise ConfigError(f"{self.name} must be {bounds}; got {value!r}", param=self.name)


def options_of(section_type: type, section: str = "") -> Iterator[OptionInfo]:
    """The documented fields of a config dataclass, in order."""
    hints = typing.get_type_hints(section_type)
    for item in dataclasses.fields(section_type):
        hint, optional = hints[item.name], False
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            optional = True
            hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        meta = item.metadata
        yield OptionInfo(
            section=section, name=item.name, type=typing.get_origin(hint) or hint, optional=optional,
            default=item.default,
            doc=meta["doc"], choices=meta["choices"], low=meta["low"], high=meta["high"], metavar=meta["metavar"],
            letter=meta["letter"], alias=meta["alias"],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base of option sections: validates its fields; raises `ConfigError`."""

    def __post_init__(self) -> None:
        # The sections are frozen: a value that `check` converts (an int to a float) is set past the guard.
        for info in options_of(type(self)):
            checked = info.check(getattr(self, info.name))
            if checked is not getattr(self, info.name):
                object.__setattr__(self, info.name, checked)


def split_list(text: str) -> list[str]:
    """The entries of a comma-separated option, without the spaces around them; empty entries are dropped."""
    return [entry for part in text.split(",") if (entry := part.strip())]


def read_object(text: str, name: str, *, example: str) -> dict[str, Any]:
    """The JSON object that an option's text is; raises `ConfigError` with an example otherwise."""
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is no JSON: {error}", param=name) from error
    if not isinstance(stated, dict):
        raise ConfigError(f"{name} must be a JSON object, such as {example}; got {text[:80]}", param=name)
    return stated
