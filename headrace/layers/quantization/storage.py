"""How layers keep their weights once these are filled: a plain parameter, or a `StoredWeight` in its place.

Hazard: storing sets ``layer.stored`` and then deletes the parameter ``weight``, perhaps while another thread runs a
step. A layer must look for the parameter first (`plain_weight`), and use ``stored`` only if it is gone. Tied weights
are stored once. Everything here is lossless; quantization schemes store lossy forms. O outputs, I inputs, X experts.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from headrace.kernels import native
from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear import WEIGHT_FORMS
from headrace.kernels.packed_linear.choice import NATIVE_FORM, FormChoice
from headrace.kernels.packed_linear.forms import StoredWeight
from headrace.parallel.cut import Cut
from headrace.parallel.share import Share

logger = logging.getLogger(__name__)

BUILD_WAIT_S = 180.0
"""Most seconds that loading waits for the native library to be compiled; it takes about half a minute."""
CPU_TYPES = (torch.float32, torch.bfloat16)


class StorableLayer(nn.Module):
    """A layer whose parameter ``weight`` [O, I] may be replaced by a `StoredWeight`. ``is_storable``: False for a
    weight that other layers read or that must keep its precision. ``looks_up_rows``: an embedding. ``is_vocabulary``:
    an embedding or a head. ``num_stacked``: matrices in one parameter [X, O, I], each filled by its own tensors."""

    is_storable: bool = True
    looks_up_rows: ClassVar[bool] = False
    is_vocabulary: ClassVar[bool] = False
    num_stacked: int = 1
    """Matrices in one parameter."""
    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.stored: StoredWeight | None = None

    def drop_weight(self) -> None:
        """Free the parameter, which is stored otherwise."""
        del self.weight

    @property
    def stack(self) -> Share:
        """Which matrices of the checkpoint's stack the parameter has."""
        return Share.whole(self.num_stacked)

    def has_part(self, name: str) -> bool:
        """Whether there is a part of this name: names of a family may have more than one of its layers."""
        return True

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The view of a parameter that holds the part called ``name``; for layers with stacked weights."""
        raise NotImplementedError

    def part_cut(self, parameter: torch.Tensor, name: str) -> Cut:
        """Which part of the checkpoint's tensor `part` is filled with."""
        raise NotImplementedError


class StorableModel(nn.Module):
    """A model whose weights may be repacked while it serves."""

    def notice_stored(self) -> None:
        """Called after weights were repacked, perhaps on another thread: drop what refers to the plain parameters."""


class EncodedWeight(nn.Module):
    """A layer that keeps integer codes instead of parameters."""

    def randomise(self, std: float, generator: torch.Generator) -> None:
        """Overwrite the codes so that the weights are random numbers of about this standard deviation."""
        raise NotImplementedError

    def leave_as_it_is(self) -> None:
        """Take the codes as if they were in the order of kernels: they mean nothing, as in a sketch."""


@dataclass(frozen=True)
class StorableWeight:
    """A weight and the layers that share it. ``has_rows``: one of them is an embedding; ``is_vocabulary``: an embedding
    or a head. It holds no reference to the parameter, whose memory is free once it is stored."""

    name: str
    layers: tuple[StorableLayer, ...]

    @property
    def weight(self) -> torch.Tensor:
        """The plain parameter, [O, I]; a stack [X, O, I] as [X * O, I]."""
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
        """Replace the parameter by ``stored``."""
        for layer in self.layers:  # set, then delete: a step on another thread always finds one of the two
            layer.stored = stored
            layer.drop_weight()


def plain_weight(layer: nn.Module) -> nn.Parameter | None:
    """The parameter ``weight``; None once it is stored. Cheaper than the attribute, which nn.Module looks up last."""
    return layer._parameters.get("weight")


