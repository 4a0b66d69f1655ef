"""Plug-in packages: functions of installed packages that register what they bring with any registry (attention
backends, MoE experts and dispatchers, kinds of cache, kernels, tool formats). Found through the entry-point group
``headrace.plugins``.

Refuses: letting one that fails stop anything; a warning names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.base.errors import PluginError
from headrace.base.registry import Registry

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "headrace.plugins"

PLUGINS: Registry[Callable[[], None]] = Registry("plug-in package")
"""Functions without arguments, with an attribute ``plugin_api``. They may be called again, and then change nothing, as
registries do not mind being told twice."""


def start_plugins() -> None:
    """Call the functions of all installed packages, before anything is chosen."""
    for name in PLUGINS.add_installed(ENTRY_POINT_GROUP):
        try:
            PLUGINS.make(name)
        except PluginError as error:
            logger.warning("served without it: %s", error)
