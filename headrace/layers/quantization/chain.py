"""`chain_schemes`: the schemes that a model's weights pass through, in order, and the predicates schemes register with.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from torch import nn

from headrace.base.errors import ConfigError, HeadraceError, PluginError
from headrace.base.quantization import MADE_AT_LOAD, SCHEME_GROUP
from headrace.layers.quantization.contract import SCHEMES, Named, Scheme, SchemeQuery

logger = logging.getLogger(__name__)

Predicate = Callable[[SchemeQuery], str | None]
"""None for a supported query, else the reason why not; evaluated before a scheme is imported."""

INSTALLED_PRIORITY = 50
"""Of schemes from other packages: outside the checkpoint formats known here, inside what the user wants layers to
keep."""

CPU_TYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class StoredAs:
    """For a checkpoint format: supported where config.json states one of these ``methods``, or, if the format is
    recognised by its tensors, none."""

    methods: tuple[str, ...]
    is_recognised: bool = True

    def __call__(self, query: SchemeQuery) -> str | None:
        if query.stored in self.methods or (self.is_recognised and not query.stored):
            return None
        return f"reads {' and '.join(self.methods)}, not {query.stored or 'plain weights'}"


def made_for_cpu(name: str) -> Predicate:
    """For a scheme that quantises plain weights on a CPU, when the user wants it."""

    def reason_against(query: SchemeQuery) -> str | None:
        if query.wanted != name:
            return f"serves {name} alone"
        if query.device != "cpu":
            return (
                f"{name} is made at load on a CPU only; take --device cpu, or a checkpoint that is quantised for "
                f"{query.device} (fp8, mxfp4)"
            )
        return (
            None if query.dtype in CPU_TYPES
            else f"{name} multiplies {' and '.join(CPU_TYPES)}, not {query.dtype}; take --dtype auto"
        )

    return reason_against


def made_on_any(name: str) -> Predicate:
    """For a scheme that quantises plain weights on any device, when the user wants it."""
    return lambda query: None if query.wanted == name else f"serves {name} alone"


def called(name: str) -> Predicate:
    """For a scheme of another package: supported where the checkpoint or the user names it."""

    def reason_against(query: SchemeQuery) -> str | None:
        return None if name in (query.stored, query.wanted) else f"serves {name} alone"

    return reason_against


@dataclass(frozen=True)
class SchemeChain:
    """The schemes of one model, innermost first, and their ``names``."""

    names: tuple[str, ...]
    schemes: tuple[Scheme, ...]

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """Checkpoint tensors through all schemes, innermost first."""
        for scheme in self.schemes:
            tensors = scheme.read(tensors)
        return tensors

    def finish(self, model: nn.Module) -> None:
        """Called once all parameters are filled."""
        for scheme in self.schemes:
            scheme.finish(model)


def add_installed_schemes() -> None:
    """Register the schemes of installed packages, without importing them."""
    SCHEMES.add_installed(SCHEME_GROUP, supports=called, priority=INSTALLED_PRIORITY)


def chain_schemes(query: SchemeQuery) -> SchemeChain:
    """The schemes that support a query.

    Raises `ConfigError` if no scheme reads the checkpoint's method or makes the one the user wants, and `PluginError`
    with the original error if a scheme that is needed cannot be loaded. A scheme that fails to load and that the query
    does not name is left out with a warning.
    """
    add_installed_schemes()
    # names come highest priority first; the chain runs innermost (lowest) first
    able = [name for name in reversed(SCHEMES.names()) if SCHEMES.entry(name).supports(query) is None]
    if query.wanted and (fault := _fault_of_wanted(query)):
        raise ConfigError(f"quantization {query.wanted!r} cannot be had here: {fault}", param="quantization")
    if query.config and not query.stored:
        raise ConfigError(
            "config.json: quantization_config has no quant_method, so nobody knows how weights are stored; known are "
            f"{', '.join(_list_methods())}. Add the one that made this checkpoint", param="quantization_config",
        )
    if query.stored and not set(able) - {query.wanted}:  # the wanted scheme alone reads no checkpoint format
        raise ConfigError(
            f"config.json: quantization_config.quant_method is {query.stored!r}, which no scheme here reads; known are "
            f"{', '.join(_list_methods())}; take the original checkpoint, or one in one of these",
            param="quantization_config",
        )
    schemes = {name: scheme for name in able if (scheme := _build(name, query)) is not None}
    return SchemeChain(tuple(schemes), tuple(schemes.values()))


def _build(name: str, query: SchemeQuery) -> Scheme | None:
    try:
        scheme = SCHEMES.load(name)
    except PluginError as error:
        if query.stored or query.wanted == name:
            raise
        # No method is stated, so every reader was tried: one that cannot be imported may well not be needed.
        logger.warning("weights stored in its form cannot be read: %s", error)
        return None
    try:
        return scheme(query)
    except HeadraceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error) as error:
        raise ConfigError(
            f"config.json: quantization_config ({query.stored or name}) holds a value that cannot be read: "
            f"{type(error).__name__}: {error}. Compare it with the file that the checkpoint was published with",
            param="quantization_config",
        ) from error


def _fault_of_wanted(query: SchemeQuery) -> str | None:
    """Why the scheme that the user asked for is impossible here; None if it is possible. Asking for the checkpoint's
    own format is allowed if the checkpoint states it."""
    if query.wanted not in SCHEMES:
        makable = sorted({entry.name for entry in SCHEMES} - set(_find_formats()))
        return f"known are {', '.join(makable)}, none and stored"
    supports = SCHEMES.entry(query.wanted).supports
    if reason := supports(query):
        return reason
    return (
        None if query.stored or not isinstance(supports, StoredAs)
        else "it is a form of checkpoints, which is found in their config.json, and this one states none"
    )


def names_form(wanted: str, stored: str) -> bool:
    """Whether ``wanted`` names the form of a checkpoint whose method is ``stored``: itself, another name of it, or the
    scheme that reads it. A name of what is made at load means that, of checkpoints of all other methods."""
    kin = (
        {entry.name, *entry.supports.methods} for entry in SCHEMES
        if isinstance(entry.supports, StoredAs) and stored in entry.supports.methods
    )
    return wanted == stored or (wanted not in MADE_AT_LOAD and any(wanted in names for names in kin))


def _find_formats() -> list[str]:
    """Names of the schemes that read a checkpoint format."""
    return [entry.name for entry in SCHEMES if isinstance(entry.supports, StoredAs)]


def _list_methods() -> list[str]:
    """The methods of config.json that are read."""
    return sorted({
        method for entry in SCHEMES if isinstance(entry.supports, StoredAs) for method in entry.supports.methods
    })


@cache
def default_chain() -> SchemeChain:
    """For a checkpoint that states no method: formats are recognised by the tensors' types."""
    return chain_schemes(SchemeQuery())
