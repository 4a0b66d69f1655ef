"""Options of the device, and of several devices and hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from headrace.base.errors import ConfigError
from headrace.base.option import Section, option, read_object, suggest

_DEVICES = ("auto", "cpu", "cuda")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")
EPLB = "eplb_config"


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(Section):
    """The device and its kernels."""

    device: str = option("auto", "cpu, cuda, or cuda:N; auto: a GPU if there is one")
    attention_backend: str = option(
        "auto", "attention implementation; auto: the fastest that supports the model", metavar="NAME"
    )
    moe_experts: str = option(
        "auto",
        "implementation of mixture-of-experts layers; auto: the fastest that supports the model",
        metavar="NAME"
    )
    threads: int | None = option(None, "CPU threads for the model; default: physical cores", low=1, high=1024)
    graphs: str = option(
        "on",
        "CUDA graph capture: on: all graphs before the first request; lazy: on first use or when idle; off (no effect "
        "on a CPU)",
        choices=("on", "lazy", "off")
    )
    check_finite: bool = option(True, "fail a request whose logits are not finite instead of returning noise")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _DEVICE.fullmatch(self.device):
            hint = suggest(self.device, _DEVICES)
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N; got {self.device!r}{hint}", param="device")


@dataclass(frozen=True, kw_only=True)
class BalancingOptions(Section):
    """When experts move between ranks, and how many copies there are: the JSON object of ``--eplb-config``, with the
    keys of vLLM (expert-parallel load balancing)."""

    step_interval: int = option(3000, "steps between two looks at the loads of experts", low=1)
    window_size: int = option(1000, "steps before a look whose loads count", low=1)
    num_redundant_experts: int = option(
        0, "second copies of busy experts, in each layer; with the experts a multiple of the ranks", low=0, high=65536
    )
    log_balancedness: bool = option(False, "log at each look how evenly the ranks are loaded")


def parse_eplb_config(text: str | None) -> BalancingOptions:
    """The options of ``--eplb-config``; raises `ConfigError` naming what is wrong and what is known."""
    if not text:
        return BalancingOptions()
    stated = read_object(text, EPLB, example='{"num_redundant_experts": 8}')
    known = [item.name for item in fields(BalancingOptions)]
    for name in stated:
        if name not in known:
            hint = suggest(name, known, otherwise=f"; known: {', '.join(known)}")
            raise ConfigError(f"{EPLB}: no key {name[:80]!r}{hint}", param=EPLB)
    try:
        return BalancingOptions(**stated)
    except ConfigError as error:
        raise ConfigError(f"{EPLB}: {error}", param=EPLB) from error


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Several devices."""

    tensor_parallel_size: int = option(
        1, "ranks that divide each layer among them, one device each (on a CPU: one part of the cores each)", low=1,
        high=64, alias="tp"
    )
    pipeline_parallel_size: int = option(
        1, "stages that each have some of the layers and compute at the same time, of tensor_parallel_size ranks each",
        low=1, high=64, alias="pp"
    )
    pipeline_layers: str | None = option(
        None, "layers of each stage, such as 15,17; default: such that the largest one is as small as possible",
        metavar="N,N"
    )
    enable_expert_parallel: bool = option(
        False,
        "divide a mixture's experts, whole ones, among the ranks of tensor_parallel_size and of all replicas of "
        "data_parallel_size, each of which has all of attention; default: each replica has all experts, each rank a "
        "part of each"
    )
    all2all_backend: str = option(
        "auto",
        "how tokens get to the ranks of their experts: all-gather (all to all ranks), all-to-all (each to its own), "
        "replicated (each rank of a replica has them); auto: the fastest for these ranks",
        metavar="NAME"
    )
    enable_eplb: bool = option(
        False, "move experts between ranks while serving, so that busy ones do not gather on one; loads are in /metrics"
    )
    eplb_config: str | None = option(
        None, "how, such as {\"num_redundant_experts\": 8, \"step_interval\": 3000, \"window_size\": 1000}; "
        "docs/parallel.md lists the keys", metavar="JSON"
    )
    data_parallel_size: int = option(
        1, "replicas of the engine, each on devices of its own (on a CPU: with its share of the cores)", low=1,
        high=1024, alias="dp"
    )
    data_parallel_policy: str = option(
        "cache-aware",
        "which replica gets a request: cache-aware (the longest known prefix, unless that replica is much busier), "
        "consistent-hash, least-loaded, round-robin, or that of an installed package",
        metavar="NAME"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, stages = self.pipeline_layers, self.pipeline_parallel_size
        if layers is not None and len(layers.split(",")) != stages:
            raise ConfigError(
                f"pipeline_layers has {len(layers.split(','))} numbers for the {stages} stages of "
                "pipeline_parallel_size; state one for each, or leave it out", param="pipeline_layers",
            )
        parse_eplb_config(self.eplb_config)
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ConfigError(
                "enable_eplb moves whole experts between ranks; set enable_expert_parallel too", param="enable_eplb"
            )
        if self.enable_expert_parallel and self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel divides experts among ranks, and there is one: set tensor_parallel_size (or "
                "data_parallel_size) to the number of devices, or leave enable_expert_parallel out",
                param="enable_expert_parallel",
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def describe_sizes(self) -> str:
        """What of it needs several devices, for messages: ``tensor_parallel_size 2 x data_parallel_size 2``."""
        names = (part.name for part in fields(self) if part.name.endswith("_parallel_size"))
        sizes = {name: getattr(self, name) for name in names}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)

    @property
    def balancing(self) -> BalancingOptions:
        """What ``eplb_config`` states, with defaults."""
        return parse_eplb_config(self.eplb_config)

    @property
    def shares_experts(self) -> bool:
        """Whether replicas divide experts among them, so that each of their steps needs all."""
        return self.enable_expert_parallel and self.data_parallel_size > 1


EXECUTORS = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class NodesConfig(Section):
    """Several hosts. Each has the same number of ranks, in order; host 0 serves, and on the others the same command
    with their ``node_rank`` starts theirs."""

    nnodes: int = option(1, "hosts that the ranks are on", low=1, high=1024)
    node_rank: int = option(0, "which of them this is; 0 serves, the others wait for its engine", low=0, high=1023)
    master_addr: str = option("127.0.0.1", "address of host 0, under which the others reach it", metavar="HOST")
    master_port: int = option(29500, "port of host 0 where the others connect", low=1, high=65535)
    node_token_file: str | None = option(
        None, "file with a secret, the same on all hosts, without which none may connect; needed with several",
        metavar="FILE"
    )
    executor: str = option(
        "local", "who starts processes: local: this machine and those of nnodes; ray: a Ray cluster places the ranks, "
        "or with headrace batch whole engines", choices=EXECUTORS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank counts from 0, so with nnodes {self.nnodes} it is at most {self.nnodes - 1}; got "
                f"{self.node_rank}", param="node_rank"
            )
        if self.nnodes > 1 and self.executor == "ray":
            raise ConfigError("with executor ray the hosts are those of the cluster; leave nnodes at 1", param="nnodes")
        if self.nnodes > 1 and not self.node_token_file:
            raise ConfigError(
                "several hosts need a shared secret: make a file with openssl rand -hex 32 > token, and give each host "
                "the same as --node-token-file token", param="node_token_file"
            )
