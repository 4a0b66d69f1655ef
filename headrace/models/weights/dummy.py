"""Random weights for a built model: of plausible scale, reproducible by seed, generated on the parameters' device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ConfigError
from headrace.layers.quantization.storage import EncodedWeight
from headrace.parallel.cut import cut_of, ensure_memory

DEFAULT_STD = 0.02


def fill_dummy_weights(
    model: nn.Module, seed: int, *, std: float = DEFAULT_STD, store: Callable[[nn.Parameter], None] | None = None
) -> None:
    """Overwrite every parameter in place: matrices from N(0, std), norm weights from N(1, std), biases from N(0, std).

    ``std`` is the config's ``initializer_range``. Values depend on the seed, the device type, and the parameter's name,
    shape and dtype alone, so that ranks with some of the layers, or parts of them, have parts of one model. Integer
    parameters become zero. Each `EncodedWeight` fills itself. ``store`` is called with each parameter once it is
    filled, and may put it into another form: then one parameter at a time is plain.
    """
    generators: dict[torch.device, torch.Generator] = {}  # a generator is bound to one device

    def on(device: torch.device, name: str) -> torch.Generator:
        if device not in generators:
            generators[device] = torch.Generator(device)
        return generators[device].manual_seed(zlib.crc32(f"{seed} {name}".encode()))

    with torch.no_grad():
        for name in [name for name, _ in model.named_parameters()]:  # names: a list of parameters would keep them
            parameter = model.get_parameter(name)
            ensure_memory(parameter)
            _fill(parameter, 1.0 if _is_norm(name, parameter) else 0.0, std, on(parameter.device, name))
            if store is not None:
                store(parameter)
        for name, module in model.named_modules():
            if isinstance(module, EncodedWeight):
                module.randomise(std, on(next(module.buffers()).device, name))


def read_initializer_range(config: dict[str, Any]) -> float:
    """``initializer_range`` of a config.json, which a file that describes more than text has in its text part."""
    stated = {**config, **(config.get("text_config") or {})}.get("initializer_range")
    if stated is None:
        return DEFAULT_STD
    if isinstance(stated, bool) or not isinstance(stated, (int, float)) or not 0.0 < stated < math.inf:
        raise ConfigError(
            f"config.json: initializer_range must be a number above 0, got {stated!r}", param="initializer_range"
        )
    return float(stated)


def _fill(parameter: nn.Parameter, mean: float, std: float, generator: torch.Generator) -> None:
    cut = cut_of(parameter)
    if cut.shape == cut.full_shape:
        _randomise(parameter.data, mean, std, generator)
        return
    # all ranks draw the same whole parameter
    whole = torch.empty(cut.full_shape, dtype=parameter.dtype, device=parameter.device)
    _randomise(whole, mean, std, generator)
    parameter.copy_(cut.keep(whole))


def _is_norm(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 1 and name.endswith("weight") and "norm" in name.lower()


def _randomise(values: torch.Tensor, mean: float, std: float, generator: torch.Generator) -> None:
    if not values.is_floating_point():
        values.zero_()
    elif values.dtype.itemsize == 1:  # normal_ is not implemented for 8-bit floats
        values.copy_(torch.empty(values.shape, device=values.device).normal_(mean, std, generator=generator))
    else:
        values.normal_(mean, std, generator=generator)
