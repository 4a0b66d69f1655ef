"""Text for terminals: titled blocks of entries, wrapped between words only, so that any name, path or command can be
copied. A single word that is longer than the terminal stays whole.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WIDEST = 120
"""Columns: longer lines are hard to read."""
INDENT = 2
WIDEST_TERM = 24
"""Columns of the left side; the text of a longer term begins on the line below it."""


def terminal_width() -> int:
    """Columns of the terminal, of ``COLUMNS``, or 80."""
    return min(shutil.get_terminal_size().columns, WIDEST)


def wrap(text: str, width: int, *, first: str = "", indent: int = 0) -> list[str]:
    """Lines of at most ``width`` columns. The first begins with ``first``, the others with ``indent`` spaces. Breaks
    between words alone, not at hyphens."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False
    ) or [first.rstrip()]


def lay_out(entries: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    """Lines of a list of terms with their texts, the texts in one column."""
    rows = list(entries)
    column = INDENT + 2 + min(max((len(term) for term, _ in rows), default=0), WIDEST_TERM)
    for term, text in rows:
        start = " " * INDENT + term
        if not text:
            yield start
        elif len(start) + 2 <= column:
            yield from wrap(text, width, first=start.ljust(column), indent=column)
        else:
            yield start
            yield from wrap(text, width, first=" " * column, indent=column)


@dataclass(frozen=True)
class Block:
    """A title, lines below it."""

    title: str
    lines: list[str]


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print blocks with an empty line between them; titles are bold on a terminal. Blocks without lines are left out.
    """
    is_terminal = sys.stdout.isatty()
    shown = [block for block in blocks if block.lines]
    for number, block in enumerate(shown):
        if number:
            print()
        print(f"\033[1m{block.title}\033[0m" if is_terminal else block.title)
        print("\n".join(block.lines))
