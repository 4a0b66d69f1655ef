"""Drawing without sorting: cuts are found by searching for the threshold that a row's kept logits exceed.

S sampled rows, V vocabulary. One program a row reads its logits (from the second-level cache) a few times, gathers
those that a cut can fall on, and searches among these; where they are too many, which takes a flat distribution, in the
whole row. The draw inverts the cumulative distribution in token order at the reference's own uniform number, so both
draw alike.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels import sample
from headrace.kernels.launch import ceil_div
from headrace.kernels.sample import DrawParams

BLOCK = 8192
MAX_REGISTERS = 64
"""Of a thread that draws: a processor then holds two rows. The kernel would take 103, and two fifths more time for 256
rows."""
LOWEST = tl.constexpr(-104.0)  # exp of anything lower is 0 in float32: such a token is never drawn
FORBIDDEN = tl.constexpr(-1.0e30)  # what -inf counts as in a division, which takes three times as long for infinities
DEEP, DEEPER = tl.constexpr(9.0), tl.constexpr(4.0)
"""How far below the best a cut is looked for first, and how much deeper or less deep then. Of two real models (49 k and
262 k words) at temperature 1, at most 6,800 tokens lie above the first, with 0.91 to 0.99 of the probability."""
SEARCH_STEPS = tl.constexpr(16)  # 104 / 4**16 is below the spacing of float32 at the depths that matter
NEGATIVE = tl.constexpr(-float("inf"))
NOT_FINITE, NOTHING_ALLOWED = tl.constexpr(sample.NOT_FINITE), tl.constexpr(sample.NOTHING_ALLOWED)


@triton.jit
def _scaled(row_ptr, at, V, temperature, best, BLOCK: tl.constexpr):
    """Logits over temperature, less the row's largest; no number above `LOWEST` beyond the vocabulary or where one is
    -inf."""
    index = at + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + index, mask=index < V, other=FORBIDDEN)
    return tl.math.div_rn(tl.maximum(x, FORBIDDEN), temperature) - best


@triton.jit
def _above(row_ptr, V, temperature, best, low, a, b, c, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """For three thresholds, how many logits lie above each (and above ``low``), or their probability mass."""
    above_a, above_b, above_c = 0.0, 0.0, 0.0
    for at in range(0, V, BLOCK):
        y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
        weight = tl.where(y > low, tl.exp(y), 0.0) if MASS else tl.where(y > low, 1.0, 0.0)
        above_a += tl.sum(tl.where(y > a, weight, 0.0), axis=0)
        above_b += tl.sum(tl.where(y > b, weight, 0.0), axis=0)
        above_c += tl.sum(tl.where(y > c, weight, 0.0), axis=0)
    return above_a, above_b, above_c


@triton.jit
def _find_threshold(row_ptr, V, temperature, best, low, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest t such that every logit y > t is kept and none below is. A logit is kept while what lies above it (a
    count, or MASS) is less than ``limit``; that falls as y grows, so [t, high] is cut in four until nothing is
    between."""
    lowest_a, _, _ = _above(row_ptr, V, temperature, best, low, low, low, low, MASS, BLOCK)
    t, high = low, tl.full((), 0.0, tl.float32)
    step = tl.where(lowest_a < limit, SEARCH_STEPS, 0)
    while step < SEARCH_STEPS:
        quarter = (high - t) * 0.25
        a, b, c = t + quarter, t + 2.0 * quarter, t + 3.0 * quarter
        above_a, above_b, above_c = _above(row_ptr, V, temperature, best, low, a, b, c, MASS, BLOCK)
        is_done = a == t  # no float left between
        t = tl.where(above_c >= limit, c, tl.where(above_b >= limit, b, tl.where(above_a >= limit, a, t)))
        high = tl.where(above_a < limit, a, tl.where(above_b < limit, b, tl.where(above_c < limit, c, high)))
        step = tl.where(is_done, SEARCH_STEPS, step + 1)
    return t


