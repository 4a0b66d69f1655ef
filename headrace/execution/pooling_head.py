"""`attach_pooling_head`: gives a loaded model that reads what turns its hidden states into results."""

from __future__ import annotations

from typing import Any

import torch

from headrace.base.errors import ModelError
from headrace.layers.build import Build
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.pooling import EmbeddingHead, PoolingHead
from headrace.models.finding import find_safetensors
from headrace.models.pooling import PoolingPlan
from headrace.models.weights.safetensors_file import read_safetensors


@torch.no_grad()
def attach_pooling_head(model: Any, plan: PoolingPlan, build: Build) -> None:
    """Set ``model.pooling_head``. Dense layers of an embedding are in folders of their own; raises `WeightError`."""
    if plan.kind == "classify":
        model.pooling_head = PoolingHead(plan.reduction, model.scores, takes=build.dtype)
    else:
        model.pooling_head = PoolingHead(plan.reduction, _embedding_head(plan, build))
    model.is_capturable = False  # texts are read in steps of their own length


def _embedding_head(plan: PoolingPlan, build: Build) -> EmbeddingHead:
    shapes = [(layer.in_features, layer.out_features, layer.has_bias, layer.activation) for layer in plan.dense]
    head = EmbeddingHead(build, shapes, normalise=plan.normalise)
    for layer, module in zip(plan.dense, head.dense, strict=True):
        files = find_safetensors(layer.folder)
        if not files:
            raise ModelError(f"{layer.folder} has no *.safetensors with the weights of the dense layer it describes")
        fill_targets(
            find_targets(module, {"linear.weight": "weight", "linear.bias": "bias"}, 0), read_safetensors(files)
        )
    return head
