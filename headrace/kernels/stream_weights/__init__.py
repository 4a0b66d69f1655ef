"""The weights with which parallel residual streams are read, written and mixed (hyper-connections)."""

from headrace.kernels.operation import KernelQuery, Operation, requires

STREAM_WEIGHTS = Operation("stream weights kernel")
"""``stream_weights(raw [T, (2 + S) S], scale [3], base [(2 + S) S], *, iterations, eps) -> (pre [T, S], post [T, S],
mix [T, S, S])``, all float32.

``raw`` has the numbers for ``pre``, ``post`` and, row by row, ``mix``. Each part is ``x * its scale + its base``; then
``pre`` is ``sigmoid(x) + eps`` and ``post`` ``2 sigmoid(x)``. ``mix`` is made doubly stochastic: softmax of its rows
plus ``eps``; columns divided by their sum plus ``eps``; then ``iterations - 1`` times rows and columns in turn. Asked
for with ``streams``.
"""

_on_gpu = requires(device="cuda")


def _reason_against_streams(query: KernelQuery) -> str | None:
    streams = query.shape.get("streams", 0)
    return None if streams in (2, 4, 8) else f"takes 2, 4 or 8 streams, not {streams}"


STREAM_WEIGHTS.add(
    "reference", "headrace.kernels.stream_weights.reference:stream_weights", doc="plain torch, three launches a round"
)
STREAM_WEIGHTS.add(
    "triton", "headrace.kernels.stream_weights.triton:stream_weights",
    supports=lambda q: _on_gpu(q) or _reason_against_streams(q), priority=10,
    doc="one launch; matrices stay in registers",
)