def find_storable(model: nn.Module) -> list[StorableWeight]:
    """Every weight that is still plain and may be stored in another form, in the model's order."""
    sharing: dict[int, list[tuple[str, StorableLayer]]] = {}  # by identity of the parameter: tied layers share it
    for name, layer in model.named_modules():
        if isinstance(layer, StorableLayer) and layer.is_storable and layer.stored is None:
            sharing.setdefault(id(layer.weight), []).append((name, layer))
    return [StorableWeight(layers[0][0], tuple(layer for _, layer in layers)) for layers in sharing.values()]


def can_store_blocks(
    device: torch.device, dtype: torch.dtype, *, waits: bool, report: Callable[[int, int], None] | None = None
) -> bool:
    """Whether layers there multiply with a file's quantised blocks faster than with plain numbers. ``waits``, for a
    file that has such blocks: for the native library to be compiled, as weights that were dequantised stay so.
    ``report`` is told how many of how many files are compiled."""
    if device.type != "cpu" or dtype not in CPU_TYPES:
        return False
    if not waits:
        return native.NATIVE.find() is not None
    if native.NATIVE.find() is None and native.state().status == "compiling":
        logger.warning("waiting for the CPU kernels, which are compiled once: about half a minute")
    state = native.build(timeout=BUILD_WAIT_S, report=report)
    if state.status in ("compiling", "unavailable"):
        logger.warning(
            "quantised weights are dequantised, to up to four times the memory, as there are no native CPU kernels "
            "(%s: %s); headrace check says more", state.status, state.detail
        )
    return state.status == "ready"


def store_fastest(model: nn.Module) -> None:
    """Store every plain weight on a CPU, lossless, in the form measured to multiply fastest for its shape. While the
    native library is still being compiled, plain weights serve; they are stored later on a thread, one by one, and
    `StorableModel.notice_stored` is called at the end."""
    native.NATIVE.find()
    if native.state().status == "compiling":
        # a weak reference: the thread must not keep an unloaded model's memory alive while it waits for the compiler
        threading.Thread(target=_store_later, args=(weakref.ref(model),), name="weight-storing", daemon=True).start()
    else:
        _store_plain(model, FormChoice())


def _store_later(model: weakref.ref[nn.Module]) -> None:
    began = time.monotonic()
    native.build()
    served = model()
    if served is not None:
        _store_plain(served, FormChoice(budget_s=0.0))  # no measuring while requests run
        if isinstance(served, StorableModel):
            served.notice_stored()
        logger.info("weights repacked for the native kernels %.1f s after the start", time.monotonic() - began)


@torch.no_grad()
def _store_plain(model: nn.Module, choice: FormChoice) -> None:
    """One weight at a time, so that at most one exists in both forms."""
    for weight in find_storable(model):
        if (
            weight.weight.device.type == "cpu" and weight.weight.dtype in CPU_TYPES
            and (form := _choose_form(weight, choice))
        ):
            weight.store(WEIGHT_FORMS.load(form)(weight.weight.detach()))
    choice.save()


def _choose_form(weight: StorableWeight, choice: FormChoice) -> str | None:
    """The name of the fastest form, or None to keep the plain weight. Stacks have one form, panels: kernels address an
    expert by its first panel."""
    if weight.is_stack:
        return NATIVE_FORM if native.NATIVE.find() is not None else None
    out_features, in_features = weight.weight.shape
    shape = {"in_features": in_features, "out_features": out_features, "has_rows": int(weight.has_rows)}
    return choice.choose(KernelQuery("cpu", str(weight.weight.dtype).removeprefix("torch."), shape=shape))


def find_stored(model: nn.Module) -> list[StoredWeight]:
    """Every stored weight of the model; tied ones appear once."""
    stored = (layer.stored for layer in model.modules() if isinstance(layer, StorableLayer))
    return list({id(weight): weight for weight in stored if weight is not None}.values())


def count_elements(model: nn.Module) -> int:
    """Number of weights of a model in any form, tied ones once."""
    return sum(p.numel() for p in model.parameters()) + sum(
        stored.shape[0] * stored.shape[1] for stored in find_stored(model)
    )


def count_bytes(model: nn.Module) -> int:
    """Bytes of parameters, stored weights and buffers."""
    return (
        sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        + sum(stored.num_bytes for stored in find_stored(model))
    )
