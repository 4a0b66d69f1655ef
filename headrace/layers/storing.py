"""How layers keep their weights once these are filled: a plain parameter, or a `StoredWeight` in its place.

A layer that can do so has a parameter ``weight`` [O, I] and an attribute ``stored``; storing removes the parameter, for
which a layer must therefore ask first (`plain_weight`). Tied weights are stored once. Refuses: losing anything, which
quantization schemes may.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from headrace.kernels import native
from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear import WEIGHT_FORMS
from headrace.kernels.packed_linear.choice import NATIVE_FORM, FormChoice
from headrace.kernels.packed_linear.forms import StoredWeight

logger = logging.getLogger(__name__)

CPU_TYPES = (torch.float32, torch.bfloat16)


class StorableLayer(nn.Module):
    """A layer whose parameter ``weight`` [O, I] may be replaced by a `StoredWeight`. ``is_storable``: False for a weight
    that is read by others or must stay as precise as it is. ``looks_up_rows``: an embedding. ``is_vocabulary``: an
    embedding or a head."""

    is_storable: bool = True
    looks_up_rows: ClassVar[bool] = False
    is_vocabulary: ClassVar[bool] = False
    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.stored: StoredWeight | None = None


class StorableModel(nn.Module):
    """A model whose weights may be repacked while it serves."""

    def notice_stored(self) -> None:
        """Weights were repacked since the latest step. May be called from another thread."""


class EncodedWeight(nn.Module):
    """A layer that keeps integer codes instead of parameters."""

    def randomise(self, std: float, generator: torch.Generator) -> None:
        """Overwrite the codes so that the weights are random numbers of about this standard deviation."""
        raise NotImplementedError


@dataclass(frozen=True)
class StorableWeight:
    """A weight and the layers that share it. ``has_rows``: one of them is an embedding; ``is_vocabulary``: an embedding
    or a head. It does not keep the weight alive once that is stored."""

    name: str
    layers: tuple[StorableLayer, ...]

    @property
    def weight(self) -> torch.Tensor:
        """The plain parameter, [O, I]; matrices that are stacked in one, [X, O, I], follow one another, [X * O, I]."""
        weight = self.layers[0].weight
        return weight.flatten(0, -2) if self.is_stack else weight

    @property
    def is_stack(self) -> bool:
        return self.layers[0].weight.dim() > 2

    @property
    def has_rows(self) -> bool:
        return any(layer.looks_up_rows for layer in self.layers)

    @property
    def is_vocabulary(self) -> bool:
        return any(layer.is_vocabulary for layer in self.layers)

    def store(self, stored: StoredWeight) -> None:
        """Keep ``stored`` instead of the parameter."""
        for layer in self.layers:  # in this order: products may run on another thread, and ask for the weight first
            layer.stored = stored
            del layer.weight


def plain_weight(layer: nn.Module) -> nn.Parameter | None:
    """The parameter ``weight``; None when it is stored otherwise. Cheaper than the attribute."""
    return layer._parameters.get("weight")


def find_storable(model: nn.Module) -> list[StorableWeight]:
    """Every weight of a model that is still plain and may be stored in another form, in the model's order."""
    sharing: dict[int, list[tuple[str, StorableLayer]]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, StorableLayer) and layer.is_storable and layer.stored is None:
            sharing.setdefault(id(layer.weight), []).append((name, layer))
    return [StorableWeight(layers[0][0], tuple(layer for _, layer in layers)) for layers in sharing.values()]


def can_store_blocks(device: torch.device, dtype: torch.dtype, *, waits: bool = False) -> bool:
    """Whether layers there multiply with a file's own quantised blocks faster than with plain numbers, now, or once the
    native library has been compiled."""
    if device.type != "cpu" or dtype not in CPU_TYPES:
        return False
    if waits:
        native.build()
    return native.NATIVE.find() is not None


def store_fastest(model: nn.Module) -> None:
    """Keep every plain weight on a CPU as it is, in the form that was measured to multiply fastest for its shape. Where
    the native library is still being compiled, plain weights serve until it is there, and are then stored one by one
    between products; `StorableModel.notice_stored` is called when all are."""
    native.NATIVE.find()
    if native.state().status == "compiling":
        threading.Thread(target=_store_later, args=(weakref.ref(model),), name="weight-storing", daemon=True).start()
    else:
        _store_plain(model, FormChoice())


def _store_later(model: weakref.ref[nn.Module]) -> None:
    began = time.monotonic()
    native.build()
    served = model()
    if served is not None:
        _store_plain(served, FormChoice(budget_s=0.0))  # requests run: nothing measured now would be true
        if isinstance(served, StorableModel):
            served.notice_stored()
        logger.info("weights laid out as the kernels want them, %.1f s after the start", time.monotonic() - began)


@torch.no_grad()
def _store_plain(model: nn.Module, choice: FormChoice) -> None:
    """Each weight is let go of before the next is taken."""
    for weight in find_storable(model):
        if (
            weight.weight.device.type == "cpu" and weight.weight.dtype in CPU_TYPES
            and (form := _choose_form(weight, choice))
        ):
            weight.store(WEIGHT_FORMS.load(form)(weight.weight.detach()))
    choice.save()


def _choose_form(weight: StorableWeight, choice: FormChoice) -> str | None:
    """None: better left as it is. Of a stack only panels can be told apart."""
    if weight.is_stack:
        return NATIVE_FORM if native.NATIVE.find() is not None else None
    out_width, in_width = weight.weight.shape
    shape = {"in_width": in_width, "out_width": out_width, "has_rows": int(weight.has_rows)}
    return choice.choose(KernelQuery("cpu", str(weight.weight.dtype).removeprefix("torch."), shape=shape))


def find_stored(model: nn.Module) -> list[StoredWeight]:
    """Every stored weight, tied ones once."""
    stored = (layer.stored for layer in model.modules() if isinstance(layer, StorableLayer))
    return list({id(weight): weight for weight in stored if weight is not None}.values())


def count_elements(model: nn.Module) -> int:
    """Weights of a model, however they are kept, tied ones once."""
    return sum(p.numel() for p in model.parameters()) + sum(
        stored.shape[0] * stored.shape[1] for stored in find_stored(model)
    )


def count_bytes(model: nn.Module) -> int:
    """Bytes of parameters, stored weights and buffers."""
    return (
        sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        + sum(stored.num_bytes for stored in find_stored(model))
    )
