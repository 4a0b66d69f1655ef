"""A device to run models on where there is none: CPU tensors that were asked for on ``cpu:0`` count as a device's, all
others as the host's. Tells which operations mix the two, and which would wait for the device."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)
WAITS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "__bool__", "__int__", "__float__",
    "__index__", "__iter__", "unbind"
}
MOVES = {"to", "copy_"}
HARMLESS = {"unbind", "__iter__"}
"""They wait only when what they give is looked at, which shows by itself."""


class PretendedDevice(TorchFunctionMode):
    """``mixed`` and ``waits`` collect the names of functions and where they were called from; what tests themselves
    wait for is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []
        self.waits: list[str] = []

    def adopt(self, tensors: Any) -> None:
        """Count these as the device's."""
        for tensor in tensors:
            tensor._is_on_device = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        is_on_device = [getattr(tensor, "_is_on_device", False) for tensor in tensors]
        name = getattr(func, "__name__", str(func))
        if func == torch.Tensor.device.__get__:
            return DEVICE if is_on_device[0] else torch.device("cpu")
        if any(is_on_device):
            if name in WAITS - HARMLESS or (name == "where" and len(args) == 1):
                caller = _caller()
                self.waits += [f"{name} {caller}"] if caller != "a test" else []
            hosts = [t for t, there in zip(tensors, is_on_device, strict=True) if not there and t.dim() > 0]
            if hosts and name not in MOVES:
                self.mixed.append(f"{name} {_caller()}")
        result = func(*args, **kwargs)
        asked = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        lands = asked == DEVICE if asked is not None and name not in ("copy_",) else any(is_on_device)
        if name in ("cpu", "numpy", "tolist"):
            lands = False
        if lands:
            self.adopt(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def _caller() -> str:
    """The innermost place of the package on the stack."""
    frames = [frame for frame in traceback.extract_stack() if "/headrace/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/headrace/')[2]} {frames[-1].name}" if frames else "a test"
