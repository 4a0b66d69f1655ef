"""Forbidding tokens by a bit mask, as grammars do."""

from headrace.kernels.operation import Operation, requires

TOKEN_MASK = Operation("token_mask kernel")
"""``token_mask(logits [S, V] float32, masks [G, W] int32, rows [G] int64) -> None``, W = ceil(V / 32): in place, row
``rows[g]`` of the logits becomes -inf wherever the bit of a token in ``masks[g]`` is 0. Token v is bit ``v % 32``, counted
from the least significant, of word ``v // 32``. ``rows`` holds at least one row and none twice."""

TOKEN_MASK.add("reference", "headrace.kernels.token_mask.reference:token_mask", doc="plain torch")
TOKEN_MASK.add("triton", "headrace.kernels.token_mask.triton:token_mask", supports=requires(device="cuda"), priority=10, doc="one pass")
