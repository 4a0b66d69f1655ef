"""Weights that are quantised to `CodedMatrix` once a model is filled: FP8 of any checkpoint, and random weights in the
form that a checkpoint's config.json states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.kernels.coded_linear.choice import CodedChoice, pack_weight
from headrace.kernels.coded_linear.codes import CodedMatrix
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_fp4, quantise_integer
from headrace.kernels.packed_linear.forms import StoredWeight
from headrace.layers.quantization.blocks import CodedTensor
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.storage import find_storable

logger = logging.getLogger(__name__)

Quantise = Callable[[torch.Tensor], CodedMatrix]


@dataclass(frozen=True)
class Form:
    """How to ``quantise`` random weights [O, I]; ``of_experts_alone``: others stay plain."""

    quantise: Quantise
    of_experts_alone: bool = False


class Fp8:
    """8-bit floats with a scale per output, made of plain weights; embedding and head stay plain. See `Scheme`."""

    def __init__(self, query: SchemeQuery):
        pass

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """See `Scheme`."""
        return tensors

    def finish(self, model: nn.Module) -> None:
        """See `Scheme`. Where products are slower with codes, or no kernel takes 8-bit floats, weights are rounded and
        kept plain."""
        kept, rounded = store_coded(model, Form(quantise_float))
        if rounded and not kept:
            logger.warning(
                "weights were rounded to fp8 and take as much memory as before: products with 8-bit floats are not "
                "faster here"
            )
        logger.info("%d weights are kept in fp8, %d are rounded to it", kept, rounded)


def store_coded(model: nn.Module, form: Form) -> tuple[int, int]:
    """Quantise every weight but those of the vocabulary, one at a time; stored where a layout holds it and is not
    slower, else rounded in place. Returns how many of each."""
    storing = Storing(model, form)
    for weight in find_storable(model):
        storing.store(weight.layers[0].weight)
    return storing.finish()


class Storing:
    """Quantises the weights of a model in ``form``, see `store_coded`, as they are filled: `store` each, then
    `finish`. ``shares``: weights of one shape are equal, and share the codes of the first."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, form: Form, *, shares: bool = False):
        self._form, self._choice = form, CodedChoice()
        self._shares, self._shared = shares, dict[tuple[int, ...], StoredWeight | None]()
        self._kept = self._rounded = 0
        prepare_products(model, form, self._choice)
        self._weights = {id(weight.layers[0].weight): weight for weight in find_storable(model)}

    @torch.no_grad()
    def store(self, parameter: nn.Parameter) -> None:
        """Store a weight, or round it; nothing for parameters that stay as they are."""
        weight = self._weights.pop(id(parameter), None)
        if weight is None or weight.is_vocabulary or (self._form.of_experts_alone and not weight.is_stack):
            return
        shape = tuple(weight.layers[0].weight.shape)
        if shape in self._shared:
            same = self._shared[shape]
            return None if same is None else weight.store(same)
        coded = CodedTensor(self._form.quantise(weight.weight))
        stored = CodedTensor.store([coded], weight, self._choice)
        if self._shares:
            self._shared[shape] = stored
        if stored is None:
            weight.weight.copy_(coded.make_plain())
            self._rounded += 1
        else:
            weight.store(stored)
            self._kept += 1

    def finish(self) -> tuple[int, int]:
        """Save what was measured; returns how many weights were stored and rounded."""
        self._choice.save()
        return self._kept, self._rounded


@torch.no_grad()
def prepare_products(model: nn.Module, form: Form, choice: CodedChoice) -> None:
    """Compile at once what ``choice`` will measure for the weights of a model on a GPU, by a sample of each shape."""
    samples: dict[tuple[int, ...], tuple[DeviceCodes, torch.dtype]] = {}
    for weight in find_storable(model):
        shape, plain = tuple(weight.weight.shape), weight.weight
        is_plain = weight.is_vocabulary or weight.is_stack or plain.dtype == torch.float32 or form.of_experts_alone
        if plain.device.type != "cuda" or is_plain or shape in samples:
            continue
        capability = torch.cuda.get_device_capability(plain.device)
        codes = pack_weight(form.quantise(torch.ones_like(plain)), plain.dtype, capability)
        if codes is not None:
            samples[shape] = codes, plain.dtype
    for dtype in {dtype for _, dtype in samples.values()}:
        own = [codes for codes, of in samples.values() if of == dtype]
        choice.prepare(own, dtype, torch.cuda.get_device_capability(own[0].codes.device))


def find_form(config: Mapping[str, Any]) -> Form | None:
    """How to quantise random weights as a ``quantization_config`` says; None for forms of which random weights are not
    made: they stay plain."""
    method = config.get("quant_method")
    if method == "fp8" and (block := config.get("weight_block_size")):
        return Form(lambda weight: quantise_float(weight, *block))
    if method in ("fp8", "fbgemm_fp8", "modelopt"):
        return Form(quantise_float)
    if method == "mxfp4":
        return Form(quantise_fp4, of_experts_alone=True)
    if method in ("gptq", "awq", "auto-round"):
        size = config.get("group_size") or config.get("q_group_size") or 128
        bits = config.get("bits") or config.get("w_bit") or 4
        return Form(lambda weight: quantise_integer(weight, bits, size if size > 0 else weight.shape[1]))
    if method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
        if weights and all(own.get("type") == "float" and own.get("num_bits") == 8 for own in weights):
            return Form(quantise_float)
    return None
