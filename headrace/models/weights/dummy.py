"""Random weights for a built model: of plausible scale, reproducible by seed, generated on the parameters' device."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from headrace.layers.quantization.storage import EncodedWeight
from headrace.parallel.cut import cut_of

DEFAULT_STD = 0.02


def fill_dummy_weights(model: nn.Module, seed: int, *, std: float = DEFAULT_STD) -> None:
    """Overwrite every parameter in place: matrices from N(0, std), norm weights from N(1, std), biases from N(0, std).

    ``std`` is the config's ``initializer_range``. Values depend on the seed, the device type, and the parameter's name,
    shape and dtype alone, so that ranks with some of the layers, or parts of them, have parts of one model. Integer
    parameters become zero. Each `EncodedWeight` fills itself.
    """
    generators: dict[torch.device, torch.Generator] = {}  # a generator is bound to one device

    def on(device: torch.device, name: str) -> torch.Generator:
        if device not in generators:
            generators[device] = torch.Generator(device)
        return generators[device].manual_seed(zlib.crc32(f"{seed} {name}".encode()))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if _is_norm(name, parameter) else 0.0
            cut = cut_of(parameter)
            if cut.shape == cut.full_shape:
                _randomise(parameter.data, mean, std, on(parameter.device, name))
                continue
            # all ranks draw the same whole parameter
            whole = torch.empty(cut.full_shape, dtype=parameter.dtype, device=parameter.device)
            _randomise(whole, mean, std, on(parameter.device, name))
            parameter.copy_(cut.keep(whole))
        for name, module in model.named_modules():
            if isinstance(module, EncodedWeight):
                module.randomise(std, on(next(module.buffers()).device, name))


def _is_norm(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 1 and name.endswith("weight") and "norm" in name.lower()


def _randomise(values: torch.Tensor, mean: float, std: float, generator: torch.Generator) -> None:
    if not values.is_floating_point():
        values.zero_()
    elif values.dtype.itemsize == 1:  # normal_ is not implemented for 8-bit floats
        values.copy_(torch.empty(values.shape, device=values.device).normal_(mean, std, generator=generator))
    else:
        values.normal_(mean, std, generator=generator)
