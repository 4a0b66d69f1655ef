"""LoRA adapters as all processes know them: how a request names one, the options, the admin calls and their results.

Refuses: tensors, and the format of adapter files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.option import Section, option, split_list

DEFAULT_CPU_LORAS = 32


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by the name under which requests choose it. ``path``: its folder or file; empty for one that is loaded
    already."""

    name: str
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Section):
    """LoRA adapters, served beside the model that they were trained for."""

    enable_lora: bool = option(False, "serve LoRA adapters of the model; memory for max_loras of them is set aside")
    lora_modules: str = option(
        "",
        "adapters to load at the start, each as name=path or as JSON, {\"name\": ..., \"path\": ...}; a path is a "
        "folder of PEFT, a GGUF file or a name on the Hugging Face hub",
        metavar="NAME=PATH ..."
    )
    max_loras: int = option(
        8, "adapters on the device at a time, and so different ones in a step; others wait in host memory", low=1,
        high=1024
    )
    max_lora_rank: int = option(16, "largest rank of an adapter; memory is set aside for it", low=1, high=512)
    max_cpu_loras: int | None = option(
        None, "adapters in host memory at a time; others are read again when they are used; default: 32, or max_loras "
        "if that is more", low=1
    )
    lora_folders: str = option(
        "",
        "comma-separated folders from which adapters may be loaded while the server runs; the word hub allows names on "
        "the Hugging Face hub; default: none",
        metavar="FOLDERS"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [module.name for module in self.modules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if names and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora", param="lora_modules")
        if twice:
            raise ConfigError(f"lora_modules names {', '.join(twice)} twice", param="lora_modules")

    @property
    def modules(self) -> list[LoRARequest]:
        """The adapters of ``lora_modules``; raises `ConfigError`."""
        text = self.lora_modules.strip()
        modules: list[LoRARequest] = []
        while text:  # several arguments of a command line, each in one of the forms
            if text.startswith(("[", "{")):
                found, text = _read_json(text)
                modules += found
                continue
            item, *rest = text.split(maxsplit=1)
            name, _, path = item.partition("=")
            if not name or not path:
                raise ConfigError(f"lora_modules takes name=path, got {item!r}", param="lora_modules")
            modules.append(LoRARequest(name, path))
            text = rest[0] if rest else ""
        return modules

    @property
    def num_host_adapters(self) -> int:
        """Adapters in host memory at a time."""
        return max(self.max_loras, self.max_cpu_loras or DEFAULT_CPU_LORAS)

    @property
    def num_slots(self) -> int:
        """Adapters on the device at a time; 0 where none are served."""
        return self.max_loras if self.enable_lora else 0

    @property
    def folders(self) -> list[str]:
        """The entries of ``lora_folders``."""
        return split_list(self.lora_folders)


def _read_json(text: str) -> tuple[list[LoRARequest], str]:
    """The adapters of the object or list that a text begins with, and what follows it."""
    try:
        stated, end = json.JSONDecoder().raw_decode(text)
        entries: list[Any] = stated if isinstance(stated, list) else [stated]
        found = [msgspec.convert({"name": entry["name"], "path": entry["path"]}, LoRARequest) for entry in entries]
        return found, text[end:].strip()
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"lora_modules takes name=path or JSON objects with \"name\" and \"path\": {error}", param="lora_modules"
        ) from error


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter that is loaded. ``digest``: SHA-256 of its content, in hex; ``num_bytes``: in host memory;
    ``is_resident``: it is on the device; ``is_draining``: unloaded, with requests that still use it; ``num_requests``:
    running or waiting ones; ``modules``: last parts of the names of adapted modules, such as ``q_proj``."""

    name: str
    path: str
    digest: str
    rank: int
    num_bytes: int
    is_pinned: bool = False
    is_resident: bool = False
    is_draining: bool = False
    num_requests: int = 0
    modules: list[str] = []


class AdapterStats(msgspec.Struct, frozen=True):
    """Adapters of one engine: how many are loaded, how many of these are on the device, how often one was put there and
    how often another had to go for it; requests with a row and without one, by name."""

    num_loaded: int = 0
    num_resident: int = 0
    loads_total: int = 0
    evictions_total: int = 0
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}


class LoadAdapter(msgspec.Struct, frozen=True):
    """Read an adapter into host memory, from ``path`` or from ``tensors``: the bytes of a safetensors file, with
    ``config`` the text of adapter_config.json. The reply is its `AdapterInfo`. It is put on the device when a request
    needs it. A name that is taken is a `Conflict` unless ``replaces``: requests that have begun then end with the old
    weights, new ones get the new. ``previous``: where the replaced one came from, by which a load that fails on some of
    several engines is undone on the others; without it, or where the files are the same, all unload the adapter."""

    method: ClassVar[str] = "load_adapter"
    name: str
    path: str = ""
    is_pinned: bool = False
    replaces: bool = False
    tensors: bytes = b""
    config: str = ""
    previous: str = ""


class UnloadAdapter(msgspec.Struct, frozen=True):
    """Refuse new requests for an adapter at once, and free it when those that have begun end. The reply is its
    `AdapterInfo`."""

    method: ClassVar[str] = "unload_adapter"
    name: str


class PinAdapter(msgspec.Struct, frozen=True):
    """Keep an adapter on the device once it is there, or no longer. The reply is its `AdapterInfo`; a `Conflict` where
    no place would be left for others."""

    method: ClassVar[str] = "pin_adapter"
    name: str
    is_pinned: bool = True


class ListAdapters(msgspec.Struct, frozen=True):
    """The reply is a list of `AdapterInfo`."""

    method: ClassVar[str] = "list_adapters"


AdapterCall = LoadAdapter | UnloadAdapter | PinAdapter | ListAdapters


class AdapterFacts(msgspec.Struct, frozen=True):
    """What the engine knows of an adapter that was read; see `AdapterInfo`."""

    digest: str
    rank: int
    num_bytes: int
    modules: list[str] = []
