"""`MeasuredFile`: choices that were measured on this machine, cached in a JSON file by key."""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class MeasuredFile:
    """Reads the file once; `save` adds what was measured since. A missing or damaged file holds nothing."""

    def __init__(self, path: Path):
        self._path, self._known, self._has_new = path, _read(path), False

    def find(self, key: str) -> Any:
        """The choice of a key, as JSON gives it; None if it was never measured."""
        return self._known.get(key)

    def put(self, key: str, choice: Any) -> None:
        """Remember a choice."""
        self._known[key], self._has_new = choice, True

    def save(self) -> None:
        """Write new choices."""
        if not self._has_new:
            return
        partial = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # read again: another process may have added its measurements since
            partial.write_text(json.dumps({**_read(self._path), **self._known}, indent=0))
            # atomic: other processes may write the same file; those of other containers may have this one's pid
            partial.replace(self._path)
            self._has_new = False
        except OSError as error:
            logger.warning("what was measured is measured at every start, as it cannot be cached: %s", error)
            with suppress(OSError):
                partial.unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
