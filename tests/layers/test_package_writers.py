"""Weights that the packages of their formats write, where these are installed: hqq, optimum-quanto and bitsandbytes.
Torchao's and compressed-tensors' are tested in `test_quantized_parity` and `test_checkpoint_formats`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers.format_cases import draw, name_tensors

from headrace.layers.quantization import SchemeQuery, chain_schemes


def read(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The one weight."""
    query = SchemeQuery(stored=config["quant_method"], config=config)
    (weight,) = dict(chain_schemes(query).read(tensors.items())).values()
    return weight.double()


def assert_equal(found: torch.Tensor, meant: torch.Tensor) -> None:
    torch.testing.assert_close(found, meant.double().view(found.shape), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("bits", "group", "axis"), [
    (4, 32, 1), (3, 64, 1), (8, 64, 1), (2, 16, 1), (1, 32, 1), (2, 8, 0)
])
def test_hqq(bits: int, group: int, axis: int):
    quantize = pytest.importorskip("hqq.core.quantize")
    linear = torch.nn.Linear(192, 136, bias=False)
    linear.weight.data = draw(136, 192)
    config = quantize.BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    layer = quantize.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
    layer.encoded_state_dict = True
    stored = {name: tensor for name, tensor in layer.state_dict().items() if isinstance(tensor, torch.Tensor)}
    assert_equal(read({"quant_method": "hqq"}, name_tensors("m", stored)), layer.dequantize())


@pytest.mark.parametrize("kind", ["qint8", "qfloat8_e4m3fn"])
def test_quanto(kind: str):
    quanto = pytest.importorskip("optimum.quanto")
    model = torch.nn.Sequential(torch.nn.Linear(192, 136, bias=False))
    model[0].weight.data = draw(136, 192)
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    found = read({"quant_method": "quanto", "0": {"weights": kind}}, dict(model.state_dict()))
    assert_equal(found, model[0].weight.dequantize())


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind: str, is_nested: bool):
    """Rows of whole blocks: its kernel for CPUs reads others wrongly."""
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(draw(136, 192), quant_type=kind, compress_statistics=is_nested)
    stored = {"m.weight": codes, **{f"m.weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": is_nested}
    found = read({**config, "bnb_4bit_quant_type": kind}, stored)
    assert_equal(found, functional.dequantize_4bit(codes, state))
