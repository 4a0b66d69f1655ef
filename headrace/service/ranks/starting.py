"""`build_ranked_engine`: from configuration to a ready `Engine` of as many ranks as it states. Torch-free itself:
workers are started first, so that all ranks import torch at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from headrace.base.config import EngineConfig
from headrace.base.errors import HeadraceError
from headrace.kernels.early import start_early
from headrace.models.reading import check_layout
from headrace.parallel.early import compile_collectives
from headrace.service.ending import end_with
from headrace.service.engine import Engine
from headrace.service.executor import Progress
from headrace.service.ranks.launch import Launcher, LocalLauncher
from headrace.service.ranks.nodes import NodeLauncher
from headrace.service.ranks.wire import find_fingerprint
from headrace.service.ranks.workers import Workers


def build_ranked_engine(config: EngineConfig, progress: Progress) -> Engine:
    """Start the workers of the other ranks, if there are any, meet them, and build the engine; raises the typed errors
    of base/errors."""
    if config.device.device != "cpu":
        start_early()
        if config.parallel.tensor_parallel_size > 1:
            compile_collectives(config.parallel.tensor_parallel_size)
    size = config.parallel.num_ranks
    launcher = choose_launcher(config, size, progress)
    if size == 1 and not config.parallel.shares_experts:
        if config.disaggregation.disaggregation_mode is not None:
            from headrace.service.transfer.build import build_role_engine

            return build_role_engine(config, progress, find_fingerprint(config))
        from headrace.service.build import build_engine

        return build_engine(config, progress)
    check_layout(config)  # before other processes are started, or waited for
    aborts = list[Callable[[], None]]()

    def fail(error: HeadraceError) -> None:
        for abort in aborts:
            abort()  # or the device would wait for the dead rank while this process ends
        end_with(error)

    workers, resources = Workers(config, size, launcher, on_failure=fail), ExitStack()
    with ExitStack() as undo:
        undo.callback(resources.close)
        undo.callback(workers.close)
        undo.callback(workers.explain)  # called first: raises the error of a worker instead
        from headrace.service.ranks.build import meet_workers

        engine = meet_workers(config, progress, workers, launcher.place, resources, aborts.append)
        undo.pop_all()  # it stands
    return engine


def choose_launcher(config: EngineConfig, size: int, progress: Progress) -> Launcher:
    """The way to start ranks that the configuration asks for; raises `ConfigError` where they cannot be placed."""
    if config.nodes.nnodes > 1:
        return NodeLauncher(config, size, progress)
    if config.nodes.executor == "ray" and size > 1:
        from headrace.service.ranks.on_ray import RayLauncher

        return RayLauncher(config, size, progress)
    return LocalLauncher(config, size)
