"""A `Group` whose ranks are threads of one process, for tests of what is computed over one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from headrace.parallel.group import Group

T = TypeVar("T")


class ThreadGroup(Group):
    """Every collective is an exchange of all ranks' tensors."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier):
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def all_reduce(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """See `Group`."""
        return torch.stack(self._share(super().all_reduce(x, more))).sum(0)

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `Group`."""
        parts = self._share(x)
        assert [part.shape[-1] for part in parts] == list(sizes)
        return torch.cat(parts, dim=-1)

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """See `Group`."""
        parts = self._share(x)
        assert [len(part) for part in parts] == list(counts)
        return torch.cat(parts)

    def exchange_rows(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], most: int = 0
    ) -> torch.Tensor:
        """See `Group`."""
        assert not most or max(*sent, *received) <= most
        assert sum(sent) == len(x)
        parts = [parts[self.rank] for parts in self._share(x.split(list(sent)))]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)

    def _share(self, x: T) -> list[T]:
        self._board[self.rank] = x
        self._barrier.wait(30)
        everyone = list(self._board)
        self._barrier.wait(30)
        return everyone


def on_all_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """The results of ``work`` with each rank's group, run at the same time; raises what one of them raises."""
    board, barrier, results, errors = [None] * size, threading.Barrier(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, board, barrier))  # type: ignore[call-overload]
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results  # type: ignore[return-value]
