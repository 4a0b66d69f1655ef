"""`RequestStream`: a caller's handle of a request in flight. Fed by the client, read with ``async for``; both in one
event loop, so no locks.

Refuses: sockets and tokenizers; an assembler turns engine outputs into deltas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Protocol

from headrace.base.messages import Abort, EngineRequest, ErrorInfo, Finish, RequestOutput
from headrace.service.client.outputs import ChoiceDelta

logger = logging.getLogger(__name__)


class Assembler(Protocol):
    """What a stream needs of `headrace.service.client.assembler.OutputAssembler`."""

    @property
    def is_finished(self) -> bool:
        """Whether every choice has had its last delta."""

    def feed(self, output: RequestOutput) -> ChoiceDelta | None:
        """The delta that this output completes, None when there is none yet."""

    def to_abort(self) -> list[Abort]:
        """Requests that the text just ended (stop strings); each is returned once."""


def merge_deltas(earlier: ChoiceDelta, later: ChoiceDelta) -> ChoiceDelta:
    """Merge two consecutive deltas of one choice into ``later``, which is changed and returned."""
    if later.logprobs is not None:
        later.logprobs = (earlier.logprobs or []) + later.logprobs
    else:
        later.logprobs = earlier.logprobs
    later.text = earlier.text + later.text
    later.token_ids = earlier.token_ids + later.token_ids
    later.num_cached_tokens = max(earlier.num_cached_tokens, later.num_cached_tokens)
    later.num_draft_tokens += earlier.num_draft_tokens
    later.num_accepted_tokens += earlier.num_accepted_tokens
    if later.queued_s is None:
        later.queued_s = earlier.queued_s
    if later.prompt_logprobs is None:
        later.prompt_logprobs = earlier.prompt_logprobs
    return later


class RequestStream:
    """Deltas of all choices of one request, in the order they came, until every choice has finished.

    A slow reader gets merged deltas: at most one per choice is pending, so the number of objects is bounded. Leaving
    the loop early, being cancelled in it, `abort` and `aclose` all end the request in the engine. One reader at a time.
    `divert` passes deltas to a callback instead, without waking a task for every token.
    """

    def __init__(
        self, request_id: str, requests: Sequence[EngineRequest], assembler: Assembler,
        send: Callable[[Iterable[Abort]], None]
    ):
        self.request_id = request_id
        self._prompt = requests[0].prompt_token_ids
        self.child_ids = [r.request_id for r in requests]
        self._unfinished = set(range(len(requests)))  # choices that have not had their last delta
        self._is_broken = False  # an output could not be assembled; later ones are ignored
        self._running = dict.fromkeys(self.child_ids)  # not yet finished by the engine; a dict keeps their order
        self._aborted: set[str] = set()  # aborts that were sent; the engine's last output is still to come
        self._assembler = assembler
        self._send = send
        self._pending: dict[int, ChoiceDelta] = {}
        self._updated = asyncio.Event()
        self._take: Callable[[ChoiceDelta], bool] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt, unpacked at each call."""
        return self._prompt.tolist()

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self._prompt)

    @property
    def is_finished(self) -> bool:
        """Whether every choice is complete; deltas may still wait to be read."""
        return self._is_broken or self._assembler.is_finished

    @property
    def is_running(self) -> bool:
        """Whether the engine still holds any choice."""
        return bool(self._running)

    def feed(self, output: RequestOutput) -> None:
        """Take an output of one of the children; called by the client alone."""
        if output.finish is not None:
            self._running.pop(output.request_id, None)
        if self._is_broken:
            return
        try:
            delta = self._assembler.feed(output)
            if delta is not None and not self._hand_over(delta):
                self._keep(delta)
        except Exception as error:  # request edge: text that cannot be assembled fails this request alone
            self._break(error)
            return
        if aborts := self._assembler.to_abort():
            self._abort_children(aborts)

    def divert(self, take: Callable[[ChoiceDelta], bool]) -> None:
        """Pass each delta to ``take`` at once, inside `feed`. The reader gets deltas for which ``take`` returns False,
        errors, and, so that order is kept, all that come while others are pending. ``take`` must return False while the
        reader still works on an earlier delta."""
        self._take = take

    def fail(self, error: ErrorInfo) -> None:
        """End every unfinished choice with an error, without a message to the engine (it is gone)."""
        for child_id in list(self._running):
            self.feed(RequestOutput(child_id, [], Finish("error", error=error)))

    def abort(self) -> None:
        """End the request; its choices finish with reason ``abort``. Does nothing to what has finished."""
        self._abort_children([Abort(child_id) for child_id in self._running])

    async def aclose(self) -> None:
        """As `abort`, for ``contextlib.aclosing``."""
        self.abort()

    async def __aiter__(self) -> AsyncGenerator[ChoiceDelta, None]:
        try:
            while True:
                while self._pending:
                    yield self._pending.pop(next(iter(self._pending)))
                if self.is_finished:
                    return
                self._updated.clear()
                await self._updated.wait()
        finally:  # also reached by `break` (once the generator is closed) and by cancellation
            self.abort()

    def _hand_over(self, delta: ChoiceDelta) -> bool:
        if self._take is None or self._pending or delta.error is not None or not self._take(delta):
            return False
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
            self._updated.set()  # the reader sees whether that was all
        return True

    def _keep(self, delta: ChoiceDelta) -> None:
        earlier = self._pending.get(delta.index)
        self._pending[delta.index] = delta if earlier is None else merge_deltas(earlier, delta)
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
        self._updated.set()

    def _break(self, error: Exception) -> None:
        logger.error("output of request %s cannot be assembled", self.request_id, exc_info=error)
        self._is_broken = True
        for index in sorted(self._unfinished):
            self._keep(ChoiceDelta(index, "", [], finish_reason="error", error=ErrorInfo.of(error)))
        self.abort()

    def _abort_children(self, aborts: Iterable[Abort]) -> None:
        # Each abort is sent once: a stop string and the caller may both end the same choice.
        fresh = [a for a in aborts if a.request_id in self._running and a.request_id not in self._aborted]
        if fresh:
            self._aborted.update(a.request_id for a in fresh)
            self._send(fresh)
