"""The event loop of processes that carry many streams: uvloop's where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For `asyncio.Runner`; None is asyncio's own loop, which serves everywhere, slower."""
    try:
        import uvloop
    except ImportError:  # there is none for this platform
        return None
    return uvloop.new_event_loop
