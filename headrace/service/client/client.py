"""`EngineClient`: the one way to an engine in another process. Asynchronous and torch-free.

Owns request ids, streams and the engine's state as seen from outside. Refuses: protocols (``serving/``) and
processes (the supervisor's).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from headrace.base.admin import AdminCall
from headrace.base.config import EngineConfig
from headrace.base.errors import EngineAsleep, EngineUnavailable, HeadraceError, RequestError
from headrace.base.messages import (
    Abort,
    Call,
    EngineStats,
    ErrorInfo,
    FromEngine,
    MemoryLine,
    ModelFacts,
    Outputs,
    Ready,
    Reply,
    RequestOutput,
    Starting,
)
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.service.client.prompts import encode_prompt, new_request_id, open_request, with_seed
from headrace.service.client.stream import RequestStream
from headrace.service.spawn import ENGINE_BUILDER, SpawnedEngine
from headrace.service.supervisor import STALL_TIMEOUT_S, Supervisor
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.loading import open_tokenizer

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
RETRY_AFTER_S = 5.0


class EngineClient:
    """Requests in, streams out, over one supervised engine process. Belongs to the event loop that ran `start`.

    ``state`` is ``starting``, ``ready``, ``asleep`` (its memory is released, see `EngineAdmin`), ``restarting``,
    ``draining`` or ``stopped``; requests are taken when ready. ``facts``, ``memory`` and ``tokenizer`` are known from
    then on; ``last_stats`` is at most a step old under load. ``stall_timeout_s``, ``builder`` and ``engine`` are the
    supervisor's.
    """

    def __init__(
        self, config: EngineConfig, *, max_restarts: int = 5, chat_template: str | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        builder: str = ENGINE_BUILDER, engine: SpawnedEngine | None = None,
    ):
        self.state = "starting"
        self.facts: ModelFacts | None = None
        self.memory: list[MemoryLine] = []
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.tokenizer: Tokenizer | None = None
        self.last_stats = EngineStats()
        self._chat_template = chat_template
        self._supervisor = Supervisor(
            config, self, max_restarts=max_restarts, stall_timeout_s=stall_timeout_s, builder=builder, engine=engine,
        )
        self._streams: dict[str, RequestStream] = {}  # by request id
        self._stream_of_child: dict[str, RequestStream] = {}  # by engine request id: one per choice, see `submit`
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._seeds = random.Random(config.model.seed)
        self._decided = asyncio.Event()  # set while the state is ready, or can never be ready again
        self._idle = asyncio.Event()  # set when the last stream has ended; `close` clears it and waits
        self._failure: HeadraceError | None = None

    @property
    def config(self) -> EngineConfig:
        """What the engine was started with, and would be again."""
        return self._supervisor.config

    @config.setter
    def config(self, config: EngineConfig) -> None:
        self._supervisor.config = config

    @property
    def num_inflight(self) -> int:
        """Requests the engine still holds."""
        return len(self._streams)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._supervisor.pid

    @property
    def num_restarts(self) -> int:
        """Restarts of the engine within the last ten minutes."""
        return self._supervisor.num_restarts

    async def start(self) -> None:
        """Spawn the engine process and load the tokenizer while it starts; raises what is wrong with the tokenizer."""
        self._supervisor.start()
        is_optional = self.config.model.load_format == "dummy"
        async with contextlib.AsyncExitStack() as undo:  # an error below must not leave the engine process running
            undo.push_async_callback(self.close)
            self.tokenizer = await asyncio.to_thread(
                open_tokenizer, self.config.model, chat_template=self._chat_template, is_optional=is_optional,
            )
            if self.tokenizer is not None:  # now, or the first long text would hold up the event loop
                await asyncio.to_thread(lambda tokenizer: tokenizer.bound, self.tokenizer)
            undo.pop_all()

    async def wait_ready(self) -> None:
        """Return once requests are taken; raises the engine's own error when it cannot start."""
        await self._decided.wait()
        if self.state != "ready":
            raise self._failure or EngineUnavailable(f"the engine is {self.state}")

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones ``drain_s`` seconds, end the rest with an error, stop the engine."""
        if self.state != "stopped":
            self.state = "draining"
            self._decided.set()
        if self._streams and drain_s > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):  # the deadline: what still runs is ended below
                await asyncio.wait_for(self._idle.wait(), drain_s)
        self.state = "stopped"
        self._fail_all(EngineUnavailable("the server is shutting down", retry_after=RETRY_AFTER_S))
        await self._supervisor.close()

    def submit(
        self, prompt: str | list[int], params: SamplingParams | PoolingSpec, *, request_id: str | None = None,
        namespace: str = "",
        priority: int = 0, deadline_s: float | None = None, add_special_tokens: bool = True,
        origin: tuple[str, ...] = (),
    ) -> RequestStream:
        """Check a request and send it to the engine. ``origin`` is as of `EngineRequest`. Raises typed errors:
        `RequestError` for what is wrong with it, `EngineUnavailable` when the engine takes none now. What the engine
        refuses (`QueueFull`) is the first delta."""
        facts = self._require_ready()
        request_id = request_id or new_request_id()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be text, got {request_id!r}", param="request_id")
        prompt_ids = encode_prompt(
            prompt, self.tokenizer, add_special_tokens=add_special_tokens, most=facts.max_model_len
        )
        if isinstance(params, SamplingParams):
            params = with_seed(params, self._seeds)
        requests, assembler = open_request(
            request_id, prompt_ids, params, facts=facts, tokenizer=self.tokenizer,
            namespace=namespace, priority=priority, deadline_s=deadline_s,
        )
        # Choices have ids of their own (``id/0``), which another caller may have chosen as a request id.
        if request_id in self._streams or any(request.request_id in self._stream_of_child for request in requests):
            raise RequestError(f"a request with id {request_id!r} is running", param="request_id")
        # No await from here on: outputs are delivered in this event loop, so none can come before the stream is known.
        for request in requests:
            self._supervisor.send(msgspec.structs.replace(request, origin=origin) if origin else request)
        stream = RequestStream(request_id, requests, assembler, self._send_aborts)
        self._streams[request_id] = stream
        self._stream_of_child |= dict.fromkeys(stream.child_ids, stream)
        return stream

    async def abort(self, request_id: str | None) -> None:
        """End a request, or with None all of them; unknown and finished ids are ignored."""
        for name in list(self._streams) if request_id is None else [request_id]:
            if name in self._streams:
                self._streams[name].abort()

    async def stats(self) -> EngineStats:
        """Counters and gauges as of now, fetched from the engine."""
        self.last_stats = msgspec.convert(await self._call("stats"), EngineStats)
        return self.last_stats

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when some are in use and stayed."""
        return bool(await self._call("reset_prefix_cache"))

    async def control(
        self, method: Literal["pause", "continue", "freeze_gc"] | AdminCall, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Send a control call: ``pause`` generation (requests wait), ``continue`` it, ``freeze_gc`` (exempt the
        engine's heap from garbage collection), or a call of base/admin; returns its result. `EngineAdmin` orders these
        calls safely. A new engine process after a crash is neither paused nor asleep."""
        if isinstance(method, str):
            return await self._call(method)
        return await self._call(method.method, msgspec.to_builtins(method), timeout_s)

    async def check(self) -> None:
        """Let the engine check its accounting; raises when a page or row is not accounted for exactly once."""
        await self._call("check")

    def on_message(self, message: FromEngine) -> None:
        """A message of the engine; called by the supervisor."""
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._deliver(output)
            self.last_stats = message.stats or self.last_stats
        elif isinstance(message, Starting):
            self.progress = (message.stage, message.fraction)
        elif isinstance(message, Ready):
            self.facts, self.memory, self.progress = message.facts, message.memory, ("ready", 1.0)
            # A client that is draining or stopped stays so.
            if self.state in ("starting", "restarting"):
                self.state = "ready"
                self._decided.set()
        elif isinstance(message, Reply):
            self._resolve_call(message)

    def on_exit(self, error: HeadraceError, *, is_final: bool) -> None:
        """The engine process is gone; called by the supervisor."""
        if self.state not in ("draining", "stopped"):
            self.state = "stopped" if is_final else "restarting"
            self.progress = ("starting", 0.0)
            if is_final:
                self._failure = error
                self._decided.set()
            else:
                self._decided.clear()
        self._fail_all(
            EngineUnavailable(f"the engine stopped while this request ran: {error.message}", retry_after=RETRY_AFTER_S)
        )

    def _require_ready(self) -> ModelFacts:
        if self.state == "asleep":
            raise EngineAsleep(
                "the engine sleeps: its memory is released; it takes requests again after /wake_up",
                retry_after=RETRY_AFTER_S
            )
        if self.state != "ready" or self.facts is None:
            raise EngineUnavailable(f"the engine is {self.state} and takes no requests now", retry_after=RETRY_AFTER_S)
        return self.facts

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._stream_of_child.get(output.request_id)
        if stream is None:  # it failed with an earlier life of the engine
            return
        stream.feed(output)
        if output.finish is not None:
            del self._stream_of_child[output.request_id]
            if not stream.is_running:
                self._forget(stream)

    def _forget(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        if not self._streams:
            self._idle.set()

    def _fail_all(self, error: HeadraceError) -> None:
        self._stream_of_child.clear()
        for stream in list(self._streams.values()):
            stream.fail(ErrorInfo.of(error))
            self._forget(stream)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    def _send_aborts(self, aborts: Iterable[Abort]) -> None:
        with contextlib.suppress(EngineUnavailable):  # a dead engine has nothing to end
            for abort in aborts:
                self._supervisor.send(abort)

    # A call is allowed while asleep: waking up is one. The future is removed in any case, so that a late reply to a
    # call that timed out finds none.
    async def _call(
        self, method: str, arguments: dict[str, object] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        if self.state != "asleep":
            self._require_ready()
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._supervisor.send(Call(call_id, method, arguments or {}))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise EngineUnavailable(f"the engine did not answer {method} within {timeout_s:.0f} s") from error
        finally:
            del self._calls[call_id]

    def _resolve_call(self, reply: Reply) -> None:
        call = self._calls.get(reply.call_id)
        if call is None or call.done():
            return
        if reply.error is not None:
            call.set_exception(reply.error.to_error())
        else:
            call.set_result(reply.result)
