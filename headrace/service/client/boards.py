"""`Boards`: starts replicas that divide experts and take their steps together. They stand and fall together too: when
one ends, the others wait for it in the middle of a step, so they are ended, and all start again over a new board.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.base.config import EngineConfig
from headrace.base.errors import EngineUnavailable
from headrace.service.ranks.gate import Board
from headrace.service.spawn import SpawnedEngine, spawn_engine
from headrace.service.supervisor import Supervisor


class Member(Protocol):
    """A replica, as far as it concerns the others."""

    index: int
    name: str
    state: str
    supervisor: Supervisor


class Boards:
    """One board at a time, for ``size`` replicas."""

    def __init__(self, size: int):
        self._size = size
        self._board: Board | None = None
        self._boards: dict[int, Board] = {}
        """Each replica's, as of its last start."""

    def spawn(self, config: EngineConfig, builder: str) -> SpawnedEngine:
        """Start a replica's process, which inherits the board. Raises `OSError`."""
        board = self._board = self._board or Board(self._size)
        spawned = spawn_engine(config, builder, board.descriptors)
        self._boards[config.replica] = board
        return spawned

    def note_end(self, ended: Member, members: Sequence[Member]) -> None:
        """A replica's process has ended: end those that shared its board."""
        board = self._boards.pop(ended.index, None)
        if board is None or board is not self._board:
            return  # those that shared it are being ended already
        self._board = None
        board.close()
        for member in members:
            if self._boards.get(member.index) is not board:
                continue
            if ended.state == "stopped":  # it will not come back, and they cannot go on without it
                member.supervisor.max_restarts = 0
            member.supervisor.replace_process(
                EngineUnavailable(f"{ended.name}, with which it divides experts, has ended", retry_after=5.0)
            )

    def close(self) -> None:
        """Free the board."""
        if self._board is not None:
            self._board.close()
            self._board = None
