"""Scales of keys and values become part of the weights: logits and outputs keep every bit, pages hold other numbers."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from headrace.kernels.coded_linear.device_codes import pack_for_device
from headrace.kernels.coded_linear.forms import STACK_PLAN, CodedWeight
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_fp4, quantise_integer
from headrace.layers.build import Build
from headrace.layers.cache_scales import CacheScales, _scale_tables, find_scale
from headrace.layers.self_attention import Attention
from headrace.layers.spec import AttentionSpec, LayerSpec, NormSpec

FORMS: dict[str, Any] = {
    "plain": None, "fp8 channel": quantise_float, "fp8 block": partial(quantise_float, rows=64, group=64),
    "int4": partial(quantise_integer, bits=4, group=32), "mxfp4": quantise_fp4,
}


def build_layer(form: str, qk_norm: str = "none", offset: float = 0.0) -> Attention:
    """2 heads of queries, 1 of keys and values, 64 wide."""
    torch.manual_seed(5)
    spec = AttentionSpec(2, 1, 64, 0.125, qkv_bias=True, output_bias=True, qk_norm=qk_norm)
    layer = Attention(
        spec, LayerSpec(0, None), hidden_size=128, norm=NormSpec(1e-6, offset), rotary=None,
        build=Build(torch.device("cpu"), torch.float32)
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    for linear in (layer.qkv, layer.output) if FORMS[form] else ():
        codes = pack_for_device(FORMS[form](linear.weight * 0.1))
        assert codes is not None
        linear.stored = CodedWeight(codes, STACK_PLAN)
        del linear.weight
    return layer


def numbers(layer: Attention) -> dict[str, torch.Tensor]:
    """What q, k and v are of an input, and outputs of v."""
    x = torch.eye(128) + 1
    weights = [
        linear.weight if linear.stored is None else linear.stored.unpack(torch.float32)
        for linear in (layer.qkv, layer.output)
    ]
    qkv = x @ weights[0].T + layer.qkv.bias
    q, k, v = qkv[:, :128], qkv[:, 128:192], qkv[:, 192:]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = q * layer.q_norm.weight.repeat(128 // len(layer.q_norm.weight)), k * layer.k_norm.weight
    return {"k": k, "v": v, "logits": q[:, :64] @ k.T, "out": v @ weights[1][:, 64:].T + layer.output.bias}


@pytest.mark.parametrize("qk_norm", ["none", "head"])
@pytest.mark.parametrize("form", FORMS)
def test_only_what_pages_hold_changes(form: str, qk_norm: str):
    layer = build_layer(form, qk_norm)
    before = numbers(layer)
    scales = CacheScales()
    rest = list(scales.take([
        ("model.layers.3.self_attn.k_scale", torch.tensor([0.1, 0.2])), ("model.layers.3.x", torch.ones(2)),
        ("model.layers.3.self_attn.v_proj.output_scale", torch.tensor(3.0)),
        ("model.layers.4.self_attn.k_scale", torch.tensor(-1.0)),
    ]))
    assert [name for name, _ in rest] == ["model.layers.3.x"]
    scales.apply({3: layer, 4: layer})
    after = numbers(layer)
    assert torch.equal(after["k"], before["k"] / 0.25) and torch.equal(after["v"], before["v"] / 4)
    assert torch.equal(after["logits"], before["logits"]) and torch.equal(after["out"], before["out"])


def test_weights_that_cannot_hold_a_scale_stay(caplog: pytest.LogCaptureFixture):
    """A norm that adds to its weight; powers of two beyond a byte; scales beyond float16."""
    caplog.set_level(logging.WARNING)
    cases = [(build_layer("plain", "head", offset=1.0), 0.25), (build_layer("mxfp4"), 2.0**-120)]
    cases.append((build_layer("int4"), 2.0**-30))
    for layer, scale in cases:
        before, scales = numbers(layer), CacheScales()
        assert not list(scales.take([("layers.0.attn.kv_scale", torch.tensor(scale))]))
        scales.apply({0: layer})
        assert all(torch.equal(own, before[name]) for name, own in numbers(layer).items())
    assert caplog.text.count("of 1 layers are left out") == len(cases)


def test_rows_of_a_weight_in_tiles_are_found():
    """Those of a head may begin and end inside a tile of eight."""
    layer = build_layer("int4")
    assert isinstance(layer.qkv.stored, CodedWeight)
    before = layer.qkv.stored.unpack(torch.float32)
    before[12:30] *= 0.5
    layer.qkv.stored.weight = layer.qkv.stored.weight.tile()
    table = _scale_tables(layer.qkv, [(slice(12, 30), 0.5)])
    assert table is not None
    layer.qkv.stored.weight = replace(layer.qkv.stored.weight, scales=table)
    assert torch.equal(layer.qkv.stored.unpack(torch.float32), before)


def test_names():
    assert find_scale("model.layers.11.self_attn.attn.v_scale") == (11, "v")
    assert find_scale("model.layers.0.self_attn.k_proj.k_scale") == (0, "k")
    assert find_scale("model.layers.0.self_attn.kv_scale") == (0, "kv")
    assert find_scale("model.layers.0.self_attn.q_proj.output_scale") is None and find_scale("k_scale") is None
