"""`meet_workers`: from started workers to a ready `Engine`; `build_rank`: to the executor of a worker. Both lead to
torch, as service/build does.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil
import torch

from headrace.base import env
from headrace.base.config import EngineConfig
from headrace.base.messages import Place
from headrace.base.registry import start_plugins
from headrace.execution.building import build_executor
from headrace.execution.device import resolve_device
from headrace.execution.executor import LocalExecutor
from headrace.parallel.group import Rendezvous, find_store, serve_rendezvous
from headrace.parallel.layout import Layout
from headrace.parallel.ranks import Ranks, join_ranks, join_replicas
from headrace.service.build import assemble_engine, build_rank_0, prepare_process
from headrace.service.engine import Engine
from headrace.service.executor import Progress
from headrace.service.ranks.commands import Assignment
from headrace.service.ranks.executor import RankedExecutor
from headrace.service.ranks.gate import BoardGate, StepGate
from headrace.service.ranks.launch import LOOPBACK
from headrace.service.ranks.wire import find_fingerprint
from headrace.service.ranks.workers import Workers


def meet_workers(
    config: EngineConfig, progress: Progress, workers: Workers, place: Place, resources: ExitStack,
    note_abort: Callable[[Callable[[], None]], None],
) -> Engine:
    """Meet the workers and build the engine with rank 0, whose place on this machine is ``place``. ``resources`` are
    closed with the engine, and ``note_abort`` gets what has this process no longer wait for another rank."""
    prepare_process()
    gate = BoardGate(config.board, config.replica) if config.parallel.shares_experts else StepGate()
    store, port = _open_store(config, gate, config.parallel.num_ranks)
    workers.assign(port)
    _use_network(workers.num_hosts, workers.address)
    progress("meeting the other ranks", 0.0)
    ranks = _join(config, 0, place, store)
    note_abort(ranks.tensor.waits.abort)
    resources.callback(ranks.close)
    with ranks.tensor.waits.patient():
        executor = build_rank_0(config, workers.note_progress(progress), ranks, place)
    progress("waiting for the other ranks", 1.0)
    workers.await_ready()
    ranked = RankedExecutor(executor, workers, resources, gate)
    if config.disaggregation.disaggregation_mode is not None:
        from headrace.service.transfer.build import OtherRanks, assemble_role

        return assemble_role(executor, find_fingerprint(config), OtherRanks(ranked, ranked, ranked.regions))
    return assemble_engine(ranked, ranked)


def build_rank(assignment: Assignment, progress: Progress) -> LocalExecutor:
    """In a worker: meet the other ranks and build this one's executor."""
    config, rank, size, place = assignment.config, assignment.rank, assignment.size, assignment.place
    start_plugins()
    progress("meeting the other ranks", 0.0)
    _use_network(assignment.num_hosts, assignment.address)
    store = find_store(Rendezvous(assignment.address, assignment.port), _count(config, size))
    ranks = _join(config, rank, place, store)
    with ranks.tensor.waits.patient():
        return build_executor(config, progress, ranks, place)


def _count(config: EngineConfig, size: int) -> int:
    """The ranks that meet: those of a replica, or of all."""
    return size * config.parallel.data_parallel_size if config.parallel.shares_experts else size


def _open_store(config: EngineConfig, gate: StepGate, size: int) -> tuple[Any, int]:
    """The store where ranks meet, and its port. Where replicas meet too, the first one opens it."""
    count = _count(config, size)
    if isinstance(gate, BoardGate) and config.replica:
        return find_store(Rendezvous(LOOPBACK, gate.port), count), gate.port
    store, rendezvous = serve_rendezvous(LOOPBACK, count)
    if isinstance(gate, BoardGate):
        gate.port = rendezvous.port
    return store, rendezvous.port


def _join(config: EngineConfig, rank: int, place: Place, store: Any) -> Ranks:
    """Meet the other ranks, those of all replicas where they divide experts."""
    parallel, device = config.parallel, _device_of(config, place)
    layout = Layout(rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    if parallel.shares_experts:
        return join_replicas(layout, config.replica, parallel.data_parallel_size, device, store)
    return join_ranks(layout, device, store)


def _use_network(num_hosts: int, address: str) -> None:
    """Have collectives between hosts use the network that leads to rank 0."""
    if num_hosts > 1 and (name := find_interface(address)) is not None:
        env.use_interface(name)


def find_interface(address: str) -> str | None:
    """The network interface over which an address is reached; None where that cannot be told."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        own = ipaddress.ip_address(probe.getsockname()[0])
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == family and own in _network_of(entry.address, entry.netmask):
                return str(name)
    return None


def _network_of(address: str, mask: str | None) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    # loopback alone has other addresses than the one that is listed
    plain = address.partition("%")[0]
    is_whole = mask is not None and ipaddress.ip_address(plain).is_loopback and ":" not in plain
    return ipaddress.ip_network(f"{plain}/{mask}" if is_whole else plain, strict=False)


def _device_of(config: EngineConfig, place: Place) -> torch.device:
    return resolve_device(config.device.device, place.index, config.parallel)
