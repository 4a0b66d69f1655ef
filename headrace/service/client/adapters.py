"""`AdapterCatalog`: the LoRA adapters of a client's engines by name, and loading and unloading them. Torch-free.

Refuses: reading adapters (the engines do that).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.base.adapters import AdapterInfo, ListAdapters, LoadAdapter, LoRARequest, UnloadAdapter
from headrace.base.errors import (
    Conflict,
    EngineUnavailable,
    HeadraceError,
    NotFound,
    RequestError,
    UnsupportedFeature,
)
from headrace.models.adapters.finding import find_allowed

if TYPE_CHECKING:
    from headrace.service.client.client import EngineClient
    from headrace.service.client.replica import Replica

MAX_NAME = 256
LOADING_TIMEOUT_S = 600.0

logger = logging.getLogger(__name__)


def check_name(name: str, taken: Iterable[str] = ()) -> str:
    """The name of an adapter; raises `RequestError` for one that a request could not give, or that is another's."""
    if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        raise RequestError(
            f"the name of an adapter is printable text of at most {MAX_NAME} characters, got {name[:80]!r}",
            param="lora_name"
        )
    if name in taken:
        raise Conflict(f"{name!r} is the served model's own name; choose another for the adapter", param="lora_name")
    return name


class AdapterCatalog:
    """What adapters requests may name. Those of ``lora_modules`` are known from the start; others are loaded and
    unloaded on all replicas at once, one after another. A replica that was restarted gets the ones that were loaded
    from a path again; those that were loaded from tensors are gone."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._turn = asyncio.Lock()
        self._known: dict[str, LoRARequest] = {module.name: module for module in client.config.adapters.modules}
        self._static = dict(self._known)
        self._pinned: set[str] = set()
        self._from_tensors: dict[str, tuple[int | None, ...]] = {}  # by name: the engines' process ids
        self._reloading: set[asyncio.Task[None]] = set()
        client.on_restart = self._begin_reload

    @property
    def loaded(self) -> list[LoRARequest]:
        """The adapters that requests may name, in the order in which they were loaded."""
        pids = self._client.engine_pids
        for name, own in list(self._from_tensors.items()):
            if own != pids and None not in pids:  # a restarted engine does not have it
                logger.warning("adapter %r was loaded from tensors and went with its engine; load it again", name)
                self._forget(name)
        return list(self._known.values())

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [adapter.name for adapter in self.loaded]

    def find(self, name: str, bases: Sequence[str]) -> str | None:
        """The adapter that a request's ``model`` names: ``name``, or ``base:name`` with one of ``bases``, the served
        model's names; None for another name."""
        known = set(self.names)
        names = (name, *(name.removeprefix(f"{base}:") for base in bases))
        return next((wanted for wanted in names if wanted in known), None)

    def is_reloading(self, names: Iterable[str]) -> bool:
        """Whether one of these adapters is being loaded again after a restart; empty names are of the base model."""
        return bool(self._reloading) and any(name and not self._is_static(name) for name in names)

    async def settle(self, names: Sequence[str]) -> None:
        """Wait until adapters have been loaded again; raises `NotFound` for one that cannot be."""
        while self.is_reloading(names):
            await asyncio.wait(self._reloading)
        gone = next((name for name in names if name and name not in self._known), None)
        if gone is not None:
            raise NotFound(f"adapter {gone!r} could not be loaded again after a restart of the engine", param="model")

    async def load(
        self, name: str, path: str, *, own_names: Sequence[str] = (), is_pinned: bool = False, replaces: bool = False,
        is_trusted: bool = False
    ) -> AdapterInfo:
        """Load an adapter from one of the allowed folders, or with ``is_trusted`` from anywhere. ``own_names``: the
        served model's. Raises `Conflict` for a name that is taken unless ``replaces``, `NotFound`, `RequestError`."""
        self._require_enabled()
        check_name(name, own_names)
        folders = self._client.config.adapters.folders
        async with self._turn:
            self._check_free(name, replaces)
            found = path if is_trusted else await asyncio.to_thread(find_allowed, path, folders)
            try:
                return await self._send(LoadAdapter(name, found, is_pinned, replaces), LoRARequest(name, path), found)
            except RequestError as error:  # clients may be on other machines
                raise error.with_message(error.message.replace(found, path)) from error

    async def load_tensors(
        self, name: str, tensors: bytes, config: str, *, own_names: Sequence[str] = (), is_pinned: bool = False,
        replaces: bool = False
    ) -> AdapterInfo:
        """Load an adapter from the bytes of adapter_model.safetensors and the text of adapter_config.json."""
        self._require_enabled()
        check_name(name, own_names)
        async with self._turn:
            self._check_free(name, replaces)
            call = LoadAdapter(name, "", is_pinned, replaces, tensors, config)
            info = await self._send(call, LoRARequest(name), "")
            self._from_tensors[name] = self._client.engine_pids
            return info

    async def make_ready(self, request: LoRARequest | None) -> str:
        """The name of the adapter to use, which is loaded from its path unless it is; empty for None."""
        if request is None:
            return ""
        self._require_enabled()
        if self._reloading:
            await asyncio.wait(self._reloading)
        if request.name not in self.names:
            if not request.path:
                raise NotFound(f"no adapter {request.name!r} is loaded; give its path", param="lora_request")
            with contextlib.suppress(Conflict):  # another request has loaded it meanwhile
                await self.load(request.name, request.path, is_trusted=True)
        known = self._known.get(request.name)
        if known is not None and request.path not in ("", known.path):
            raise Conflict(
                f"adapter {request.name!r} was loaded from {known.path or 'tensors'}, not from {request.path}; choose "
                "another name, or load it with replaces=True", param="lora_request"
            )
        return request.name

    async def unload(self, name: str) -> AdapterInfo:
        """Refuse new requests for an adapter, and free it when those that run have ended. Raises `NotFound`."""
        self._require_enabled()
        async with self._turn:
            if name not in self.names:
                raise NotFound(f"no adapter {name!r} is loaded", param="lora_name")
            info = msgspec.convert(await self._client.control(UnloadAdapter(name)), AdapterInfo)
            self._forget(name)
            return info

    async def describe(self) -> list[AdapterInfo]:
        """The loaded adapters, as the engines describe them."""
        self._require_enabled()
        return msgspec.convert(await self._client.control(ListAdapters()), list[AdapterInfo])

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self._from_tensors.pop(name, None)
        self._pinned.discard(name)

    def _is_static(self, name: str) -> bool:
        """Whether a restarted engine has an adapter as it is here."""
        is_same = name in self._static and self._known.get(name) == self._static[name]
        return is_same and name not in self._from_tensors and name not in self._pinned

    def _require_enabled(self) -> None:
        if not self._client.config.adapters.enable_lora:
            raise UnsupportedFeature("adapters are not served: start with --enable-lora", param="lora_name")

    def _check_free(self, name: str, replaces: bool) -> None:
        if not replaces and name in self.names:
            raise Conflict(
                f"an adapter {name!r} is loaded; unload it first, or send load_inplace: true to replace it",
                param="lora_name"
            )

    async def _send(self, call: LoadAdapter, request: LoRARequest, path: str) -> AdapterInfo:
        if call.name in self._known and call.name not in self._from_tensors:
            call = msgspec.structs.replace(call, previous=self._known[call.name].path)
        try:
            result = await self._client.control(call, timeout_s=LOADING_TIMEOUT_S)
        except Conflict:
            if call.name in self._known:
                raise
            # of a load that nobody waited for, or whose other engines are gone
            call = msgspec.structs.replace(call, replaces=True)
            result = await self._client.control(call, timeout_s=LOADING_TIMEOUT_S)
        except HeadraceError:
            await self._find_out(call.name)
            raise
        self._from_tensors.pop(call.name, None)
        if call.is_pinned:
            self._pinned.add(call.name)
        self._known[call.name] = LoRARequest(request.name, path or request.path)
        return msgspec.convert(result, AdapterInfo)

    async def _find_out(self, name: str) -> None:
        """After a failed load that could not be undone: forget the adapter if the engines have it no longer."""
        with contextlib.suppress(HeadraceError):
            if name not in {info.name for info in await self.describe() if not info.is_draining}:
                self._forget(name)

    def _begin_reload(self, replica: Replica) -> None:
        # with a turn taken, changes may be under way that the engine comes too late for
        if self._turn.locked() or self._find_changes() or (self._known and len(self._client.replicas) > 1):
            task = asyncio.get_running_loop().create_task(self._reload(replica), name="adapter-reload")
            self._reloading.add(task)
            task.add_done_callback(self._reloading.discard)

    def _find_changes(self) -> list[LoadAdapter | UnloadAdapter]:
        """The calls that give a restarted engine, which has only those of ``lora_modules``, the adapters of now."""
        loads = [
            LoadAdapter(adapter.name, adapter.path, adapter.name in self._pinned, replaces=True)
            for adapter in self._known.values()
            if not self._is_static(adapter.name) and adapter.name not in self._from_tensors
        ]
        return [*loads, *(UnloadAdapter(name) for name in self._static if name not in self._known)]

    async def _reload(self, replica: Replica) -> None:
        async with self._turn:  # what is loaded or unloaded meanwhile must not be undone
            for call in self._find_changes():
                try:
                    await replica.call(call.method, msgspec.to_builtins(call), LOADING_TIMEOUT_S)
                except EngineUnavailable:
                    return  # it is gone again; the next one is told
                except HeadraceError as error:
                    if isinstance(call, LoadAdapter):
                        logger.warning("adapter %r could not be loaded again and is gone: %s", call.name, error)
                        self._forget(call.name)
            with contextlib.suppress(EngineUnavailable):
                await self._align(replica)

    async def _align(self, replica: Replica) -> None:
        """Have all replicas load the adapters that a restarted one has read otherwise than the others have."""
        other = next((one for one in self._client.replicas if one is not replica and one.is_up), None)
        if other is None:
            return
        digests, others = await _read_digests(replica), await _read_digests(other)
        changed = [name for name, digest in digests.items() if others.get(name, digest) != digest]
        for name in [name for name in changed if name in self._known and name not in self._from_tensors]:
            logger.warning("the files of adapter %r have changed since it was loaded; all replicas load them", name)
            call = LoadAdapter(name, self._known[name].path, name in self._pinned, replaces=True)
            try:
                await self._client.control(call, timeout_s=LOADING_TIMEOUT_S)
            except HeadraceError as error:
                logger.warning("adapter %r could not be loaded again: %s", name, error)
                await self._find_out(name)


async def _read_digests(replica: Replica) -> dict[str, str]:
    """Digests of a replica's adapters by name, without those that drain."""
    infos = msgspec.convert(await replica.call(ListAdapters.method), list[AdapterInfo])
    return {info.name: info.digest for info in infos if not info.is_draining}
