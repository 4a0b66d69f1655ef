"""`read_model`: all that a model's configuration says, before anything is built. `check_layout`: whether ranks can
divide it. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.base.config import EngineConfig, ModelConfig
from headrace.base.parallel import ParallelConfig
from headrace.layers.spec import DecoderSpec
from headrace.models.catalog import find_family
from headrace.models.config_fields import explain_errors
from headrace.models.family import Family
from headrace.models.pooling import PoolingPlan, config_for, plan_pooling, read_task
from headrace.models.source import ModelSource, resolve_source
from headrace.parallel.division import Divisible, Division
from headrace.parallel.layout import divide_layers, read_division


def read_model(model: ModelConfig) -> tuple[ModelSource, Family, Any, PoolingPlan | None]:
    """Its source, its family, that family's spec of it, and how it pools. Raises `ModelError` and `ConfigError`."""
    source = resolve_source(model)
    family = find_family(source.architecture)
    task = read_task(source, family, model.task)
    with explain_errors(f"the configuration of {source.path}"):
        return source, family, family.read_config(config_for(source, task)), plan_pooling(source, family, task)


def check_layout(config: EngineConfig) -> None:
    """Raise `ConfigError` for a model that the ranks of a configuration cannot divide, and what `read_model` raises."""
    _, _, spec, _ = read_model(config.model)
    if isinstance(spec, Divisible):
        spec.check_division(Division.of(config.parallel))
    count_layers(spec, config.parallel, [1] * spec.num_layers)


def count_layers(spec: Any, parallel: ParallelConfig, weights: Sequence[int], head: int = 0) -> list[int]:
    """The layers of each pipeline stage: as stated, or by ``weights`` as `divide_layers` does it. Raises
    `ConfigError`."""
    stages, stated = parallel.pipeline_parallel_size, parallel.pipeline_layers
    if stated is not None:
        return read_division(stated, spec.num_layers, stages)
    begins = spec.stage_begins if isinstance(spec, DecoderSpec) else None
    return divide_layers(weights, head, stages, begins)