@triton.jit
def _kept_mass(row_ptr, V, temperature, best, low, top_k, BLOCK: tl.constexpr):
    """Probability mass above ``low``, of ``top_k`` tokens when top_k > 0: of those tied for the last place only so
    many."""
    mass, count, last = 0.0, 0.0, tl.full((), 0.0, tl.float32)
    for at in range(0, V, BLOCK):
        y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
        kept = y > low
        mass += tl.sum(tl.where(kept, tl.exp(y), 0.0), axis=0)
        count += tl.sum(tl.where(kept, 1.0, 0.0), axis=0)
        last = tl.minimum(last, tl.min(tl.where(kept, y, 0.0), axis=0))
    if top_k > 0:
        mass -= tl.maximum(count - top_k.to(tl.float32), 0.0) * tl.exp(last)
    return mass


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Float64 in [0, 1): the reference's SplitMix64 over seed and position."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    bits = _mix(key + (position.to(tl.uint64, bitcast=True) + 1) * golden)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _draw(row_ptr, V, temperature, best, low, uniform, BLOCK: tl.constexpr):
    """The first token whose cumulative weight among those above ``low`` exceeds ``uniform`` of the whole."""
    total = tl.full((), 0.0, tl.float64)
    for at in range(0, V, BLOCK):
        y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
        total += tl.sum(tl.where(y > low, tl.exp(y), 0.0), axis=0).to(tl.float64)
    target = uniform * total
    before = tl.full((), 0.0, tl.float64)
    token = 0
    is_found = total != total  # a row of NaN draws token 0
    for at in range(0, V, BLOCK):
        if not is_found:
            y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
            weight = tl.where(y > low, tl.exp(y), 0.0)
            mass = tl.sum(weight, axis=0).to(tl.float64)
            index = tl.arange(0, BLOCK)
            last = tl.max(tl.where(weight > 0, index, 0), axis=0)
            if mass > 0:
                token = at + last  # stays if rounding leaves the target beyond the end
            if before + mass > target:
                reached = tl.cumsum(weight, axis=0).to(tl.float64) + before
                token = at + tl.minimum(tl.sum((reached <= target).to(tl.int32), axis=0), last)
                is_found = True
            before += mass
    return token


@triton.jit
def _mask(row_ptr, mask_ptr, V, BLOCK: tl.constexpr):
    """Forbid what a mask does not allow; the greatest logit before, NaN if there was one."""
    best, is_broken = tl.full((), NEGATIVE, tl.float32), 0
    for at in range(0, V, BLOCK):
        index = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + index, mask=index < V, other=NEGATIVE)
        best, is_broken = (
            tl.maximum(best, tl.max(x, axis=0)), tl.maximum(is_broken, tl.max((x != x).to(tl.int32), axis=0))
        )
        word = tl.load(mask_ptr + index // 32, mask=index < V, other=-1)
        tl.store(row_ptr + index, NEGATIVE, mask=((word >> (index % 32)) & 1) == 0)
    return tl.where(is_broken > 0, float("nan"), best)


@triton.jit
def _look(row_ptr, V, BLOCK: tl.constexpr):
    """The greatest logit of a row, NaN if it holds one, and the first token that has it."""
    best, is_broken, token = tl.full((), NEGATIVE, tl.float32), 0, tl.full((), 0, tl.int32)
    for at in range(0, V, BLOCK):
        index = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + index, mask=index < V, other=NEGATIVE)
        is_broken = tl.maximum(is_broken, tl.max((x != x).to(tl.int32), axis=0))
        block_best = tl.max(x, axis=0)
        if block_best > best:
            token = tl.min(tl.where(x == block_best, index, V - 1), axis=0)
            best = block_best
    return tl.where(is_broken > 0, float("nan"), best), token


@triton.jit
def _gather(row_ptr, V, temperature, best, low, floor, values_ptr, ids_ptr, BLOCK: tl.constexpr):
    """Write what lies above ``floor``, which is not below ``low``, and its tokens, in their order, as far as there is
    room, and nothing likely into what is left of it. How many these are, their mass, and that of all above ``low``."""
    count, mass, total = 0, 0.0, 0.0
    tl.store(values_ptr + tl.arange(0, BLOCK), tl.full((BLOCK,), FORBIDDEN, tl.float32))
    tl.debug_barrier()
    for at in range(0, V, BLOCK):
        y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
        weight = tl.where(y > low, tl.exp(y), 0.0)
        total += tl.sum(weight, axis=0)
        is_in = y > floor
        added = tl.sum(is_in.to(tl.int32), axis=0)
        if added > 0:
            mass += tl.sum(tl.where(is_in, weight, 0.0), axis=0)
            place = count + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
            has_room = is_in & (place < BLOCK)
            tl.store(values_ptr + place, y, mask=has_room)
            tl.store(ids_ptr + place, at + tl.arange(0, BLOCK), mask=has_room)
            count += added
    tl.debug_barrier()
    return count, mass, total


@triton.jit
def _narrow(row_ptr, V, temperature, best, low, top_k, top_p, values_ptr, ids_ptr, BLOCK: tl.constexpr):
    """Gather what the cuts can fall on. Whether that is what was gathered: not so where it is too much, or takes more
    guesses; and the mass above ``low``."""
    total, is_found, guess = 0.0, tl.full((), 0, tl.int1), 0
    floor = tl.full((), 0.0, tl.float32) - DEEP
    while guess < 2:
        floor = tl.maximum(floor, low)
        count, mass, total = _gather(row_ptr, V, temperature, best, low, floor, values_ptr, ids_ptr, BLOCK)
        is_enough = (floor == low) | tl.where(top_k > 0, count >= top_k, mass >= top_p * total)
        is_found = is_enough & (count <= BLOCK)
        is_hopeless = (count > BLOCK) & (is_enough == 0)
        guess = tl.where(is_found | is_hopeless, 2, guess + 1)
        floor += tl.where(count > BLOCK, DEEPER, -DEEPER)
    return is_found, total


