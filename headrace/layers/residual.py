"""The residual stream of a decoder, the norms that read it and the branches (attention, MLP) that add to it.

A branch's output is added to the stream inside the norm after it: one kernel reads and writes the stream instead of
two. Until then the output is *pending*. T tokens, D hidden size, S partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from headrace.kernels.collective import BegunSum
from headrace.layers.lora.bank import Adaptation, LinearBank


@dataclass(frozen=True, slots=True)
class Addition:
    """What `LinearBank.begin` of a bank began."""

    bank: LinearBank
    begun: Adaptation


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of ``parts``, one behind the other; of one part the same tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Residual:
    """The stream [T, D] and the latest branch's output, which the next norm adds to it. One object a step.

    ``pending`` is one of:
    - None: nothing to add. Also after a product that was accumulated into ``stream`` itself (many rows).
    - [T, D] in the stream's dtype: the output.
    - [S, T, D] float32: partial sums of the output, as a product split over its inputs leaves them, one from each
      program. They are added up in this order and rounded to the stream's dtype before the addition.

    ``group``: what adds up the pending outputs of several ranks, which makes the output: a `Group`, or a sum that it
    has begun. None where each rank has all of it. All of them have the same stream.

    ``addition``: what adapters add to what is pending, which is then [T, D] or partial sums; a norm that fuses it takes
    it, everything else calls `finish` first.

    ``slices``: residuals of consecutive rows, which go through norms and products one after the other; this object has
    no stream meanwhile. By default the residual itself.

    Hazard: norms and products overwrite ``stream`` in place. Code that needs an older value must copy it, and a
    branch must have read its input before it adds its output: `NoNorm` returns the stream itself.
    """

    __slots__ = ("_slices", "addition", "group", "pending", "stream")

    def __init__(self, stream: torch.Tensor, pending: torch.Tensor | None = None):
        self.stream, self.pending = stream, pending
        self.group: BegunSum | None = None
        self.addition: Addition | None = None
        self._slices: tuple[Residual, ...] = ()

    @property
    def slices(self) -> tuple[Residual, ...]:
        """See the class."""
        return self._slices or (self,)

    def split(self, lengths: Sequence[int]) -> None:
        """Have slices of so many rows from now on; nothing may be pending."""
        assert self.pending is None and not self._slices
        if len(lengths) > 1:
            self._slices = tuple(Residual(rows) for rows in self.stream.split(list(lengths)))
            del self.stream

    def rows_of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """The rows of ``x`` [T, ...] that belong to each slice."""
        return x.split([len(rows.stream) for rows in self._slices]) if self._slices else (x,)

    def join(self) -> None:
        """Be whole again, with what was pending in slices added."""
        if self._slices:
            self.stream = torch.cat([rows.add_pending() for rows in self._slices])
            self._slices = ()

    def finish(self) -> None:
        """Add what adapters add to what is pending, if anything, by a kernel of its own."""
        addition, x, self.addition = self.addition, self.pending, None
        if addition is not None and x is not None:
            addition.bank.finish(addition.begun, x if x.dim() == 2 else x[0])  # to any of the partial sums

    def gather(self) -> None:
        """Add up what is pending on several ranks, if it is, by a collective of its own."""
        self.finish()
        group, x = self.group, self.pending
        self.group = None
        if group is not None and x is not None:
            self.pending = group.all_reduce(x if x.dim() == 2 else x.sum(0).to(self.stream.dtype))

    def add_pending(self) -> torch.Tensor:
        """The stream after the pending output has been added, by a kernel of its own; for norms without a fused one."""
        self.gather()
        x, self.pending = self.pending, None
        if x is not None:
            # partial sums are added up in float32 and rounded, as the product of an unsplit kernel would be
            self.stream.add_(x if x.dim() == 2 else x.sum(0).to(self.stream.dtype))
        return self.stream

    def keep_rows(self, rows: torch.Tensor | None) -> None:
        """Drop all rows of the stream but these, [n] int64 (None: keep all); nothing may be pending."""
        if rows is not None:
            self.stream = self.stream.index_select(0, rows)


class Norm(nn.Module):
    """``x [T, D] -> [T, D]``, normalised."""

    def add(self, residual: Residual) -> torch.Tensor:
        """Add the pending output to the stream and return the normalised stream [T, D]. The result may be the stream
        itself (`NoNorm`)."""
        return self(residual.add_pending())

    def add_all(self, residual: Residual) -> torch.Tensor:
        """As `add`, of all slices."""
        return join_rows([self.add(rows) for rows in residual.slices])


class Branch(nn.Module):
    """Attention or an MLP: ``x [T, D] -> [T, D]`` of a normalised x.

    A branch whose first product is fused with the norm before it replaces `read`; one whose last product may leave
    partial sums replaces `add` too. An attention branch that prunes rows (``ForwardBatch.queries``) returns [S, D], and
    `read` and `add` prune the residual as well.

    ``takes_slices``: `add` takes a residual in slices, and leaves the output of each pending there, whose sum over the
    ranks has begun before the next one is computed (`Group.begin_sum`).
    """

    takes_slices: ClassVar[bool] = False

    def read(self, norm: Norm, residual: Residual) -> torch.Tensor:
        """``branch(norm(residual))`` [T, D]; what was pending has been added to the stream."""
        return self(norm.add(residual))

    def add(self, norm: Norm, residual: Residual) -> None:
        """As `read`, but the output is left pending in ``residual``, in whichever form is fastest to produce."""
        residual.pending = self.read(norm, residual)
