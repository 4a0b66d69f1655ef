"""`map_ahead`: maps a function over items on threads, ahead of the consumer and within a byte budget."""

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
    """Yield ``function(item)`` in the order of ``items``, with up to ``threads`` calls running ahead.

    The costs of items that are running or finished but not yet yielded sum to at most ``budget``; one item always runs,
    whatever its cost. An exception is raised at its item's turn. Closing the generator cancels what has not started and
    waits for what has.
    """
    pending: deque[tuple[Future[B], int]] = deque()
    spent = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        try:
            for item in items:
                price = cost(item)
                # the second condition bounds the queue when items cost nothing
                while pending and (spent + price > budget or len(pending) > 2 * threads):
                    future, paid = pending.popleft()
                    result = future.result()
                    del future
                    yield result
                    del result  # or this frame would keep the tensor alive while the next one is made
                    spent -= paid
                pending.append((pool.submit(function, item), price))
                spent += price
            while pending:
                yield pending.popleft()[0].result()
        finally:  # also when the consumer closes the generator early
            pool.shutdown(wait=True, cancel_futures=True)