COLUMNS = [
    "drawn_ptr", "rows_ptr", "last_token_ptr", "ids_ptr", "masks_ptr", "mask_of_row_ptr", "before_ptr",
    "temperature_ptr", "top_k_ptr",
    "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr",
]
"""They lie wherever a step's upload has them: as constants of the kernel their alignments would be a dozen kernels,
each compiled while a request waits."""


@triton.jit(
    do_not_specialize=["num_words", "has_masks", "has_before", "has_params"], do_not_specialize_on_alignment=COLUMNS
)
def _draw_kernel(
    logits_ptr, drawn_ptr, rows_ptr, last_token_ptr, values_ptr, ids_ptr, masks_ptr, mask_of_row_ptr, before_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, row_stride, V, num_words, has_masks,
    has_before, has_params,
    BLOCK: tl.constexpr,
):
    """What was not asked for is found out at run time, a branch for each row: one kernel, compiled before the first
    request."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    place = tl.load(mask_of_row_ptr + row, mask=has_masks != 0, other=-1).to(tl.int64)
    before = tl.full((), 0.0, tl.float32)
    if place >= 0:
        before = _mask(row_ptr, masks_ptr + place * num_words, V, BLOCK)
    greatest_left, token = _look(row_ptr, V, BLOCK)
    if place < 0:
        before = greatest_left
    if has_before != 0:
        before = tl.load(before_ptr + row)
    is_broken = (before != before) | (tl.abs(before) == float("inf"))
    is_empty = (greatest_left != greatest_left) | (tl.abs(greatest_left) == float("inf"))
    token = token.to(tl.int64)
    temperature = tl.load(temperature_ptr + row, mask=has_params != 0, other=0.0).to(tl.float32)
    if (temperature > 0) & (greatest_left > NEGATIVE):
        best = tl.math.div_rn(greatest_left, temperature)
        top_k, top_p, min_p = (
            tl.load(top_k_ptr + row), tl.load(top_p_ptr + row).to(tl.float32), tl.load(min_p_ptr + row)
        )
        low = tl.full((), LOWEST, tl.float32)
        if min_p > 0:
            # kept are y >= log(min_p); the rest of the search keeps y > low, so low is the next float below
            floor = tl.log(min_p).to(tl.float32)
            low = tl.maximum(low, floor - tl.maximum(tl.abs(floor) * 1.2e-7, 1e-30))
        size, divisor, is_gathered = tl.full((), 0, tl.int32) + V, temperature, tl.full((), 0, tl.int1)
        if (top_k > 0) | (top_p < 1.0):
            values_ptr += row.to(tl.int64) * BLOCK
            ids_ptr += row.to(tl.int64) * BLOCK
            is_gathered, mass = _narrow(row_ptr, V, temperature, best, low, top_k, top_p, values_ptr, ids_ptr, BLOCK)
            if is_gathered:  # from here on that is the row
                row_ptr, size = values_ptr, tl.full((), BLOCK, tl.int32)
                divisor, best = tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float32)
            if top_k > 0:
                low = _find_threshold(row_ptr, size, divisor, best, low, top_k.to(tl.float32), False, BLOCK)
            if top_p < 1.0:
                if top_k > 0:
                    mass = _kept_mass(row_ptr, size, divisor, best, low, top_k, BLOCK)
                low = _find_threshold(row_ptr, size, divisor, best, low, top_p * mass, True, BLOCK)
        uniform = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        token = _draw(row_ptr, size, divisor, best, low, uniform, BLOCK).to(tl.int64)
        if is_gathered:
            token = tl.load(ids_ptr + token).to(tl.int64)
    tl.store(drawn_ptr + row, token)
    tl.store(
        drawn_ptr + tl.num_programs(0) + row,
        tl.where(is_broken, NOT_FINITE, tl.where(is_empty, NOTHING_ALLOWED, 0)).to(tl.int64)
    )
    tl.store(last_token_ptr + tl.load(rows_ptr + row), token)


def draw(
    logits: torch.Tensor, rows: torch.Tensor, last_token: torch.Tensor, *, params: DrawParams | None = None,
    masks: torch.Tensor | None = None,
    mask_of_row: torch.Tensor | None = None, before: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `headrace.kernels.sample.DRAW`. A row is one program; where the likeliest tokens are all that is asked,
    several."""
    if params is None and masks is None and before is None:
        return keep_best(logits, rows, last_token)
    num_rows, vocab_size = logits.shape
    drawn = torch.empty((2, num_rows), dtype=torch.int64, device=logits.device)
    reals, words = drawn.view(torch.float64), drawn.view(torch.int32)  # stand for what is not there, in its type
    values, ids = logits, words
    if params is not None and (params.num_ranked or params.has_top_p):
        values = torch.empty((num_rows, BLOCK), dtype=torch.float32, device=logits.device)
        ids = torch.empty((num_rows, BLOCK), dtype=torch.int32, device=logits.device)
    columns = (reals, drawn, reals, reals, drawn, drawn)
    if params is not None:
        columns = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.position)
    _draw_kernel[(num_rows,)](
        logits, drawn, rows, last_token, values, ids, words if masks is None else masks,
        words if mask_of_row is None else mask_of_row,
        logits if before is None else before, *columns, logits.stride(0), vocab_size,
        0 if masks is None else masks.shape[1],
        int(masks is not None), int(before is not None), int(params is not None), BLOCK=BLOCK, num_warps=16,
        maxnreg=MAX_REGISTERS,
    )
    return drawn


