"""`EngineClient`: the one way to engines in other processes. Asynchronous and torch-free.

Owns request ids, streams, the choice of a replica, and the state of all as seen from outside. Refuses: protocols
(``serving/``) and processes (the supervisors').
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from headrace.base.admin import AdminCall, ReleaseMemory, ReplaceWeights
from headrace.base.config import EngineConfig
from headrace.base.errors import EngineAsleep, EngineUnavailable, HeadraceError, RequestError
from headrace.base.messages import EngineRequest, EngineStats, MemoryLine, ModelFacts
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.memory.host_memory import check_replicas
from headrace.service.balancing import RoutedRequest, create_policy
from headrace.service.client.boards import Boards
from headrace.service.client.media import MediaPrompt, with_media
from headrace.service.client.outputs import ReplicaStatus
from headrace.service.client.prompts import RequestTags, encode_prompt, new_request_id, open_request, with_seed
from headrace.service.client.replica import CALL_TIMEOUT_S, RETRY_AFTER_S, Notices, Replica, Supervision
from headrace.service.client.replicas import call_all, join_facts, join_memory
from headrace.service.client.statistics import sum_stats
from headrace.service.client.stream import Assembler, RequestStream
from headrace.service.spawn import SpawnedEngine
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.loading import open_tokenizer

STATES = ("ready", "asleep", "restarting", "starting", "stopped")
"""States of replicas; the first that any of them has is the client's."""
CACHE_CALLS = (ReleaseMemory, ReplaceWeights)
NO_TAGS = RequestTags()


