"""Random weights: scale, and equal seeds."""

from __future__ import annotations

import torch
from torch import nn

from headrace.models.weights.dummy import fill_dummy_weights


class Toy(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(500, 64, dtype=dtype)
        self.layer = nn.Linear(64, 300, dtype=dtype)
        self.q_norm = nn.RMSNorm(64, dtype=dtype)
        self.head = nn.Linear(64, 500, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.register_parameter("quantised", nn.Parameter(torch.full((4, 4), 7, dtype=torch.int8), requires_grad=False))
        self.register_parameter("small", nn.Parameter(torch.zeros(64, 64).to(torch.float8_e4m3fn), requires_grad=False))


def values(seed, **options):
    model = Toy(options.pop("dtype", torch.float32))
    fill_dummy_weights(model, seed, **options)
    return {name: parameter.detach().clone().float() for name, parameter in model.named_parameters()}


def test_matrices_have_the_wanted_spread_and_norms_are_near_one():
    made = values(3, std=0.05)
    for name in ("embedding.weight", "layer.weight", "small"):
        assert abs(made[name].std().item() - 0.05) < 0.002 and abs(made[name].mean().item()) < 0.003
    assert (made["q_norm.weight"] - 1).abs().max() < 0.3 and made["q_norm.weight"].std() > 0.02
    assert made["layer.bias"].abs().max() < 0.3
    assert made["quantised"].abs().max() == 0
    assert abs(values(3)["embedding.weight"].std().item() - 0.02) < 0.001


def test_equal_seeds_give_equal_weights_whatever_the_threads():
    before, first = torch.get_num_threads(), values(7)
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        again = values(7)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = values(8)
    assert not torch.equal(first["layer.weight"], other["layer.weight"])


def test_half_precision_and_the_global_generator_is_left_alone():
    model, state = Toy(torch.bfloat16), torch.get_rng_state()
    fill_dummy_weights(model, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert abs(model.embedding.weight.float().std().item() - 0.02) < 0.001
