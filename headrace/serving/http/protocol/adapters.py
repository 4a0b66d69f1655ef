"""Requests and responses of the routes that load and unload LoRA adapters."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.base.adapters import AdapterInfo

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The adapter to load, from a path inside ``--lora-folders`` (vLLM's form). ``load_inplace`` replaces one of the
    same name; ``pinned`` keeps it on the device."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = None
    pinned: bool | None = None


class LoadTensorsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The adapter to load, as the content of adapter_model.safetensors (``tensors``, base64) and of
    adapter_config.json (``config_dict``)."""

    lora_name: AdapterName
    tensors: bytes
    config_dict: dict[str, Any]
    load_inplace: bool | None = None
    pinned: bool | None = None


class UnloadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The adapter to unload. ``lora_int_id``: of vLLM's clients; no effect."""

    lora_name: AdapterName
    lora_int_id: int | None = None


class AdapterResponse(Struct):
    """The outcome, and what the engine says of the adapter. ``digest`` is of its content, ``num_bytes`` in host
    memory."""

    success: bool
    message: str
    adapter: AdapterInfo


class AdapterList(Struct):
    """The loaded adapters."""

    adapters: list[AdapterInfo]