class EngineClient:
    """Requests in, streams out, over one or several supervised engine processes (``data_parallel_size``). Belongs to
    the event loop that ran `start`.

    ``state`` is ``starting`` until all replicas are ready, then ``ready`` while any of them is; ``asleep`` (memory is
    released, see `EngineAdmin`), ``restarting``, ``draining`` or ``stopped``. Requests are taken when ready.
    ``facts``, ``memory`` and ``tokenizer`` are known from then on; ``last_stats`` is at most a step old under load.
    ``engines`` are processes that were spawned ahead of time.
    """

    def __init__(
        self, config: EngineConfig, *, chat_template: str | None = None,
        supervision: Supervision = Supervision(),  # noqa: B008 (frozen)
        engines: Sequence[SpawnedEngine] = (),
    ):
        check_replicas(config)
        count = config.parallel.data_parallel_size
        self.facts: ModelFacts | None = None
        self.memory: list[MemoryLine] = []
        self.tokenizer: Tokenizer | None = None
        self.is_held = False
        """Whether new requests are refused as by a sleeping engine; set while it is put to sleep."""
        self.on_restart: Callable[[Replica], None] = lambda _: None
        """Called when a replica is ready again after its engine was restarted."""
        self._started: set[int] = set()  # replicas that were ready once
        self._config = config
        self._policy = create_policy(config.parallel.data_parallel_policy) if count > 1 else None
        spawned = [*engines, *[None] * count]
        if config.parallel.shares_experts:
            supervision = replace(supervision, boards=Boards(count))
        self._boards = supervision.boards
        notices = Notices(self._note_change, self._forget)
        self.replicas = [Replica(replace(config, replica=i), notices, supervision, spawned[i]) for i in range(count)]
        self._phase: Literal["starting", "open", "draining", "stopped"] = "starting"
        self._chat_template = chat_template
        self._streams: dict[str, RequestStream] = {}  # by request id
        self._seeds = random.Random(config.model.seed)
        self._decided = asyncio.Event()  # set while the state is ready, or can never be ready again
        self._idle = asyncio.Event()  # set when the last stream has ended; `close` clears it and waits
        self._failure: HeadraceError | None = None

    @property
    def state(self) -> str:
        """See the class."""
        if self._phase != "open":
            return self._phase
        states = {replica.state for replica in self.replicas}
        if self.is_held and "ready" in states:
            return "asleep"
        return next(state for state in STATES if state in states)

    @property
    def config(self) -> EngineConfig:
        """The configuration with which engines are started and restarted."""
        return self._config

    @config.setter
    def config(self, config: EngineConfig) -> None:
        self._config = config
        for replica in self.replicas:
            replica.supervisor.config = replace(config, replica=replica.index)

    @property
    def num_inflight(self) -> int:
        """Requests the engines still hold."""
        return len(self._streams)

    @property
    def engine_pids(self) -> tuple[int | None, ...]:
        """Process id of each engine, None while there is none."""
        return tuple(replica.supervisor.pid for replica in self.replicas)

    @property
    def num_restarts(self) -> int:
        """Restarts of engines within the last ten minutes."""
        return sum(replica.supervisor.num_restarts for replica in self.replicas)

    @property
    def statuses(self) -> list[ReplicaStatus]:
        """Each replica, in order."""
        return [replica.status for replica in self.replicas]

    @property
    def progress(self) -> tuple[str, float]:
        """Stage of start-up and fraction done, of the replica that is furthest behind."""
        last = min(self.replicas, key=lambda replica: replica.progress[1])
        stage, fraction = last.progress
        return (f"{last.name}: {stage}" if len(self.replicas) > 1 and fraction < 1 else stage), fraction

    @property
    def last_stats(self) -> EngineStats:
        """Counters and gauges of all engines, as they were last sent."""
        return sum_stats([replica.last_stats for replica in self.replicas])

    async def start(self, *, has_tokenizer: bool = True) -> None:
        """Spawn the engine processes and load the tokenizer while they start; raises what is wrong with the tokenizer.
        Without one, `send` takes requests that were made elsewhere."""
        for replica in self.replicas:
            replica.supervisor.start()
        if not has_tokenizer:
            return
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
        """Refuse new requests, give running ones ``drain_s`` seconds, end the rest with an error, stop the engines."""
        if self._phase != "stopped":
            self._phase = "draining"
            self._decided.set()
        if self._streams and drain_s > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):  # the deadline: what still runs is ended below
                await asyncio.wait_for(self._idle.wait(), drain_s)
        self._phase = "stopped"
        for replica in self.replicas:
            replica.fail_all(EngineUnavailable("the server is shutting down", retry_after=RETRY_AFTER_S))
        await asyncio.gather(*(replica.supervisor.close() for replica in self.replicas))
        if self._boards is not None:
            self._boards.close()

    def end_soon(self) -> None:
        """Have the engine processes end, without waiting for that; from any thread, also when the event loop has been
        closed without `close`."""
        for replica in self.replicas:
            replica.supervisor.end_soon()

    def submit(
        self, prompt: str | Sequence[int] | MediaPrompt, params: SamplingParams | PoolingSpec, *,
        request_id: str | None = None, namespace: str = "",
        priority: int = 0, deadline_s: float | None = None, add_special_tokens: bool = True,
        tags: RequestTags = NO_TAGS,
    ) -> RequestStream:
        """Check a request and send it to the engine. Raises typed errors:
        `RequestError` for what is wrong with it, `EngineUnavailable` when the engine takes none now. What the engine
        refuses (`QueueFull`) is the first delta."""
        facts = self._require_ready()
        request_id = request_id or new_request_id()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be text, got {request_id!r}", param="request_id")
        media = prompt.items if isinstance(prompt, MediaPrompt) else []
        prompt_ids = encode_prompt(
            prompt.token_ids if isinstance(prompt, MediaPrompt) else prompt, self.tokenizer,
            add_special_tokens=add_special_tokens, most=facts.max_model_len
        )
        if isinstance(params, SamplingParams):
            params = with_seed(params, self._seeds)
        requests, assembler = open_request(
            request_id, prompt_ids, params, facts=facts, tokenizer=self.tokenizer,
            namespace=namespace, priority=priority, deadline_s=deadline_s,
        )
        return self.send(request_id, tags.mark(with_media(requests, media, facts)), assembler)

    def send(self, request_id: str, requests: Sequence[EngineRequest], assembler: Assembler) -> RequestStream:
        """Send the checked choices of a request to one engine: they share its prompt. Raises as `submit`."""
        self._require_ready()
        # Choices have ids of their own (``id/0``), which another caller may have chosen as a request id.
        taken = any(replica.holds(request.request_id) for replica in self.replicas for request in requests)
        if request_id in self._streams or taken:
            raise RequestError(f"a request with id {request_id!r} is running", param="request_id")
        offered = self._offer(len(requests))
        while True:
            replica, cached_len = self._choose(requests[0], offered)
            stream = RequestStream(request_id, requests, assembler, replica.send_aborts)
            try:
                replica.send(requests, stream, cached_len)
            except EngineUnavailable:  # it has just died
                offered.remove(replica)
                if not offered:
                    raise
                continue
            self._streams[request_id] = stream
            return stream

    async def abort(self, request_id: str | None) -> None:
        """End a request, or with None all of them; unknown and finished ids are ignored."""
        for name in list(self._streams) if request_id is None else [request_id]:
            if name in self._streams:
                self._streams[name].abort()

    async def stats(self) -> EngineStats:
        """Counters and gauges as of now, fetched from the engines; the last known ones of an engine that is down."""
        up = [replica for replica in self.replicas if replica.is_up]
        if not up:
            self._require_ready()
        failures = await asyncio.gather(*(replica.fetch_stats() for replica in up), return_exceptions=True)
        if all(failures):  # None: no failure
            raise next(filter(None, failures), EngineUnavailable("no engine is up", retry_after=RETRY_AFTER_S))
        return self.last_stats

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when some are in use and stayed."""
        return bool(await self.control("reset_prefix_cache"))

    async def control(
        self, method: Literal["pause", "continue", "freeze_gc", "check", "reset_prefix_cache"] | AdminCall, *,
        timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Send a control call to all engines: ``pause`` generation (requests wait), ``continue`` it, ``freeze_gc``
        (exempt their heaps from garbage collection), or a call of base/admin; returns its result (see `call_all`).
        `EngineAdmin` orders these calls safely. A new engine process after a crash is neither paused nor asleep."""
        if self._phase != "open":
            self._require_ready()
        try:
            return await call_all(self.replicas, method, self._config, timeout_s)
        finally:
            if self._policy is not None and (method == "reset_prefix_cache" or isinstance(method, CACHE_CALLS)):
                for replica in self.replicas:
                    self._policy.forget(replica.index)

    async def check(self) -> None:
        """Let the engines check their accounting; raises when a page or row is not accounted for exactly once."""
        await self.control("check")

    def _note_change(self, replica: Replica) -> None:
        if self._boards is not None and replica.state in ("restarting", "stopped"):
            self._boards.note_end(replica, self.replicas)
        if self._policy is not None and not replica.is_up:
            self._policy.forget(replica.index)
        if replica.state == "ready":
            if replica.index in self._started:
                self.on_restart(replica)
            self._started.add(replica.index)
        known = [one for one in self.replicas if one.facts is not None]
        if replica.is_up and len(known) == len(self.replicas):
            self.facts = join_facts([one.facts for one in known if one.facts])
            self.memory = join_memory([one.memory for one in known])
        # A client that is draining or stopped stays so.
        if self._phase == "starting" and replica.state == "stopped":
            self._phase, self._failure = "stopped", _named(replica, len(self.replicas))
        elif self._phase == "starting" and all(one.state == "ready" for one in self.replicas):
            self._phase = "open"
        if self.state == "stopped":
            self._failure = self._failure or replica.failure
        if self.state in ("starting", "restarting"):
            self._decided.clear()
        else:
            self._decided.set()

    def _forget(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        if not self._streams:
            self._idle.set()

    def _offer(self, num_choices: int) -> list[Replica]:
        """The replicas that may get a request: of those that are ready, as far as there are any, those that answer, and
        of these those whose queue has room."""
        offered = [replica for replica in self.replicas if replica.state == "ready"]
        offered = [replica for replica in offered if not replica.supervisor.is_silent] or offered
        most = self._config.scheduler.max_queued - num_choices
        return [replica for replica in offered if replica.num_waiting <= most] or offered

    def _choose(self, request: EngineRequest, offered: Sequence[Replica]) -> tuple[Replica, int]:
        """A replica for the request, and how many prompt tokens it probably has cached."""
        if self._policy is None:
            return offered[0], 0
        # an adapter has a prefix cache of its own
        routed = RoutedRequest(request.prompt_token_ids, f"{request.adapter}\0{request.namespace}")
        choice = self._policy.choose(routed, [replica.load for replica in offered])
        return self.replicas[choice.replica], choice.cached_len

    def _require_ready(self) -> ModelFacts:
        state = self.state
        if state == "asleep":
            raise EngineAsleep(
                "the engine sleeps: its memory is released; it takes requests again after /wake_up",
                retry_after=RETRY_AFTER_S
            )
        if state != "ready" or self.facts is None:
            raise EngineUnavailable(f"the engine is {state} and takes no requests now", retry_after=RETRY_AFTER_S)
        return self.facts


def _named(replica: Replica, count: int) -> HeadraceError | None:
    """Why a replica did not start, with its name if there are several."""
    error = replica.failure
    if error is None or count == 1:
        return error
    return error.with_message(f"{replica.name}: {error.message}")
