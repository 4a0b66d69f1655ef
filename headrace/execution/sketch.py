"""`kernels_ahead`: compile a model's kernels while its weights are read, found by the steps of a sketch of it: the same
layers, of which all weights of one shape share one memory.

Refuses: being right. Kernels that the model launches beyond those of its sketch are compiled as without one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn

from headrace.base.config import EngineConfig
from headrace.base.quantization import AS_STORED
from headrace.base.speculation import TEXT_METHODS
from headrace.execution.assembly import Assembly
from headrace.execution.loading import LoadedModel, Progress, ignore_progress, load_model
from headrace.execution.warmup import few_layers, prepare_steps
from headrace.kernels.precompile import compile_ahead
from headrace.layers.build import Build
from headrace.layers.quantization.coded import Storing, find_form
from headrace.layers.quantization.storage import EncodedWeight, find_storable
from headrace.models.source import ModelSource, resolve_source
from headrace.parallel.cut import has_memory, spare_of
from headrace.parallel.ranks import Ranks

SMALL = 0.01
"""Value of all floats of a sketch: results stay finite, and scales are not zero."""

Assemble = Callable[[LoadedModel], Assembly]


@contextmanager
def kernels_ahead(config: EngineConfig, device: torch.device, ranks: Ranks, assemble: Assemble) -> Iterator[None]:
    """A context for loading the model and its first steps, whose kernels are compiled in parallel with it. Does nothing
    if they were compiled before, or for models whose sketch would have other layers. ``assemble`` must not wait for
    other ranks."""
    source = resolve_source(config.model) if can_sketch(config, device) else None
    if source is None or not _has_known_form(source):
        yield
        return
    about = (
        source.config, config.model.dtype, config.model.max_model_len, config.scheduler, config.cache, config.device,
        config.adapters, config.parallel.tensor_parallel_size, config.parallel.enable_expert_parallel,
        config.parallel.data_parallel_size, config.parallel.enable_eplb, config.parallel.eplb_config,
    )
    with compile_ahead(
        lambda: run_sketch(config, device, ranks, assemble), f"sketch {msgspec.json.encode(about).decode()}", device
    ):
        yield


def can_sketch(config: EngineConfig, device: torch.device) -> bool:
    """Whether this start's model can be sketched by its configuration alone. A stage of layers, a drafter on the
    device, schemes that quantise at load and entries in host memory would be others, or taken twice."""
    return (
        device.type == "cuda" and config.parallel.pipeline_parallel_size == 1 and not config.cache.hot_slots
        and config.speculation.options.method in ("off", *TEXT_METHODS)
        and config.model.quantization in (None, AS_STORED) and config.model.task in ("auto", "generate")
    )


def _has_known_form(source: ModelSource) -> bool:
    """Whether it is known how the weights will be stored."""
    if source.kind == "gguf":
        return False
    return not source.quantization or find_form(source.quantization) is not None


def run_sketch(config: EngineConfig, device: torch.device, ranks: Ranks, assemble: Assemble) -> None:
    """Make a sketch and run its steps without other ranks. Called in a dry run."""
    with ranks.muted():
        loaded = load_model(config, device, ignore_progress, ranks, fill=lend_weights)
        with few_layers(loaded.model):
            prepare_steps(assemble(loaded))
    model = weakref.ref(loaded.model)
    del loaded
    if model() is not None:  # part of a cycle
        gc.collect()  # torch keeps the memory, for the model


@torch.no_grad()
def lend_weights(
    model: nn.Module, source: ModelSource, config: EngineConfig, build: Build, progress: Progress
) -> None:
    """Fill a model for steps that compute nothing of worth: all weights of one shape and dtype are one tensor. Coded
    ones get the form that the checkpoint's config.json states."""
    lent: dict[Any, torch.Tensor] = {}

    def lend(tensor: torch.Tensor) -> torch.Tensor:
        num_spare = spare_of(tensor)
        key = tuple(tensor.shape), tensor.dtype, num_spare
        if key not in lent:
            rows, *rest = tensor.shape or (1,)
            memory = torch.empty((rows + num_spare, *rest), dtype=tensor.dtype, device=build.device)
            _flatten(memory)
            lent[key] = memory[:rows].view(tensor.shape)
        return lent[key]

    for parameter in model.parameters():
        if has_memory(parameter):
            _flatten(parameter)
        else:
            parameter.data = lend(parameter)
    for module in model.modules():
        if isinstance(module, EncodedWeight):
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, nn.Buffer(lend(buffer), persistent=False))
            module.leave_as_it_is()
    form = find_form(source.quantization)
    if form is not None:
        storing = Storing(model, form, shares=True)
        for weight in find_storable(model):
            storing.store(weight.layers[0].weight)


def _flatten(tensor: torch.Tensor) -> None:
    """Make all elements alike."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.fill_(SMALL)
    else:
        tensor.zero_()