@triton.jit
def greatest(x):
    """Of a block, NaN if it holds one."""
    return tl.where(tl.max((x != x).to(tl.int32), axis=0) > 0, float("nan"), tl.max(x, axis=0))


@triton.jit
def find_first(x, index, last):
    """The index of the greatest; ``last`` where there is none."""
    return tl.min(tl.where(x == tl.max(x, axis=0), index, last), axis=0)


@triton.jit
def join_parts(part_values_ptr, part_ids_ptr, row, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest of a row's parts, NaN if one is, and its token."""
    part = tl.arange(0, BLOCK)
    x = tl.load(part_values_ptr + row * PARTS + part, mask=part < PARTS, other=NEGATIVE)
    ids = tl.load(part_ids_ptr + row * PARTS + part, mask=part < PARTS, other=0)
    first = find_first(x, part, PARTS - 1)
    return greatest(x), tl.max(tl.where(part == first, ids, 0), axis=0).to(tl.int64)


@triton.jit
def _best_of_part(logits_ptr, values_ptr, ids_ptr, row_stride, V, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    index = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + index, mask=index < V, other=NEGATIVE).to(tl.float32)
    tl.store(values_ptr + row * PARTS + part, greatest(x))
    tl.store(ids_ptr + row * PARTS + part, find_first(x, index, V - 1))


@triton.jit
def _best_of_parts(
    part_values_ptr, part_ids_ptr, values_ptr, ids_ptr, rows_ptr, last_token_ptr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, KEEP: tl.constexpr,
):
    """Values and ids; when KEEP, ``ids_ptr`` [2, B] gets ids and states, and the rows' last tokens are set."""
    row = tl.program_id(0)
    best, token = join_parts(part_values_ptr, part_ids_ptr, row, PARTS, BLOCK)
    tl.store(ids_ptr + row, token)
    if KEEP:
        is_broken = (best != best) | (tl.abs(best) == float("inf"))
        tl.store(ids_ptr + tl.num_programs(0) + row, is_broken.to(tl.int64))
        tl.store(last_token_ptr + tl.load(rows_ptr + row), token)
    else:
        tl.store(values_ptr + row, best)


def _search_parts(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    num_rows, vocab_size = logits.shape
    parts = ceil_div(vocab_size, BLOCK)
    part_values = torch.empty((num_rows, parts), dtype=torch.float32, device=logits.device)
    part_ids = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    if num_rows:
        _best_of_part[(num_rows, parts)](
            logits, part_values, part_ids, logits.stride(0), vocab_size, PARTS=parts, BLOCK=BLOCK, num_warps=8
        )
    return part_values, part_ids, {"PARTS": parts, "BLOCK": 1 << (parts - 1).bit_length(), "num_warps": 1}


def find_best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.sample.FIND_BEST`: parts of a row are searched side by side, then joined."""
    part_values, part_ids, shape = _search_parts(logits)
    values = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _best_of_parts[(logits.shape[0],)](part_values, part_ids, values, ids, ids, ids, KEEP=False, **shape)
    return values, ids


def keep_best(logits: torch.Tensor, rows: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.sample.KEEP_BEST`."""
    part_values, part_ids, shape = _search_parts(logits)
    drawn = torch.empty((2, logits.shape[0]), dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _best_of_parts[(logits.shape[0],)](
            part_values, part_ids, part_values, drawn, rows, last_token, KEEP=True, **shape
        )
    return drawn
