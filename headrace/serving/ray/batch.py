"""`run_batch_on_ray`: a batch from files to parts, answered by the replicas of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError
from headrace.service.cluster import joined_cluster, plan_replica, require_ray
from headrace.serving.batch import Tally, write_error
from headrace.serving.ray.files import PARQUET, SUFFIXES, Source, require_pyarrow
from headrace.serving.ray.pool import ReplicaPool
from headrace.serving.ray.replica import ReplicaSetup, ShardResult
from headrace.serving.ray.shards import Manifest, Plan, Shard, read_shards

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], AbstractContextManager[Callable[[int], None]]]
"""Called with the number of lines and how many were completed before; the callable takes how many more are."""


@dataclass(frozen=True)
class RayBatch:
    """``num_replicas`` None: as many as fit. ``output_format`` auto: that of the input. ``address`` None: see
    `joined_cluster`."""

    num_replicas: int | None
    shard_size: int
    output_format: str
    address: str | None
    served_model_name: str | None
    log_level: str


@dataclass(frozen=True)
class RayTally:
    """``total``: lines completed by this run. ``num_before``: by earlier ones. ``num_given_up``: lines of shards that
    lost every replica that they were given to."""

    total: Tally
    num_before: int
    num_given_up: int


def run_batch_on_ray(
    source: Path, folder: Path, config: EngineConfig, options: RayBatch, progress: Progress
) -> RayTally:
    """Complete the lines of ``source`` (a file, or a folder of files) in parts in ``folder``. Raises `ConfigError` for
    files and clusters that cannot be used, and what `ReplicaPool.run` raises."""
    require_ray()
    found = Source.find(source)
    output_format = found.format if options.output_format == "auto" else options.output_format
    if PARQUET in (found.format, output_format):
        require_pyarrow()
    if folder.is_file() or (folder.suffix in SUFFIXES and not folder.exists()):
        raise ConfigError(
            f"with executor ray the output is a folder of parts, not a file such as {folder}; name a folder",
            param="output"
        )
    plan = Plan(
        input=[(str(name), int(size)) for name, size in found.describe()], num_lines=found.count(),
        shard_size=options.shard_size, output_format=output_format
    )
    with contextlib.closing(Manifest(folder, plan)) as manifest:
        num_before = sum(entry.num_records for entry in manifest.entries.values())
        with progress(plan.num_lines, num_before) as advance:
            if num_before == plan.num_lines:
                return RayTally(Tally(), num_before, 0)
            with joined_cluster(options.address):
                return _answer(found, manifest, config, options, advance)


def _answer(
    source: Source, manifest: Manifest, config: EngineConfig, options: RayBatch, advance: Callable[[int], None]
) -> RayTally:
    """Answer the shards that the manifest lacks."""
    planned = plan_replica(config)
    setup = msgspec.msgpack.encode(ReplicaSetup(planned.config, options.served_model_name, options.log_level))
    num_before = sum(entry.num_records for entry in manifest.entries.values())
    total, num_given_up = Tally(), 0
    shards = read_shards(source, manifest.plan.shard_size, set(manifest.entries))
    with ReplicaPool(setup, planned, options.num_replicas) as pool:
        for shard, result in pool.run(shards):
            if result.error is not None:
                logger.error("shard %d is given up: %s", shard.number, result.error.message)
                num_given_up += len(shard.items)
                continue
            num_failed = _save(manifest, shard, result)
            total.completed += len(shard.items)
            total.failed += num_failed
            advance(len(shard.items))
    return RayTally(total, num_before, num_given_up)


def _save(manifest: Manifest, shard: Shard, result: ShardResult) -> int:
    """Write the records of a shard; returns how many have an error."""
    invalid = [write_error(item) for item in shard.items if item.line is None]
    num_failed = len(invalid) + result.num_failed
    manifest.save(shard.number, b"".join([*invalid, result.records]), num_failed)
    return num_failed
