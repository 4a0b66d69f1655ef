"""A GPU that is pretended: tensors without memory that say they are on it, kernels of own CUDA C++ and Triton that are
recorded instead of launched. Grids, tensor maps and shared memory that the driver would refuse raise `Refused`."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from headrace.kernels import cuda_source, nvrtc
from headrace.kernels.cuda_source import RESERVED_BYTES
from headrace.kernels.operation import count_block_bytes

MOST_GRID, MOST_GRID_SIDE, MOST_THREADS = 2**31 - 1, 2**16 - 1, 1024
"""Of a launch: blocks along x, along y and z, and threads of a block."""
MOST_RESIDENT = 2048
"""Threads of a multiprocessor."""
MOST_CLUSTER, MOST_LARGE_CLUSTER = 8, 16
"""Blocks of a cluster, the latter where a kernel allows it."""
MOST_BOX, MOST_RANK = 256, 5
"""Of a tensor map."""


class Refused(AssertionError):
    """What the driver would refuse."""


@dataclass(frozen=True)
class Card:
    """A GPU, by ``index`` unlike any that there is: what is kept for a device is not mixed up. ``clusters``: how many
    of 16 blocks run at once."""

    name: str
    index: int
    capability: tuple[int, int]
    num_sms: int
    clusters: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)


H200 = Card("H200", 100, (9, 0), 132, clusters=8)
H20 = Card("H20", 101, (9, 0), 78, clusters=4)
H100_SLICE = Card("H100 slice", 102, (9, 0), 16)
"""As of a GPU that is shared out among machines: no cluster of 16 blocks runs there."""
A100 = Card("A100", 103, (8, 0), 108)
L4 = Card("L4", 104, (8, 9), 58)
B200 = Card("B200", 105, (10, 0), 148, clusters=8)
RTX_5090 = Card("RTX 5090", 106, (12, 0), 170)
HOPPERS, OTHERS = (H200, H20, H100_SLICE), (A100, L4, B200, RTX_5090)


@dataclass(frozen=True)
class Launch:
    """Of a kernel: its source or name, ``macros`` of a source by name, and its sizes."""

    kernel: str
    entry: str
    macros: dict[str, int]
    grid: tuple[int, ...]
    threads: int = 0
    shared_bytes: int = 0


@dataclass
class Recording:
    """Of what ran on a card: ``launches``; ``sources``: what would have been compiled, in order."""

    card: Card
    launches: list[Launch] = field(default_factory=list)
    sources: dict[cuda_source.Source, None] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all launches."""
        self.launches.clear()

    @property
    def own(self) -> list[str]:
        """Names of the sources of own kernels that were launched, in order."""
        return [launch.kernel for launch in self.launches if launch.threads]

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A tensor on the card."""
        return torch.empty(shape, dtype=dtype, device=self.card.device)


class Pretended(torch.Tensor):
    """A tensor on the meta device that says it is on the card."""

    card: Card | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        assert Pretended.card is not None
        return Pretended.card.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return 1 << 40


LIBRARY = (
    "linear", "mm", "addmm", "matmul", "_scaled_mm", "scaled_mm", "_grouped_mm", "empty_like", "zeros_like", "cat",
)
"""Functions of torch that look at the device of what they are given."""


def _unwrap(value: Any) -> Any:
    if isinstance(value, list):
        return [_unwrap(part) for part in value]
    return value.as_subclass(torch.Tensor) if isinstance(value, Pretended) else value


class _OnMeta(TorchFunctionMode):
    """Makes tensors for the card on the meta device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "meta"
        elif getattr(function, "__name__", "") not in LIBRARY or not any(issubclass(own, Pretended) for own in types):
            return function(*args, **kwargs)
        kwargs = {name: _unwrap(value) for name, value in kwargs.items()}
        return function(*map(_unwrap, args), **kwargs).as_subclass(Pretended)


class _Code(bytes):
    """Stands for a cubin."""

    source: cuda_source.Source


CLUSTER = re.compile(rb"__cluster_dims__\((\w+),")


def find_cluster(source: str, macros: dict[str, int]) -> int:
    """Blocks of a cluster of a source's kernels: a macro, or a constant that it states as a number."""
    text = nvrtc.read_source(source)
    found = CLUSTER.search(text)
    if found is None:
        return 1
    stated = re.search(rb"\b" + found[1] + rb" = (\d+)[,;]", text)
    return int(stated[1]) if stated else macros.get(found[1].decode(), 1)


