"""Which part of a checkpoint tensor a rank's parameter holds: `ShardedParameter` and `Cut`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headrace.parallel.share import Share, as_share

Dim = int | Share | Sequence[Share]
"""A dimension: whole, this rank's share of it, or several parts one behind the other with a share of each."""


@dataclass(frozen=True)
class Cut:
    """For each dim of a checkpoint tensor its consecutive parts, and which positions of each are kept."""

    dims: tuple[tuple[Share, ...], ...]

    @classmethod
    def of(cls, dims: Sequence[Dim]) -> Cut:
        """From dims as `headrace.layers.build.Build.parameter` takes them."""
        return cls(tuple((as_share(d),) if isinstance(d, int | Share) else tuple(d) for d in dims))

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return tuple(sum(share.size for share in parts) for parts in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is kept."""
        return tuple(sum(share.length for share in parts) for parts in self.dims)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The kept part of a tensor of ``full_shape``; a view where that is possible."""
        for dim, parts in enumerate(self.dims):
            if all(share.is_whole for share in parts):
                continue
            pieces, at = [], 0
            for share in parts:
                pieces.append(tensor.narrow(dim, at + share.start, share.length))
                at += share.size
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return tensor

    def with_rows(self, share: Share) -> Cut:
        """The cut of a view of some rows, of which ``share`` is kept."""
        return Cut(((share,), *self.dims[1:]))


class ShardedParameter(nn.Parameter):
    """A parameter that knows its ``cut`` of the checkpoint's tensor, and how many rows of memory are behind it, or will
    be once it has memory: ``num_spare``, see `with_spare`."""

    cut: Cut
    num_spare: int = 0

    @staticmethod
    def allocate(
        dims: Sequence[Dim], dtype: torch.dtype, device: torch.device, *, is_deferred: bool = False, num_spare: int = 0
    ) -> ShardedParameter:
        """Uninitialised, with memory for ``num_spare`` rows behind it; ``is_deferred``: without memory until
        `ensure_memory`."""
        cut = Cut.of(dims)
        rows, *rest = cut.shape
        memory = torch.empty((rows + (0 if is_deferred else num_spare), *rest), dtype=dtype, device=device)
        made = ShardedParameter(memory[:rows], requires_grad=False)
        made.cut, made.num_spare = cut, num_spare
        if is_deferred:
            made.untyped_storage().resize_(0)
        return made


def with_spare(parameter: torch.Tensor, num_spare: int) -> torch.Tensor | None:
    """A parameter and the memory for ``num_spare`` rows behind it, as one tensor; None where there is less, such as
    after a move to another device."""
    start, shape = parameter.storage_offset(), (len(parameter) + num_spare, *parameter.shape[1:])
    room = parameter.untyped_storage().nbytes() // parameter.itemsize - start
    if not parameter.is_contiguous() or room < parameter.stride(0) * shape[0]:
        return None
    return torch.as_strided(parameter.detach(), shape, parameter.stride(), start)


def has_memory(parameter: torch.Tensor) -> bool:
    """False of a deferred parameter; no view of it can be made, but by `like_parameter`."""
    return parameter.untyped_storage().nbytes() > 0 or not parameter.numel()


def ensure_memory(parameter: torch.Tensor) -> None:
    """Give memory, uninitialised, to a deferred parameter and its spare rows; others stay as they are."""
    if not has_memory(parameter):
        num_spare = spare_of(parameter)
        spare_bytes = num_spare * (parameter.nbytes // len(parameter)) if num_spare else 0  # a scalar has no rows
        parameter.untyped_storage().resize_(parameter.nbytes + spare_bytes)


def spare_of(parameter: torch.Tensor) -> int:
    """A parameter's ``num_spare``; plain ones have none."""
    return parameter.num_spare if isinstance(parameter, ShardedParameter) else 0


def like_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter, or in place of a deferred one a tensor of its shape without data, whose views show where those of
    the parameter are."""
    return parameter if has_memory(parameter) else torch.empty_like(parameter, device="meta")


def cut_of(parameter: torch.Tensor) -> Cut:
    """A parameter's cut; plain ones are whole."""
    return parameter.cut if isinstance(parameter, ShardedParameter) else Cut.of(tuple(parameter.shape))
