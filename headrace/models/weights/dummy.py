"""Random weights for a built model: of plausible scale, reproducible by seed, generated on the parameters' device."""

from __future__ import annotations

import torch
from torch import nn

from headrace.layers.quantization.storage import EncodedWeight
from headrace.parallel.cut import cut_of

DEFAULT_STD = 0.02


def fill_dummy_weights(model: nn.Module, seed: int, *, std: float = DEFAULT_STD) -> None:
    """Overwrite every parameter in place: matrices from N(0, std), norm weights from N(1, std), biases from N(0, std).

    ``std`` is the config's ``initializer_range``. One generator per device visits the parameters in the model's order,
    so values depend on the seed, the device type, the model and its dtype alone. Integer parameters become zero.
    Each `EncodedWeight` fills itself.
    """
    generators: dict[torch.device, torch.Generator] = {}  # a generator is bound to one device

    def on(device: torch.device) -> torch.Generator:
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        return generators[device]

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if _is_norm(name, parameter) else 0.0
            cut = cut_of(parameter)
            if cut.shape == cut.full_shape:
                _randomise(parameter.data, mean, std, on(parameter.device))
                continue
            # all ranks draw the same whole parameter, which makes them parts of one model
            whole = torch.empty(cut.full_shape, dtype=parameter.dtype, device=parameter.device)
            _randomise(whole, mean, std, on(parameter.device))
            parameter.copy_(cut.keep(whole))
        for module in model.modules():
            if isinstance(module, EncodedWeight):
                module.randomise(std, on(next(module.buffers()).device))


def _is_norm(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 1 and name.endswith("weight") and "norm" in name.lower()


def _randomise(values: torch.Tensor, mean: float, std: float, generator: torch.Generator) -> None:
    if not values.is_floating_point():
        values.zero_()
    elif values.dtype.itemsize == 1:  # normal_ is not implemented for 8-bit floats
        values.copy_(torch.empty(values.shape, device=values.device).normal_(mean, std, generator=generator))
    else:
        values.normal_(mean, std, generator=generator)
