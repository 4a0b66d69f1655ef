"""`build_app`: the Ray Serve application: a gateway that takes HTTP, and engines that Ray starts, scales and
replaces."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headrace.base import env
from headrace.base.config import ENGINE_SECTIONS, SECTIONS, EngineConfig, all_options, build_sections
from headrace.base.errors import ConfigError
from headrace.base.option import OptionInfo, Section, option, options_of
from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.service.cluster import ReplicaPlan, Resources, require_ray
from headrace.serving.ray.engine import EngineReplica, EngineSetup
from headrace.serving.ray.gateway import Gateway

ROUTER = "headrace.serving.ray.router:CacheAwareRouter"
GRACE_S = 10.0
"""Beyond ``drain_s``, for an engine to end."""
WORDS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(Section):
    """How many engines there are. Ray Serve adds one while there are more than ``target_ongoing_requests`` per engine,
    and drains one while there are less."""

    min_replicas: int = option(1, "engines that are always there", low=1)
    max_replicas: int = option(8, "engines under load", low=1)
    target_ongoing_requests: float = option(64.0, "requests in progress per engine that Ray Serve aims at", low=0.1)
    max_ongoing_requests: int = option(1024, "requests in progress per engine; more wait in the gateway", low=1)
    upscale_delay_s: float = option(30.0, "seconds of more load before an engine is added", low=0.0)
    downscale_delay_s: float = option(600.0, "seconds of less load before an engine is drained", low=0.0)
    num_gateways: int = option(1, "processes that take HTTP; each routes by the prefixes it has seen", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas must be at least min_replicas, {self.min_replicas}; got {self.max_replicas}",
                param="max_replicas"
            )


def build_app(args: dict[str, Any]) -> Any:
    """The application: engine and server options of ``headrace serve`` and those of `ScaleOptions` by name, as values
    or as text. Raises `ConfigError` for an unknown one, and for what does not go together on Ray."""
    require_ray()
    from ray import serve

    scale, setup = read_arguments(args)
    engine = plan_engine(setup.config)
    grace_s = setup.server.drain_s + GRACE_S
    engines = serve.deployment(EngineReplica, name="engine").options(
        ray_actor_options={"num_cpus": engine.own.num_cpus, "num_gpus": engine.own.num_gpus},
        placement_group_bundles=engine.bundles, placement_group_strategy="PACK",
        max_ongoing_requests=scale.max_ongoing_requests,
        autoscaling_config={
            "min_replicas": scale.min_replicas, "max_replicas": scale.max_replicas,
            "target_ongoing_requests": scale.target_ongoing_requests, "upscale_delay_s": scale.upscale_delay_s,
            "downscale_delay_s": scale.downscale_delay_s,
        },
        request_router_config={
            "request_router_class": ROUTER,
            "request_router_kwargs": {"policy": setup.config.parallel.data_parallel_policy},
        },
        graceful_shutdown_timeout_s=grace_s, graceful_shutdown_wait_loop_s=0.5,
    )
    gateways = serve.deployment(serve.ingress(_Dispatch())(Gateway), name="gateway").options(
        num_replicas=scale.num_gateways, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=grace_s, graceful_shutdown_wait_loop_s=0.5,
    )
    return gateways.bind(engines.bind(msgspec.msgpack.encode(setup)), setup.server.max_body_bytes)


def plan_engine(config: EngineConfig) -> ReplicaPlan:
    """The resources of an engine: on one node, or with executor ray on as many nodes as its ranks need."""
    is_cpu, threads = config.device.device == "cpu", config.device.threads or 1
    return ReplicaPlan(config, Resources(threads, 0.0 if is_cpu else 1.0), config.parallel.num_ranks)


def read_arguments(args: dict[str, Any]) -> tuple[ScaleOptions, EngineSetup]:
    """The options of ``args``; see `build_app`."""
    scaling = {info.name: info for info in options_of(ScaleOptions, "scale")}
    known = {info.name: info for info in all_options()} | scaling
    values = {name: _read_value(known[name], value) if name in known else value for name, value in args.items()}
    for name in ("host", "port", "root_path"):
        if name in values:
            raise ConfigError(f"{name} is Ray Serve's: set it in http_options or route_prefix", param=name)
    scale = ScaleOptions(**{name: values.pop(name) for name in scaling if name in values})
    sections = build_sections(values, tuple(SECTIONS))
    config = EngineConfig(**{name: sections[name] for name in ENGINE_SECTIONS})
    server: ServerConfig = sections["server"]
    # Not a loopback address: behind Ray's proxies every client might look local, and admin routes would be open.
    server = replace(server, host="0.0.0.0", api_key=server.api_key if server.api_key is not None else env.api_key())
    operations: OperationsConfig = sections["operations"]
    _check(config, server, scale)
    return scale, EngineSetup(config, server, operations, env.log_level())


def _check(config: EngineConfig, server: ServerConfig, scale: ScaleOptions) -> None:
    if config.device.device not in ("auto", "cpu", "cuda"):
        raise ConfigError("device is cpu, cuda or auto on Ray, which chooses the GPUs", param="device")
    if config.device.device == "cpu" and config.device.threads is None:
        raise ConfigError("with device cpu, threads is needed: the cores of an engine", param="threads")
    if config.nodes.nnodes > 1:
        raise ConfigError("the hosts are those of the Ray cluster: set executor to ray instead", param="nnodes")
    if config.parallel.data_parallel_size > 1:
        raise ConfigError("Ray Serve makes the replicas: set min_replicas and max_replicas", param="data_parallel_size")
    if server.responses_store and scale.max_replicas > 1:
        raise ConfigError(
            "responses are stored in the engine's process, and the next request may reach another: set max_replicas to "
            "1, or responses_store to 0", param="responses_store"
        )


def _read_value(info: OptionInfo, value: Any) -> Any:
    """A value that may be text, as of ``serve run``."""
    if isinstance(value, dict) and info.metavar == "JSON":
        return json.dumps(value)
    if not isinstance(value, str) or info.type is str:
        return value
    if info.optional and value.lower() == "none":
        return None
    try:
        return WORDS[value.lower()] if info.type is bool else info.type(value)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{info.name} takes a {info.type.__name__}, got {value!r}", param=info.name) from error


class _Dispatch:
    """An ASGI application that passes requests to the gateway of this process."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        from ray import serve

        await serve.get_replica_context().servable_object.forward(scope, receive, send)
