"""Collects the tensors of one quantised weight from a stream in any order, and decodes it once all have come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from headrace.base.errors import WeightError
from headrace.kernels.coded_linear.codes import NOT_FINITE, CodedMatrix, is_finite
from headrace.layers.quantization.blocks import CodedTensor
from headrace.layers.quantization.contract import Named, SchemeQuery

WEIGHT = "weight"
CACHE_SCALES = frozenset({"k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale"})
"""Scales of keys, values and softmax weights in 8 bits. Where pages hold such, `CacheScales` took those of keys and
values before; others are not used."""
Parts = dict[str, torch.Tensor]
Decode = Callable[[str, Parts], "CodedMatrix | torch.Tensor"]
"""``decode(module, parts)``: the weight of a module from its tensors, by the names that `Layout` lists."""


@dataclass(frozen=True)
class Layout:
    """How modules of one format store a weight: the tensors ``needed`` (names after ``<module>.``), those that some
    writers leave out (``optional``: the weight waits for them until the end of the stream), and those that say nothing
    about it and are dropped (``unused``). ``types``: dtypes of a ``weight`` that is quantised; others are plain.
    ``aliases``: other names of these tensors."""

    format: str
    needed: frozenset[str]
    decode: Decode
    optional: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    types: tuple[torch.dtype, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def find_part(self, kind: str) -> str | None:
        """The name in this layout of a tensor called ``kind``; None if it is of another format."""
        kind = self.aliases.get(kind, kind)
        return kind if kind in self.needed or kind in self.optional or kind in self.unused else None


@dataclass
class _Pending:
    layout: Layout
    parts: Parts = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def assemble(
    tensors: Iterable[Named], find_layout: Callable[[str], Layout | None], query: SchemeQuery
) -> Iterator[Named]:
    """Yield ``<module>.weight`` for each module whose tensors fit its layout, and all other tensors unchanged.

    With ``query.keeps_codes`` a weight comes as `CodedTensor`, else dequantised to float32. Tensors of a module whose
    ``weight`` turns out to be of another type are handed on. Raises `WeightError` naming the format and the tensors
    that a weight lacks.
    """
    pending: dict[str, _Pending] = {}
    plain: set[str] = set()  # modules whose weight is of another type
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        if kind in CACHE_SCALES:
            continue
        layout = find_layout(module)
        part = None if layout is None or module in plain else layout.find_part(kind)
        if layout is None or part is None:
            yield name, tensor
            continue
        kind = part
        _check_type(module, layout, tensor)
        if kind == WEIGHT and (tensor.dtype not in layout.types or tensor.dim() != 2):
            plain.add(module)
            waiting = pending.pop(module, None)
            if waiting is not None:
                yield from ((waiting.names[k], t) for k, t in waiting.parts.items() if k not in layout.unused)
            yield name, tensor
            continue
        if kind in layout.unused:
            continue
        state = pending.setdefault(module, _Pending(layout))
        state.names[kind] = name
        if len(state.parts) + 1 < len(layout.needed | layout.optional):
            state.parts[kind] = tensor.clone()  # a tensor is valid only until the next one is requested
            continue
        del pending[module]
        # codes may be kept as they are, and the tensor is valid only until the next one is requested
        last = tensor.clone() if query.keeps_codes else tensor
        yield _finish(module, layout, {**state.parts, kind: last}, query)
    for module, state in pending.items():
        if WEIGHT in state.layout.needed and WEIGHT not in state.parts:
            yield from ((state.names[kind], tensor) for kind, tensor in state.parts.items())  # another scheme's, or odd
        elif missing := state.layout.needed - set(state.parts):
            raise WeightError(
                f"{module} is stored as {state.layout.format} and lacks {', '.join(sorted(missing))}; it has no scale "
                "or code to be read with, so fetch the checkpoint again"
            )
        else:
            yield _finish(module, state.layout, state.parts, query)


def _check_type(module: str, layout: Layout, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.float8_e5m2 and torch.float8_e4m3fn in layout.types:
        raise WeightError(
            f"{module} is stored as {layout.format} of type e5m2, which is not read; known is e4m3. Take another "
            "checkpoint of the model"
        )


def _finish(module: str, layout: Layout, parts: Parts, query: SchemeQuery) -> Named:
    try:
        weight = layout.decode(module, parts)
    except WeightError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        shapes = ", ".join(f"{kind} {list(tensor.shape)}" for kind, tensor in parts.items())
        raise WeightError(f"{module} does not have the shapes of {layout.format}: {shapes} ({error})") from error
    if isinstance(weight, CodedMatrix):
        if fault := weight.find_fault():
            raise WeightError(f"{module}, stored as {layout.format}: {fault}")
        weight = CodedTensor(weight) if query.keeps_codes else weight.dequantise(torch.float32)
    elif not is_finite(weight):
        raise WeightError(f"{module}, stored as {layout.format}: {NOT_FINITE.format('numbers')}")
    return f"{module}.{WEIGHT}", weight

