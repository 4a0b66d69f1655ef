"""`Fleet`: the workers behind the router, their health checks, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator
from http import HTTPStatus

from headrace.base.errors import ConfigError, EngineUnavailable
from headrace.service.balancing import Choice, Policy, RoutedRequest, create_policy
from headrace.serving.http_client import HttpClient
from headrace.serving.router.options import WorkerOptions
from headrace.serving.router.workers import IDLE_S, Breaker, Worker

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
RECOVERY_S = 1.0
"""Most seconds between two health checks of a worker that takes no requests."""
MODELS_EVERY = 12
"""Health checks from one look at a worker's models to the next."""


def full_url(url: str) -> str:
    """A worker's URL in the one form by which it is known; http where no scheme is given."""
    url = url.strip().rstrip("/")
    return url if "://" in url else f"http://{url}"


class Fleet:
    """Owns one task per worker, which checks its health. ``options.worker_api_key`` is used for checks too. Workers
    of a prefill fleet are asked for the port of their transfer agents."""

    def __init__(self, options: WorkerOptions, policy: str, *, is_prefill: bool = False):
        self.options, self._is_prefill = options, is_prefill
        self._policy: Policy = create_policy(policy)
        self._workers: dict[str, Worker] = {}  # by URL
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._indices = itertools.count()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def is_ready(self) -> bool:
        """Whether any worker takes requests."""
        return any(worker.takes_requests for worker in self)

    def add(self, url: str) -> Worker:
        """Begin to use a worker, or use one that is being drained again. Raises `ConfigError` for an invalid URL."""
        url = full_url(url)
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ConfigError("a worker's URL has no user and password: they would not be sent; give --worker-api-key")
        known = self._workers.get(url)
        if known is not None:
            known.is_draining = False
            return known
        client = HttpClient(url, api_key=self.options.worker_api_key, idle_s=IDLE_S)
        breaker = Breaker(self.options.breaker_failures)
        worker = Worker(next(self._indices), url, client, breaker, self._is_prefill)
        self._workers[url] = worker
        self._tasks[url] = asyncio.get_running_loop().create_task(self._watch(worker))
        return worker

    def drain(self, url: str) -> bool:
        """Send nothing more to a worker, and forget it when what runs there has ended; False if it is unknown."""
        worker = self._workers.get(full_url(url))
        if worker is None:
            return False
        if not worker.is_draining:
            logger.info("%s gets no more requests; %d run there", worker.url, len(worker.relays))
        worker.is_draining = True
        self.drop_if_drained(worker)
        return True

    def replace(self, urls: Collection[str], found: Collection[str]) -> None:
        """Use those of ``urls`` that are not in ``found`` and drain those of ``found`` that are not in ``urls``: one
        that was drained by hand stays away until it has gone and come again."""
        for url in urls:
            try:
                if url not in found:
                    self.add(url)
            except ConfigError as error:
                logger.warning("not a worker: %s", error)
        for url in found:
            if url not in urls:
                self.drain(url)

    def choose(self, request: RoutedRequest, model: str, tried: Collection[Worker]) -> tuple[Worker, Choice]:
        """A worker that has not been tried, of those that list the model, if any does. Raises `EngineUnavailable`."""
        workers = [worker for worker in self._workers.values() if worker.takes_requests and worker not in tried]
        workers = [worker for worker in workers if not worker.models or worker.lists(model)] or workers
        if not workers:
            raise EngineUnavailable(self._describe_lack(tried), retry_after=RETRY_AFTER_S)
        choice = self._policy.choose(request, [worker.state for worker in workers])
        for worker in workers:
            if worker.index == choice.replica:
                return worker, choice
        raise AssertionError(f"the policy has chosen {choice.replica}, which was not offered")

    def models(self) -> Iterable[dict[str, object]]:
        """The models that ready workers list, each id once."""
        found: dict[str, dict[str, object]] = {}
        for worker in self:
            if worker.health == "ready":
                for name, model in worker.models.items():
                    found.setdefault(name, model)
        return found.values()

    async def close(self) -> None:
        """End the checks, and close connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in list(self):  # one that is being drained is forgotten with its last request
            worker.give_up()
            worker.client.close()
        self._workers.clear()
        self._tasks.clear()

    async def _watch(self, worker: Worker) -> None:
        options, num_failed = self.options, 0
        for count in itertools.count(1):
            was_failing = worker.health == "failing"
            status = await worker.check_health(options.health_timeout_s)
            if status == HTTPStatus.OK:
                num_failed = 0
                if was_failing:
                    self._policy.forget(worker.index)  # it may have been restarted, without its cache
                if count % MODELS_EVERY == 0 or not worker.models:  # it did not answer, or not well
                    await worker.read_models(options.health_timeout_s)
            else:
                num_failed = 0 if status else num_failed + 1  # who answers ends what runs there by itself
                if num_failed >= options.health_failures and worker.relays:
                    logger.warning("%s: %d requests there are given up", worker.url, len(worker.relays))
                    worker.give_up()
            pause_s = options.health_interval_s
            if worker.health == "ready":
                worker.was_lost.clear()
                with contextlib.suppress(TimeoutError):
                    # not `wait_for`, which until Python 3.12 forgets that it was cancelled if both happen in one turn
                    async with asyncio.timeout(pause_s):
                        await worker.was_lost.wait()
            else:
                await asyncio.sleep(min(RECOVERY_S, pause_s))

    def drop_if_drained(self, worker: Worker) -> None:
        """Forget a worker that is being drained, once nothing runs there."""
        if worker.is_draining and not worker.relays and self._workers.get(worker.url) is worker:
            del self._workers[worker.url]
            self._tasks.pop(worker.url).cancel()
            self._policy.forget(worker.index)
            worker.client.close()
            logger.info("%s is drained", worker.url)

    def _describe_lack(self, tried: Collection[Worker]) -> str:
        if tried:
            return "all workers that could take this request have failed; try again"
        if not self._workers:
            return "the router has no workers yet; try again"
        states = ", ".join(f"{worker.url} {worker.health}" for worker in itertools.islice(self, 3))
        return f"no worker takes requests now ({states}{', ...' if len(self) > 3 else ''}); try again"

