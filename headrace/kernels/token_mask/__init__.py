"""Forbidding tokens by a bit mask, as grammars do."""

from headrace.kernels.operation import Operation, requires

TOKEN_MASK = Operation("token_mask kernel")
"""``token_mask(logits [S, V] float32, masks [G, W] int32, mask_of_row [S] int32) -> (raw [S], values [S], ids [S] int64)``,
W = ceil(V / 32): in place, row s of the logits becomes -inf wherever the bit of a token in ``masks[mask_of_row[s]]`` is 0,
or stays where that is negative. Token v is bit ``v % 32``, counted from the least significant, of word ``v // 32``. ``raw``
are the rows' greatest logits before, ``values`` those after, and ``ids`` the tokens that have them, all as
`headrace.kernels.sample.FIND_BEST` gives them."""

TOKEN_MASK.add("reference", "headrace.kernels.token_mask.reference:token_mask", doc="plain torch")
TOKEN_MASK.add("cpu", "headrace.kernels.token_mask.cpu:token_mask", supports=requires(device="cpu", dtypes=("float32",)), priority=10, doc="own C++, one pass")
TOKEN_MASK.add("triton", "headrace.kernels.token_mask.triton:token_mask", supports=requires(device="cuda"), priority=10, doc="one pass")