class RecordedKernel:
    """In place of `CudaKernel`."""

    def __init__(self, recording: Recording, code: _Code, entry: str, shared_bytes: int):
        name, options = code.source
        pairs = (option.removeprefix("-D").split("=") for option in options if option.startswith("-D"))
        self.macros = {macro: int(value) for macro, value in pairs}
        self.name, self.entry, self.shared_bytes, self._recording = name, entry, shared_bytes, recording
        self._most_cluster = MOST_CLUSTER
        self.cluster = find_cluster(name, self.macros)
        most = count_block_bytes(recording.card.capability)
        if not 0 <= shared_bytes <= most:
            raise Refused(f"{name} asks for {shared_bytes} of {most} bytes of shared memory: {self.macros}")

    def launch(
        self, programs: int, threads: int, *arguments: Any, is_dependent: bool = False, shared_bytes: int | None = None,
        cluster: int = 1
    ) -> None:
        cluster = max(cluster, self.cluster)
        asked = self.shared_bytes if shared_bytes is None else shared_bytes
        about = f"{self.name} {self.macros}: {programs} blocks of {threads} threads, {asked} bytes"
        if not 0 < programs <= MOST_GRID or not 0 < threads <= MOST_THREADS or threads % 32:
            raise Refused(f"grid or block of {about}")
        if not 0 <= asked <= self.shared_bytes:
            raise Refused(f"more shared memory than the most of {about}")
        if cluster > self._most_cluster or programs % cluster:
            raise Refused(f"clusters of {cluster} in {about}")
        for argument in arguments:
            ctypes.addressof(argument)
        self._recording.launches.append(
            Launch(self.name, self.entry, self.macros, (programs,), threads, asked)
        )

    def share_multiprocessors(self) -> None:
        pass

    def count_resident(self, threads: int) -> int:
        most = count_block_bytes(self._recording.card.capability) + RESERVED_BYTES
        return min(MOST_RESIDENT // threads, most // (self.shared_bytes + RESERVED_BYTES))

    def count_clusters(self, size: int, threads: int) -> int:
        self._most_cluster = MOST_LARGE_CLUSTER
        card = self._recording.card
        return card.clusters if size > MOST_CLUSTER else card.num_sms // size

    describe = cuda_source.CudaKernel.describe


def check_map(
    kind: int, rank: int, shape: list[int], strides: list[int], box: list[int], swizzle: int, address: int
) -> None:
    """Raises `Refused` for what ``cuTensorMapEncodeTiled`` does not take; sizes are given innermost first."""
    size = {0: 1, 6: 2, 9: 2}[kind]
    row, about = box[0] * size, f"a map of {shape} with strides {strides} in boxes {box}, swizzled by kind {swizzle}"
    if not 1 < rank <= MOST_RANK or any(not 0 < count <= 2**32 for count in shape):
        raise Refused(f"dimensions of {about}")
    if any(stride % 16 or not 0 <= stride < 2**40 for stride in strides) or address % 16:
        raise Refused(f"strides or address of {about}")
    if any(not 0 < count <= MOST_BOX for count in box) or row % 16 or row > {0: row, 2: 64, 3: 128}[swizzle]:
        raise Refused(f"box of {about}")


def _encode(name: str, *arguments: Any) -> None:
    if name != "cuTensorMapEncodeTiled":
        raise Refused(f"{name} needs a device")
    _, kind, rank, address, shape, strides, box, _, _, swizzle, *_ = arguments
    check_map(kind, rank, list(shape), list(strides), list(box), swizzle, address.value)


@contextmanager
def pretend(monkeypatch: pytest.MonkeyPatch, card: Card) -> Iterator[Recording]:
    """In the body tensors can be made on the card, and what would be launched there is recorded."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    recording = Recording(card)

    def compile_source(name: str, options: tuple[str, ...]) -> bytes:
        recording.sources[name, options] = None
        code = _Code(repr((name, options)).encode())
        code.source = name, options
        return code

    def note(kernel: str, grid: tuple[int, ...]) -> None:
        sides = (*grid, 1, 1)[:3]
        if not 0 <= sides[0] <= MOST_GRID or any(not 0 <= side <= MOST_GRID_SIDE for side in sides[1:]):
            raise Refused(f"grid {sides} of {kernel}")
        if not all(sides):  # Triton launches nothing then
            return
        recording.launches.append(Launch(kernel, "", {}, sides))

    def refuse(instead: str, error: Exception) -> None:
        raise Refused(instead) from error

    properties = SimpleNamespace(
        multi_processor_count=card.num_sms, major=card.capability[0], minor=card.capability[1], name=card.name,
        shared_memory_per_block_optin=count_block_bytes(card.capability),
    )
    with monkeypatch.context() as patch:
        patch.setattr(cuda_source, "compile_source", compile_source)
        patch.setattr(cuda_source, "call_driver", _encode)
        patch.setattr(cuda_source, "note_fallback", refuse)
        patch.setattr(cuda_source, "CudaKernel", lambda *own: RecordedKernel(recording, *own))
        patch.setattr(JITFunction, "run", lambda self, *_, grid, **__: note(self.__name__, grid))
        patch.setattr(GridExecutor, "__call__", lambda self, *_, **__: note(self.fn.__name__, self.grid))
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: card.capability)
        patch.setattr(torch.cuda, "device", lambda *_: nullcontext())
        patch.setattr(torch.cuda, "current_device", lambda: card.index)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
        patch.setattr(Pretended, "card", card)
        with _OnMeta():
            yield recording
