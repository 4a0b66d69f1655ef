"""Requests and responses of the admin, control and health routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.base.admin import DevicePart


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The request to abort: ``rid``, or all with ``abort_all``."""

    rid: Annotated[str, Meta(max_length=128)] | None = None
    abort_all: bool | None = None
    abort_message: Annotated[str, Meta(max_length=1024)] | None = None  # SGLang's field; no effect


class AbortResponse(Struct):
    """The number of running requests that were aborted."""

    aborted: int


class ReplicaInfo(Struct):
    """One replica: its state, process, restarts within ten minutes, device and counters."""

    replica: int
    state: str
    pid: int | None
    num_restarts: int
    device: str | None
    stats: dict[str, Any]


class ServerInfo(Struct):
    """Options, model facts, memory plan (bytes) and counters of this server; all but options summed over replicas."""

    version: str
    state: str
    served_model_name: str
    max_total_num_tokens: int | None
    num_inflight: int
    model: dict[str, Any] | None
    memory: list[dict[str, Any]]
    stats: dict[str, Any]
    options: dict[str, Any]
    replicas: list[ReplicaInfo]
    disaggregation_bootstrap_port: int | None = None


class ModelInfo(Struct):
    """Facts of the model, in SGLang's form."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    architectures: list[str]
    model_type: str
    max_model_len: int
    dtype: str
    device: str
    num_parameters: int
    preferred_sampling_params: dict[str, float]
    has_image_understanding: bool
    has_audio_understanding: bool
    weight_version: str = "default"


class ReplicaHealth(Struct):
    """Health of one replica, with the progress of its start."""

    replica: int
    state: str
    stage: str
    progress: float


class State(Struct):
    """Health and readiness; of each replica too, if there are several."""

    status: str
    engine: str
    stage: str | None = None
    progress: float | None = None
    replicas: list[ReplicaHealth] | UnsetType = UNSET


class Version(Struct):
    """The version of Headrace."""

    version: str


class PauseRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """``abort`` aborts all running requests; ``in_place`` keeps them."""

    mode: Literal["abort", "in_place"] | None = None


class MemoryRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Parts of the device memory; default: all."""

    tags: Annotated[list[DevicePart], Meta(max_length=16)] | None = None


class UpdateWeightsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint with the served model's shapes; default: the served model's own files. The cache is always flushed,
    so ``flush_cache`` may not be false."""

    model_path: Annotated[str, Meta(max_length=4096)] | None = None
    load_format: Literal["auto", "safetensors", "gguf"] | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None
    weight_version: Annotated[str, Meta(max_length=256)] | None = None


class ProfileRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Profiles ``num_steps`` steps, or until ``/stop_profile``. The CPU is always recorded, the device unless
    ``activities`` excludes it."""

    num_steps: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    activities: Annotated[list[Literal["CPU", "GPU", "CUDA"]], Meta(max_length=8)] | None = None


class SleepState(Struct):
    """Whether the engine sleeps."""

    is_sleeping: bool


class PauseState(Struct):
    """Whether generation is paused."""

    is_paused: bool


class UpdateWeightsResponse(Struct):
    """The outcome of a weight update, and how many running requests continue with the new weights."""

    success: bool
    message: str
    num_paused_requests: int


class AdminResponse(Struct):
    """The outcome of an admin action."""

    success: bool
    message: str


class Load(Struct):
    """The load of one engine. ``token_usage`` is the share of KV memory held by running requests."""

    # SGLang's names; the rank is the replica's.
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class ServerLoad(Struct):
    """The number of requests that the server works on (vLLM's form)."""

    server_load: int


class Loads(Struct):
    """The load of all engines of this server; ``timestamp`` in seconds."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[Load]
