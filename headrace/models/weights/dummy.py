"""Random weights for a built model: right in scale, equal for equal seeds, drawn where the parameters are."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from headrace.layers.storing import EncodedWeight

DEFAULT_STD = 0.02


def draw_dummy_weights(model: nn.Module, seed: int, *, std: float = DEFAULT_STD) -> None:
    """Overwrite every parameter in place: matrices from N(0, std), norm weights from N(1, std), biases from N(0, std).

    ``std`` is the config's ``initializer_range``. One generator per device walks the parameters in the model's order,
    so the values depend on the seed, the device type, the model and its dtype alone. Integer parameters are set to
    zero. Modules that keep weights in a form of their own do it themselves: `EncodedWeight.randomise`.
    """
    # generators need it; an engine's quick import of torch leaves it out
    importlib.import_module("torch._prims.rng_prims")
    generators: dict[torch.device, torch.Generator] = {}

    def on(device: torch.device) -> torch.Generator:
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        return generators[device]

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(parameter.data, 1.0 if _is_norm(name, parameter) else 0.0, std, on(parameter.device))
        for module in model.modules():
            if isinstance(module, EncodedWeight):
                module.randomise(std, on(next(module.buffers()).device))


def _is_norm(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 1 and name.endswith("weight") and "norm" in name.lower()


def _draw(values: torch.Tensor, mean: float, std: float, generator: torch.Generator) -> None:
    if not values.is_floating_point():
        values.zero_()
    elif values.dtype.itemsize == 1:  # 8-bit floats have no normal_
        values.copy_(torch.empty(values.shape, device=values.device).normal_(mean, std, generator=generator))
    else:
        values.normal_(mean, std, generator=generator)
