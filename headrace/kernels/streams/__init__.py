"""Hyper-connections: several parallel residual streams instead of one, which each sublayer reads as a weighted sum and
writes back to with mixing (manifold-constrained, arXiv:2512.24880).

T tokens, S streams, D hidden size. Computed in float32; streams are in the model's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.kernels.operation import KernelQuery, Operation, requires

if TYPE_CHECKING:
    import torch

    from headrace.kernels.coded_linear.device_codes import Fp8Rows


class StreamMix(NamedTuple):
    """A sublayer's weights, float32: ``fn`` [(2 + S) S, S * D], whose rows are S of ``pre``, S of ``post`` and,
    row-major, S x S of ``mix``; ``scale`` [3], a factor for each of these; ``base`` [(2 + S) S]."""

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor


class StreamShape(NamedTuple):
    """``iterations`` of Sinkhorn-Knopp, ``eps`` of its sums, ``norm_eps`` of the RMS norms."""

    iterations: int
    eps: float
    norm_eps: float


class Pending(NamedTuple):
    """A sublayer's output ``out`` [T, D], plus ``more`` if there is any, that is still to be written to the streams, by
    ``post`` [T, S] and ``mix`` [T, S, S]."""

    out: torch.Tensor
    post: torch.Tensor
    mix: torch.Tensor
    more: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        """Both parts of the output."""
        return self.out if self.more is None else self.out + self.more


Written = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""Streams that were written, and what was read of them."""
Passed = Written | tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "Fp8Rows | None"]


def end_pass(written: Written, group: int | None, rows: Fp8Rows | None = None) -> Passed:
    """The results of `WRITE_READ_STREAMS` that was asked for rows of this group."""
    return written if group is None else (*written, rows)


READ_STREAMS = Operation("stream read kernel")
"""``read_streams(streams [T, S, D], mix: StreamMix, norm [D], shape: StreamShape) -> (x [T, D], post [T, S] float32,
mix [T, S, S] float32)``: the sublayer's normalised input, and what `WRITE_STREAMS` takes.

``raw`` is ``fn`` times the RMS-normalised streams, flattened to one vector. Each of its parts becomes ``raw * its scale
+ base``; then ``pre`` is ``sigmoid(raw) + eps``, ``post`` ``2 sigmoid(raw)``, and ``mix`` is made doubly stochastic:
softmax of its rows plus ``eps``; columns divided by their sum plus ``eps``; then ``iterations - 1`` times rows and
columns in turn. ``x`` is the sum of ``pre[s] * streams[s]`` in the streams' dtype, RMS-normalised with the weight
``norm``. streams may be an expanded view. The query's shape has ``streams`` and ``width``.
"""

WRITE_STREAMS = Operation("stream write kernel")
"""``write_streams(streams [T, S, D], out [T, D], post [T, S], mix [T, S, S]) -> [T, S, D]``: stream k becomes ``post[k]
* out`` plus the sum over j of ``mix[j, k] * streams[j]``; a new tensor. The query's shape as for `READ_STREAMS`."""

WRITE_READ_STREAMS = Operation("stream write and read kernel")
"""``write_read_streams(streams [T, S, D], pending: Pending, mix: StreamMix, norm [D], shape: StreamShape, *, ranks:
LentSum | None = None, group: int | None = None) -> (new [T, S, D], x [T, D], post [T, S], mixing [T, S, S])``:
`WRITE_STREAMS` of what is
pending, whose two parts are added up and rounded, then `READ_STREAMS` of what was written. With ``ranks`` what is
pending is a rank's part of a sum over these, and is added up first; None, with nothing done, where a kernel of its own
is as fast. With a ``group`` there is a fifth result: x in FP8 as by `QUANTISE_ROWS`, or None where a kernel of its own
is as fast. The query's shape as for these."""


def _reason_against(query: KernelQuery) -> str | None:
    # Triton's blocks are powers of two; a token's S x S matrix and its S x D streams stay in registers
    streams, width = query.shape.get("streams", 0), query.shape.get("width", 0)
    if query.device != "cuda":
        return "needs a cuda device"
    if streams not in (2, 4, 8) or width % 32 or streams * width > 2**15:
        return f"takes 2, 4 or 8 streams of up to {2**15} values, a multiple of 32 each, not {streams} x {width}"
    return None


for _operation, _name, _doc in (
    (READ_STREAMS, "read_streams", "two kernels: split sums of products, then weights, sum of streams and norm"),
    (WRITE_STREAMS, "write_streams", "one kernel"),
    (WRITE_READ_STREAMS, "write_read_streams", "the kernels of both in turn"),
):
    _operation.add("reference", f"headrace.kernels.streams.reference:{_name}", doc="plain torch")
    _operation.add_triton(f"headrace.kernels.streams.triton:{_name}", supports=_reason_against, doc=_doc)


def _reason_against_four(query: KernelQuery) -> str | None:
    shape = query.shape
    if shape.get("streams") != 4 or shape.get("width", 0) % 32 or shape.get("width", 0) > 8192:
        return "takes 4 streams of up to 8,192 values in steps of 32"
    # compiled for Hopper
    if query.capability[0] != 9:
        return "needs compute capability 9"
    return requires(device="cuda", dtypes=("bfloat16",))(query)


for _operation, _name in ((READ_STREAMS, "read_streams"), (WRITE_READ_STREAMS, "write_read_streams")):
    _operation.add(
        "cuda", f"headrace.kernels.streams.cuda:{_name}", supports=_reason_against_four, priority=20,
        doc="own CUDA C++: one kernel for up to 64 tokens, else two, the first of which also writes",
    )
