"""`prepare_steps`: what the steps of a model launch is compiled before the first of them runs.

Refuses: compiling (kernels/precompile.py), and sizes that nobody rehearsed; their kernels are compiled when they are
captured.
"""

from __future__ import annotations

import msgspec
import torch

from headrace.base.config import EngineConfig
from headrace.base.sampling import Penalties, SamplingSpec
from headrace.execution.assembly import StepBytes, build_small_runner, graph_sizes, has_graphs, measure_steps
from headrace.execution.backends import ChosenBackends
from headrace.execution.captures import NoRecorder
from headrace.execution.graphs import GraphSizes
from headrace.execution.loading import LoadedModel
from headrace.execution.warmup import run_tiny_steps
from headrace.kernels.precompile import precompile

DRAWS = (SamplingSpec(temperature=1.0), SamplingSpec(penalties=Penalties(presence=0.5)))
"""Ways to draw that have kernels of their own; all others branch within these."""


def prepare_steps(config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends, device: torch.device) -> StepBytes:
    """Compile for the first steps, the largest ones and those with graphs, if that was not done before on this machine.
    Returns what the largest take; a rehearsal, which allocates what they do, tells as well as they."""
    measured: list[StepBytes] = []
    about = msgspec.json.encode(
        (config.scheduler, config.cache, config.device, loaded.source.config, str(loaded.dtype))
    ).decode()
    precompile(lambda: measured.append(_rehearse(config, loaded, chosen, device)), about, device)
    return measured[0] if measured else measure_steps(config, loaded, chosen, device)


@torch.inference_mode()
def _rehearse(config: EngineConfig, loaded: LoadedModel, chosen: ChosenBackends, device: torch.device) -> StepBytes:
    measured = measure_steps(config, loaded, chosen, device)
    runner = build_small_runner(config, loaded, chosen, device)
    is_reader = loaded.pooling is not None
    for sampling in (SamplingSpec(), *(() if is_reader else DRAWS)):
        run_tiny_steps(runner.execute, runner.layout, is_reader=is_reader, sampling=sampling)
    if has_graphs(config, device):
        runner.capture(_thin(graph_sizes(config, loaded, chosen)), NoRecorder()).record_all(lambda: None)
    runner.detach()
    return measured


def _thin(sizes: GraphSizes) -> GraphSizes:
    """The sizes at which kernels change: powers of two, all of the small ones, and the ends."""
    decodes = [size for size in sizes.decodes if size & (size - 1) == 0 or size < 32]
    return GraphSizes(sorted({*decodes, sizes.decodes[-1]}), sorted({*sizes.tokens[:1], *sizes.tokens[-1:]}))
