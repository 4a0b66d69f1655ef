"""Runs work ahead of its consumer on threads, in order and within a budget of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def map_ahead(
    function: Callable[[A], B], items: Iterable[A], *, cost: Callable[[A], int], budget: int, threads: int
) -> Generator[B, None, None]:
    """``map(function, items)`` with up to ``threads`` calls at work on items whose costs sum to at most ``budget``
    (one item always runs, whatever it costs). An error surfaces in its item's turn; closing the iterator stops it."""
    pending: deque[tuple[Future[B], int]] = deque()
    spent = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        try:
            for item in items:
                price = cost(item)
                while pending and (spent + price > budget or len(pending) > 2 * threads):
                    future, paid = pending.popleft()
                    result = future.result()
                    del future
                    yield result
                    del result  # the consumer alone may hold it now
                    spent -= paid
                pending.append((pool.submit(function, item), price))
                spent += price
            while pending:
                yield pending.popleft()[0].result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
