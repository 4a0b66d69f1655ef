"""Drawing a token from each row's logits: what a grammar allows, temperature, min-p, top-k, top-p, draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import Operation, requires

OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2
"""State of a drawn row."""


@dataclass(slots=True)
class DrawParams:
    """Per row, on the device: ``temperature`` (0: the likeliest token), ``top_p`` and ``min_p`` [S] float64; ``top_k``
    (0: all), ``seed`` and ``position`` (index of the drawn token in the row's output) [S] int64.

    Facts about the whole call, known to the host: ``has_min_p``, ``has_top_p``: some row uses it. ``num_ranked``: how
    many of a row's largest logits decide every cut: the largest top_k, V when a row has top_p alone, 0 for no cut.
    None of the three may change what a row draws.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    has_min_p: bool
    has_top_p: bool
    num_ranked: int


DRAW = Operation("draw kernel")
"""``draw(logits [S, V] float32, rows [S] int64, last_token [R] int64, *, params: DrawParams | None = None, masks=None,
mask_of_row=None, before=None) -> drawn [2, S] int64``: ids and states; ``last_token[rows]`` is set to the ids.

First, in place, row s of the logits becomes -inf wherever the bit of a token in ``masks[mask_of_row[s]]`` is 0; masks
are [G, W] int32, W = ceil(V / 32), and token v is bit ``v % 32``, counted from the least significant, of word ``v //
32``; ``mask_of_row`` [S] int32 is negative where nothing is forbidden. Then rows without a temperature, which are all
rows if there are no ``params``, take the token of the greatest logit, and the others draw.

To draw, logits are divided by the temperature. Kept are the tokens with at least ``min_p`` times the likeliest one's
probability; of those the ``top_k`` likeliest; of those the smallest set, likeliest first, whose probability among them
reaches ``top_p``. Tokens tied with the last one kept are kept too. One token is drawn from what is kept, by its
probability there.

A draw depends on nothing but its row's logits, mask, parameters, seed and position: the same seed gives the same tokens
in every batch on the same device. The state is NOT_FINITE where the greatest logit before masking is NaN or infinite
(``before`` [S] float32 are those, of logits that were edited since; else the logits themselves tell), NOTHING_ALLOWED
where the greatest logit is so afterwards, and the id is then some id in [0, V)."""

_on_cpu = requires(device="cpu", dtypes=("float32",))
_on_gpu = requires(device="cuda")
DRAW.add("reference", "headrace.kernels.sample.reference:draw", doc="plain torch, inverse CDF in float64")
DRAW.add(
    "cpu", "headrace.kernels.sample.cpu:draw", supports=_on_cpu, priority=10,
    doc="own C++: one pass to mask and search, cuts by selection"
)
DRAW.add(
    "triton", "headrace.kernels.sample.triton:draw", supports=_on_gpu, priority=10,
    doc="one launch; threshold search, no sort"
)

FIND_BEST = Operation("find_best kernel")
"""``find_best(logits [S, V] float32) -> (values [S], ids [S] int64)``: each row's largest logit and the token that has
it; the value is NaN when the row holds one, and the id is then some id in [0, V)."""

FIND_BEST.add("reference", "headrace.kernels.sample.reference:find_best", doc="plain torch")
FIND_BEST.add("cpu", "headrace.kernels.sample.cpu:find_best", supports=_on_cpu, priority=10, doc="own C++, one pass")
FIND_BEST.add(
    "triton", "headrace.kernels.sample.triton:find_best", supports=_on_gpu, priority=10,
    doc="parts of a row side by side"
)

KEEP_BEST = Operation("keep_best kernel")
"""``keep_best(logits [B, V] float32, rows [B] int64, last_token [R] int64) -> drawn [2, B] int64``: `FIND_BEST` with
what a greedy step does of it: ``drawn[0]`` are the ids, ``drawn[1]`` is 0, or 1 where the largest logit is not finite;
``last_token[rows]`` is set to the ids (rows that occur twice keep one of theirs)."""

KEEP_BEST.add("reference", "headrace.kernels.sample.reference:keep_best", doc="plain torch")
KEEP_BEST.add(
    "triton", "headrace.kernels.sample.triton:keep_best", supports=_on_gpu, priority=10,
    doc="stored by the search itself"
)
