"""`OfflineAdapters`: the LoRA adapters of an offline `LLM`. Importing this does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.base.adapters import AdapterInfo, ListAdapters, LoadAdapter, LoRARequest, UnloadAdapter
from headrace.base.errors import Conflict, NotFound, RequestError, UnsupportedFeature
from headrace.base.registry import load_target
from headrace.service.client.adapters import check_name

if TYPE_CHECKING:
    from headrace.service.client.local import LocalClient
    from headrace.service.client.replicated import ReplicatedClient

    OfflineClient = LocalClient | ReplicatedClient

TENSOR_PACKER = "headrace.models.weights.safetensors_file:pack_tensors"
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or that of each; None: the base model."""


class OfflineAdapters:
    """Adapters by name. They stay loaded until they are unloaded; a `LoRARequest` loads one that is not."""

    def __init__(self, client: OfflineClient):
        self._client = client
        self._known: dict[str, LoRARequest] = {module.name: module for module in client.config.adapters.modules}

    @property
    def names(self) -> list[str]:
        """The loaded adapters."""
        return list(self._known)

    def load(
        self, name: str, path: str | os.PathLike[str] | None = None, *,
        tensors: bytes | Mapping[str, Any] | None = None, config: str | Mapping[str, Any] | None = None,
        is_pinned: bool = False, replaces: bool = False
    ) -> AdapterInfo:
        """Load an adapter from ``path`` (a folder of PEFT, a GGUF file, or a name on the hub), or from ``tensors`` by
        their names in adapter_model.safetensors (or that file's bytes) and ``config``, the content of
        adapter_config.json. ``is_pinned`` keeps it on the device. Raises `Conflict` for a name that is loaded unless
        ``replaces``: running requests then end with the old weights."""
        self._require_enabled()
        check_name(name)
        if name in self._known and not replaces:
            raise Conflict(f"an adapter {name!r} is loaded; unload it, or load with replaces=True", param="name")
        if (path is None) == (tensors is None):
            raise RequestError("give either path or tensors", param="path")
        if tensors is None:
            call = LoadAdapter(name, os.fspath(path or ""), is_pinned, replaces)
        else:
            packed = tensors if isinstance(tensors, bytes) else load_target(TENSOR_PACKER)(tensors)
            call = LoadAdapter(name, "", is_pinned, replaces, packed, _config_text(config))
        if name in self._known:
            call = msgspec.structs.replace(call, previous=self._known[name].path)
        info = msgspec.convert(self._client.administer(call), AdapterInfo)
        self._known[name] = LoRARequest(name, call.path)
        return info

    def unload(self, name: str) -> AdapterInfo:
        """Unload an adapter when the requests that use it have ended. Raises `NotFound`."""
        self._require_enabled()
        if name not in self._known:
            raise NotFound(f"no adapter {name!r} is loaded; there are {', '.join(self._known) or 'none'}", param="name")
        info = msgspec.convert(self._client.administer(UnloadAdapter(name)), AdapterInfo)
        del self._known[name]
        return info

    def describe(self) -> list[AdapterInfo]:
        """The loaded adapters, as the engine describes them."""
        self._require_enabled()
        return msgspec.convert(self._client.administer(ListAdapters()), list[AdapterInfo])

    def choose(self, requests: LoRARequests, count: int) -> list[str]:
        """The adapter's name for each of ``count`` prompts, empty for the base model. Loads those that are not."""
        if requests is None:
            return [""] * count
        each = [requests] * count if isinstance(requests, LoRARequest) else list(requests)
        if len(each) != count:
            raise RequestError(f"lora_request has {len(each)} entries for {count} prompts", param="lora_request")
        for request in dict.fromkeys(each):
            self._make_ready(request)
        return ["" if request is None else request.name for request in each]

    def _make_ready(self, request: LoRARequest | None) -> None:
        if request is None:
            return
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request is a LoRARequest, or a list with one or None for each prompt; got {request!r:.80}",
                param="lora_request"
            )
        self._require_enabled()
        known = self._known.get(request.name)
        if known is None and not request.path:
            raise NotFound(
                f"no adapter {request.name!r} is loaded; give its path: LoRARequest(name, path)", param="lora_request"
            )
        if known is None:
            self.load(request.name, request.path)
        elif request.path and request.path != known.path:
            raise Conflict(
                f"adapter {request.name!r} was loaded from {known.path or 'tensors'}, not from {request.path}; choose "
                "another name, or load it with load_adapter(..., replaces=True)", param="lora_request"
            )

    def _require_enabled(self) -> None:
        if not self._client.config.adapters.enable_lora:
            raise UnsupportedFeature("adapters are not served: set enable_lora=True", param="enable_lora")


def _config_text(config: str | Mapping[str, Any] | None) -> str:
    if config is None:
        raise RequestError("tensors need config, the content of adapter_config.json", param="config")
    return config if isinstance(config, str) else json.dumps(dict(config))
