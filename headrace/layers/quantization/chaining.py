"""Which schemes a model's weights go through, and in what order."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from torch import nn

from headrace.base.errors import ConfigError, PluginError
from headrace.layers.quantization.contract import SCHEMES, Named, Scheme, SchemeQuery
from headrace.layers.quantization.support import called

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "headrace.schemes"
INSTALLED_PRIORITY = 50
"""Of schemes from other packages: outside the checkpoint forms known here, inside what the user wants layers to
keep."""


@dataclass(frozen=True)
class SchemeChain:
    """The schemes of one model, innermost first; ``names`` are theirs."""

    names: tuple[str, ...]
    schemes: tuple[Scheme, ...]

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """Through all of them, from the checkpoint outwards."""
        for scheme in self.schemes:
            tensors = scheme.read(tensors)
        return tensors

    def finish(self, model: nn.Module) -> None:
        """All parameters are filled."""
        for scheme in self.schemes:
            scheme.finish(model)


def add_installed_schemes() -> None:
    """Register the schemes of installed packages, without importing them."""
    SCHEMES.add_installed(ENTRY_POINT_GROUP, supports=called, priority=INSTALLED_PRIORITY)


def chain_schemes(query: SchemeQuery) -> SchemeChain:
    """The schemes that support a query. Raises `ConfigError` when nobody reads what is stored or makes what is wanted,
    and `PluginError` with the original error when one that is needed cannot be loaded; one that nobody asked for by
    name is left out with a warning."""
    add_installed_schemes()
    able = [name for name in reversed(SCHEMES.names()) if SCHEMES.entry(name).supports(query) is None]
    if query.wanted and (fault := _fault_of_wanted(query)):
        raise ConfigError(f"quantization {query.wanted!r} cannot be had here: {fault}", param="quantization")
    if query.stored and not set(able) - {query.wanted}:
        raise ConfigError(
            f"config.json: quantization_config.quant_method is {query.stored!r}, which no scheme here reads; known are "
            f"{', '.join(_readable())}",
            param="quantization_config",
        )
    schemes = {name: scheme for name in able if (scheme := _build(name, query)) is not None}
    return SchemeChain(tuple(schemes), tuple(schemes.values()))


def _build(name: str, query: SchemeQuery) -> Scheme | None:
    try:
        return SCHEMES.load(name)(query)
    except PluginError as error:
        if query.stored or query.wanted == name:
            raise
        logger.warning("weights stored in its form cannot be read: %s", error)
        return None


def _fault_of_wanted(query: SchemeQuery) -> str | None:
    """Why nobody makes what is wanted, if so. A checkpoint's own form may be wanted, too, where the checkpoint states
    it."""
    if query.wanted not in SCHEMES:
        return f"known are {', '.join(sorted({entry.name for entry in SCHEMES} - set(_readable())))}, none and stored"
    supports = SCHEMES.entry(query.wanted).supports
    if reason := supports(query):
        return reason
    is_made = supports(replace(query, wanted="")) is not None
    return (
        None if is_made or query.stored
        else "it is a form of checkpoints, which is found in their config.json, and this one states none"
    )


def _readable() -> list[str]:
    return sorted(entry.name for entry in SCHEMES if entry.supports(SchemeQuery(stored=entry.name)) is None)


@cache
def default_chain() -> SchemeChain:
    """For a checkpoint of which nothing is known: tensors' types tell."""
    return chain_schemes(SchemeQuery())
