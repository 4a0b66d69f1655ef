"""Weights of quantised checkpoints: their common form (`codes`), and products with them on a GPU (`device_codes`)."""

from collections.abc import Callable

from headrace.kernels.linear.waves import Size, choose_tile
from headrace.kernels.operation import LARGE_BLOCK, KernelQuery, Operation, requires, requires_hopper

CODED_LINEAR = Operation("coded linear kernel")
"""``coded_linear(x [T, I], weight: DeviceCodes [O, I], bias [O] | None) -> [T, O]`` in x's dtype.

The query's shape has ``in_features``, ``out_features``, ``bits`` of a code, ``is_float`` (e4m3), ``group`` (inputs that
share a scale), ``rows`` (outputs that share one), ``has_order``, ``looks_up`` (codes stand for entries of a table),
``tiled``, ``super_form`` (the number of `Supers`, or 0), ``has_tail`` (that of rows of another form, or 0) and
``num_rows`` T. Solutions that round x to FP8 say so; all others multiply the weights, dequantised and rounded to x's
dtype, as they are. `choice` measures which is fastest for a number of rows."""

CODED_LINEAR.add(
    "reference", "headrace.kernels.coded_linear.reference:coded_linear", doc="dequantises, then torch's own GEMM"
)

_half_on_gpu = requires(device="cuda", dtypes=("float16", "bfloat16"))
_with_fp8 = requires(device="cuda", dtypes=("float16", "bfloat16"), capability=(8, 9))
_with_hopper = requires(device="cuda", dtypes=("bfloat16",), capability=(9, 0))
_with_large_blocks = requires(device="cuda", dtypes=("bfloat16",), capability=(9, 0), block_bytes=LARGE_BLOCK)
MOST_GEMV_ROWS = 2
MOST_SKINNY_ROWS = 512
MOST_CUDA_ROWS = 8
MOST_CUDA_INPUTS = 98304
"""Of all rows of x together, which a block keeps in shared memory."""
MOST_TILE_INPUTS = 81920
"""The same beside a ring of codes."""
MOST_SUPER_INPUTS = 71680
"""The same of weights of super-blocks, whose mins multiply sums of x."""
MOST_WGMMA_ROWS, MOST_WGMMA_INPUTS = 4, 5 << 16
"""The latter of all rows together."""
LEAST_BLOCK_ROWS, MOST_BLOCK_ROWS = 5, 64
SUPER_BLOCK_ROWS = 2, 256
"""The same of weights of super-blocks."""
LEAST_MANY_ROWS, MOST_MANY_ROWS = 33, 1024
LEAST_GLUON_ROWS, MOST_GLUON_ROWS = 3, 512
LEAST_WAVE_ROWS, LEAST_WAVE_OUTPUTS = 65, 7168
LEAST_SPLIT_ROWS, MOST_SPLIT_ROWS = 17, 256


def _reason_against_codes(query: KernelQuery) -> str | None:
    return (_with_fp8 if query.shape.get("is_float") else _half_on_gpu)(query)


def _reason_against_pieces(query: KernelQuery) -> str | None:
    if query.shape.get("super_form"):
        return "takes scales in one level"
    if query.shape.get("group", 0) % 16 and query.shape["group"] != query.shape.get("in_features"):
        return "takes scales of multiples of 16 inputs"
    return _reason_against_codes(query)


def _reason_against_gemv(query: KernelQuery) -> str | None:
    if query.shape.get("tiled"):
        return "takes no tiles"
    if query.shape.get("num_rows", 1) > MOST_GEMV_ROWS:
        return f"takes at most {MOST_GEMV_ROWS} rows"
    return _reason_against_pieces(query)


def _reason_against_skinny(query: KernelQuery) -> str | None:
    if query.shape.get("num_rows", 1) > MOST_SKINNY_ROWS:
        return f"takes at most {MOST_SKINNY_ROWS} rows"
    return _reason_against_pieces(query)


def reason_against_cuda(query: KernelQuery) -> str | None:
    """Why ``csrc/cuda/coded_rows.cu`` cannot multiply with such codes; None if it can."""
    shape = query.shape
    group, inputs, rows = shape.get("group", 0), shape.get("in_features", 0), shape.get("num_rows", 1)
    if shape.get("looks_up") or shape.get("tiled"):
        return "takes integers that are not in tiles, e4m3 and e2m1"
    if group != inputs and group != 32 and group % 64:
        return "takes scales of 32 inputs or multiples of 64"
    if group != inputs and shape.get("bits") == 4 and group > 64 and group % 128:
        return "takes scales of 32, 64 or multiples of 128 inputs"
    if inputs % 16:
        return "takes inputs in steps of 16"
    if rows > MOST_CUDA_ROWS or rows * inputs > MOST_CUDA_INPUTS:
        return f"takes at most {MOST_CUDA_ROWS} rows and {MOST_CUDA_INPUTS} inputs of all together"
    return _with_large_blocks(query)


def _reason_against_tiles(query: KernelQuery) -> str | None:
    shape = query.shape
    if not shape.get("tiled"):
        return "takes integers in tiles"
    rows, most = shape.get("num_rows", 1), MOST_SUPER_INPUTS if shape.get("super_form") else MOST_TILE_INPUTS
    if rows > MOST_CUDA_ROWS or rows * shape.get("in_features", 0) > most:
        return f"takes at most {MOST_CUDA_ROWS} rows and {most} inputs of all together"
    return _with_large_blocks(query)


def _reason_against_tile_block(query: KernelQuery) -> str | None:
    shape = query.shape
    if not shape.get("tiled"):
        return "takes integers in tiles"
    # where no kernel of Triton is beside it, it begins and ends elsewhere
    bounds = SUPER_BLOCK_ROWS if shape.get("super_form") else (LEAST_BLOCK_ROWS, MOST_BLOCK_ROWS)
    if not bounds[0] <= shape.get("num_rows", bounds[0]) <= bounds[1]:
        return f"takes {bounds[0]} to {bounds[1]} rows"
    return _with_large_blocks(query)


def _reason_against_many_tiles(query: KernelQuery) -> str | None:
    shape = query.shape
    if not shape.get("tiled") or shape.get("bits") not in (4, 6):
        return "takes integers of 4 or 6 bits in tiles"
    if not LEAST_MANY_ROWS <= shape.get("num_rows", LEAST_MANY_ROWS) <= MOST_MANY_ROWS:
        return f"takes {LEAST_MANY_ROWS} to {MOST_MANY_ROWS} rows"
    return requires_hopper(query) or _with_large_blocks(query)


def _reason_against_scaled(query: KernelQuery) -> str | None:
    shape = query.shape
    if not shape.get("is_float"):
        return "takes 8-bit floats"
    if shape.get("has_order") or shape.get("in_features", 0) % 16 or shape.get("out_features", 0) % 16:
        return "takes inputs and outputs in steps of 16"
    return _with_fp8(query)


def _reason_against_rows(query: KernelQuery) -> str | None:
    if query.shape.get("group", 0) < query.shape.get("in_features", 0):
        return "takes scales of outputs or of the whole weight"
    return _reason_against_scaled(query)


def _reason_against_squares(query: KernelQuery) -> str | None:
    shape = query.shape
    if shape.get("group") != 128 or shape.get("rows") != 128:
        return "takes scales of blocks of 128 x 128"
    if shape.get("in_features", 0) % 128 or shape.get("out_features", 0) % 128:
        return "takes inputs and outputs in steps of 128"
    return _with_hopper(query)


def _reason_against_blocks(query: KernelQuery) -> str | None:
    if query.shape.get("group", 0) not in (32, 64, 128):
        return "takes scales of 32, 64 or 128 inputs"
    return _reason_against_scaled(query)


def _reason_against_few(query: KernelQuery) -> str | None:
    shape, rows = query.shape, query.shape.get("num_rows", 1)
    inputs, outputs = shape.get("in_features", 0), shape.get("out_features", 0)
    if shape.get("group") not in (128, inputs) or inputs % 128:
        return "takes inputs in steps of 128 and scales of 128 or all"
    if rows > MOST_WGMMA_ROWS or rows * inputs > MOST_WGMMA_INPUTS:
        return f"takes at most {MOST_WGMMA_ROWS} rows and {MOST_WGMMA_INPUTS} inputs of all together"
    if outputs % 16:
        return "takes outputs in steps of 16"
    return requires_hopper(query) or _reason_against_scaled(query) or _with_hopper(query)


def _reason_against_dependent(query: KernelQuery) -> str | None:
    return None if query.capability >= (9, 0) else "needs compute capability 9.0, from which kernels overlap"


def _reason_against_alone(query: KernelQuery) -> str | None:
    return "the same with dependent launch is faster here" if query.capability >= (9, 0) else None


def _also(
    first: Callable[[KernelQuery], str | None], second: Callable[[KernelQuery], str | None]
) -> Callable[[KernelQuery], str | None]:
    return lambda query: first(query) or second(query)


for _name, _supports, _doc in (
    ("gemv", _reason_against_gemv, "own GEMV: codes are read once and multiplied on CUDA cores"),
    ("skinny", _reason_against_skinny, "own GEMM for few rows: codes become operands of tensor cores in registers"),
):
    CODED_LINEAR.add(
        f"triton_{_name}", f"headrace.kernels.coded_linear.triton:{_name}",
        supports=_also(_reason_against_alone, _supports), priority=20, doc=_doc,
    )
    CODED_LINEAR.add(
        f"triton_{_name}_pdl", f"headrace.kernels.coded_linear.triton:{_name}_pdl",
        supports=_also(_reason_against_dependent, _supports), priority=25, doc="the same, with dependent launch",
    )
CODED_LINEAR.add(
    "cuda", "headrace.kernels.coded_linear.cuda:multiply", supports=reason_against_cuda, priority=30,
    doc="own CUDA C++: tensor cores, many codes on their way, with dependent launch",
)
CODED_LINEAR.add(
    "cuda_fp8", "headrace.kernels.coded_linear.fp8_rows:multiply", supports=_reason_against_few, priority=32,
    doc="own CUDA C++ for Hopper: codes are operands of tensor cores as they are; rounds groups of 128 inputs of each "
    "row to FP8 with a scale",
)
CODED_LINEAR.add(
    "cuda_tiles", "headrace.kernels.coded_linear.tiles:multiply", supports=_reason_against_tiles, priority=30,
    doc="own CUDA C++: tensor cores, bulk copies of tiles that begin before the previous kernel has ended",
)
CODED_LINEAR.add(
    "cuda_tile_block", "headrace.kernels.coded_linear.tiled_block:multiply", supports=_reason_against_tile_block,
    priority=28, doc="own CUDA C++ for tens of rows: codes are decoded once for all rows of a block",
)
CODED_LINEAR.add(
    "cuda_tile_many", "headrace.kernels.coded_linear.tiled_many:multiply", supports=_reason_against_many_tiles,
    priority=27, doc="own CUDA C++ for Hopper, tens to hundreds of rows: codes become operands of tensor cores while "
    "products of the codes before run",
)
CODED_LINEAR.add(
    "triton_expand", "headrace.kernels.coded_linear.expand:expand_and_multiply", supports=_reason_against_codes,
    priority=5, doc="dequantises by an own kernel, then torch's GEMM",
)


def _reason_against_gluon(query: KernelQuery) -> str | None:
    shape = query.shape
    if not LEAST_GLUON_ROWS <= shape.get("num_rows", LEAST_GLUON_ROWS) <= MOST_GLUON_ROWS:
        return f"takes {LEAST_GLUON_ROWS} to {MOST_GLUON_ROWS} rows"
    if shape.get("group") not in (128, shape.get("in_features")):
        return "takes scales of 128 inputs or of outputs"
    if shape.get("group") == 128 and shape.get("rows", 1) not in (1, 128):
        return "takes scales of an output or of 128"
    return requires_hopper(query) or _reason_against_scaled(query) or _with_hopper(query)


def _reason_against_wave(query: KernelQuery) -> str | None:
    shape, rows = query.shape, query.shape.get("num_rows", LEAST_WAVE_ROWS)
    if shape.get("rows", 1) > 1:
        return "takes scales of outputs"
    size = Size(rows, shape.get("out_features", 0), shape.get("in_features", 0), True)
    if rows < LEAST_WAVE_ROWS or size.width < LEAST_WAVE_OUTPUTS or choose_tile(size) is None:
        return "takes some hundred rows and gate and up together, whose tiles fill the device at once"
    return requires_hopper(query) or _reason_against_rows(query) or _with_hopper(query)


def _reason_against_split(query: KernelQuery) -> str | None:
    shape, rows = query.shape, query.shape.get("num_rows", LEAST_SPLIT_ROWS)
    if not LEAST_SPLIT_ROWS <= rows <= MOST_SPLIT_ROWS:
        return f"takes {LEAST_SPLIT_ROWS} to {MOST_SPLIT_ROWS} rows"
    if (shape.get("group"), shape.get("rows")) not in ((128, 128), (shape.get("in_features"), 1)):
        return "takes scales of outputs or of blocks of 128 x 128"
    if _reason_against_wave(query) is None:
        return "leaves gate and up to tiles that fill the device at once"
    return requires_hopper(query) or _reason_against_scaled(query) or _with_hopper(query)


FP8_LINEAR = Operation("fp8 linear kernel")
"""``fp8_linear(rows: Fp8Rows of x [T, I], weight: DeviceCodes [O, I], bias [O] | None, dtype) -> [T, O]`` in ``dtype``;
rows have a scale each, or one per group where the weight has groups of inputs. Each solution has the name of one of
`CODED_LINEAR`, which does the same after it has rounded its rows."""

FP8_SUMS = Operation("fp8 linear kernel with partial sums")
"""``fp8_sums(rows, weight, dtype)``: as `FP8_LINEAR` without a bias, or partial sums as of `CODED_SUMS`."""

FP8_GATED = Operation("fp8 gated linear kernel")
"""``fp8_gated(rows, weight, bias, dtype, activation) -> [T, O / 2]``: `FP8_LINEAR` followed by a gated activation of
`GATED_ACTIVATIONS`; the gate's outputs come first, O / 2 a multiple of 8."""

for _name, _function, _supports, _priority, _doc in (
    ("cuda_wave", "wave:{}_rows", _reason_against_wave, 16, "own CUDA C++ for some hundred rows in one wave of tiles"),
    ("cuda_split", "fp8_split:{}_rows", _reason_against_split, 16, "own CUDA C++ in tiles of all rows that there are"),
    ("gluon_fp8", "hopper:{}_rows", _reason_against_gluon, 17, "own FP8 GEMM for tens to hundreds of rows"),
    ("scaled_mm", "scaled:{}_rows", _reason_against_rows, 15, "torch's FP8 GEMM"),
    ("scaled_mm_blocks", "scaled:{}_squares", _reason_against_squares, 12, "torch's FP8 GEMM with block scales"),
    ("triton_fp8_blocks", "scaled:{}_blocks", _reason_against_blocks, 10, "own FP8 GEMM with block scales"),
):
    CODED_LINEAR.add(
        _name, f"headrace.kernels.coded_linear.{_function.format('linear')}", supports=_supports, priority=_priority,
        doc=f"{_doc}; rounds each row of x, or each group of its inputs, to FP8 with a scale",
    )
    FP8_LINEAR.add(_name, f"headrace.kernels.coded_linear.{_function.format('multiply')}", doc=_doc)
FP8_SUMS.add("gluon_fp8", "headrace.kernels.coded_linear.hopper:multiply_row_sums", doc="leaves its sums as they are")
FP8_GATED.add("cuda_wave", "headrace.kernels.coded_linear.wave:multiply_gated_rows", doc="in one kernel")
FP8_GATED.add(
    "cuda_split", "headrace.kernels.coded_linear.fp8_split:multiply_gated_rows",
    doc="few rows by the next, more by two kernels",
)
FP8_GATED.add("gluon_fp8", "headrace.kernels.coded_linear.hopper:multiply_gated_rows", doc="in one kernel")

GROUPED_CODED = Operation("grouped coded linear kernel")
"""``grouped(x [T, G, I], weight: DeviceCodes [G * O, I]) -> [T, G * O]`` in x's dtype: a block-diagonal product, each
group with its own matrix. x may be strided, its last dimension contiguous. The solutions but the reference take e4m3
with scales of 128 inputs or all; `headrace.kernels.coded_linear.forms` calls them for few rows. The query's shape has
``in_features`` I and ``out_features`` O."""


def _reason_against_groups(query: KernelQuery) -> str | None:
    if query.shape.get("in_features", 0) % 128 or query.shape.get("out_features", 0) % 32:
        return "takes inputs in steps of 128 and outputs of a group in steps of 32"
    return _with_fp8(query)


GROUPED_CODED.add(
    "reference", "headrace.kernels.coded_linear.reference:grouped", doc="dequantises, then torch's own batched GEMM"
)
GROUPED_CODED.add(
    "triton", "headrace.kernels.coded_linear.grouped:multiply", supports=_reason_against_groups, priority=10,
    doc="FP8 codes become operands of tensor cores in registers",
)
GROUPED_CODED.add(
    "triton_pdl", "headrace.kernels.coded_linear.grouped:multiply_pdl",
    supports=_also(_reason_against_dependent, _reason_against_groups), priority=15,
    doc="the same, with dependent launch",
)


def _reason_against_group_tiles(query: KernelQuery) -> str | None:
    if query.shape.get("out_features", 0) % 64:
        return "takes outputs of a group in steps of 64"
    return requires_hopper(query) or _with_hopper(query)


GROUPED_CODED.add(
    "cuda", "headrace.kernels.coded_linear.fp8_rows:multiply_groups",
    supports=_also(_reason_against_groups, _reason_against_group_tiles), priority=20,
    doc="rows rounded to FP8: own CUDA C++, for 9 to 16 and other tables than of 128 x 128 in Gluon",
)

CODED_FLOAT = Operation("coded linear kernel with float32 output")
"""``coded_float(x [T, I], weight: DeviceCodes [O, I]) -> [T, O]`` float32: as `CODED_LINEAR`, unrounded, of the
solutions of that that have these names. For heads, of which O may be hundreds of thousands."""

CODED_FLOAT.add("reference", "headrace.kernels.coded_linear.reference:coded_float", doc="plain torch")
for _name, _function, _doc in (
    ("triton_gemv", "triton:gemv_float", "own GEMV"), ("triton_gemv_pdl", "triton:gemv_float_pdl", "own GEMV"),
    ("triton_skinny", "triton:skinny_float", "own GEMM for few rows"),
    ("triton_skinny_pdl", "triton:skinny_float_pdl", "own GEMM for few rows"),
    ("cuda_tiles", "tiles:multiply_float", "own CUDA C++"),
    ("cuda_tile_block", "tiled_block:multiply_float", "own CUDA C++, as sums"),
    ("cuda_tile_many", "tiled_many:multiply_float", "own CUDA C++, as sums"),
    ("triton_expand", "expand:expand_and_multiply_float", "dequantises some outputs at a time, then torch's GEMM"),
):
    CODED_FLOAT.add(_name, f"headrace.kernels.coded_linear.{_function}", doc=_doc)

CODED_SUMS = Operation("coded linear kernel with partial sums")
"""``coded_sums(x [T, I], weight: DeviceCodes [O, I])``: as `CODED_LINEAR` without a bias, or split-K partial sums
[S, T, O] float32, which `headrace.kernels.rowwise.ADD_RMS_NORM` adds up. Of the solutions of `CODED_LINEAR`, by their
names, those that split inputs."""

CODED_SUMS.add("triton_skinny", "headrace.kernels.coded_linear.triton:skinny_sums", doc="leaves its sums as they are")
CODED_SUMS.add("cuda_tile_block", "headrace.kernels.coded_linear.tiled_block:multiply_sums", doc="the same")
CODED_SUMS.add("cuda_tile_many", "headrace.kernels.coded_linear.tiled_many:multiply_sums", doc="the same")
CODED_SUMS.add("triton_skinny_pdl", "headrace.kernels.coded_linear.triton:skinny_sums_pdl", doc="the same")

CODED_GATED = Operation("gated coded linear kernel")
"""``coded_gated(x [T, I], weight: DeviceCodes [2F, I], bias [2F] | None, gate: Gate) -> [T, F]``: as `GATED_LINEAR`,
clamped of unrounded numbers; or None where separate kernels are as fast. By the names of `CODED_LINEAR`, like the next.
"""

CODED_GATED.add("cuda", "headrace.kernels.coded_linear.cuda:multiply_gated", doc="one kernel")
CODED_GATED.add("cuda_fp8", "headrace.kernels.coded_linear.fp8_rows:multiply_gated", doc="one kernel")
CODED_GATED.add(
    "cuda_wave", "headrace.kernels.coded_linear.wave:multiply_gated",
    doc="rounds each row to FP8 with a scale, then one kernel",
)
CODED_GATED.add(
    "triton_expand", "headrace.kernels.coded_linear.expand:expand_and_gate", doc="dequantises, then own CUDA C++"
)
CODED_GATED.add("cuda_tiles", "headrace.kernels.coded_linear.tiles:multiply_gated", doc="one kernel")
CODED_GATED.add("cuda_tile_many", "headrace.kernels.coded_linear.tiled_many:multiply_gated", doc="one kernel")

CODED_NORM_LINEAR = Operation("norm_linear kernel of codes")
"""``coded_norm_linear(x, residual [T, I], norm: Norm, weight: DeviceCodes [O, I], bias [O] | None, activation="") ->
(out, total)``: as `NORM_LINEAR`, but the normalised row is rounded. Rows begin at multiples of 16 bytes; the weight has
no ``order``."""

CODED_NORM_LINEAR.add("cuda", "headrace.kernels.coded_linear.cuda:multiply_normalised", doc="one kernel")
CODED_NORM_LINEAR.add("cuda_fp8", "headrace.kernels.coded_linear.fp8_rows:multiply_normalised", doc="one kernel")
CODED_NORM_LINEAR.add("cuda_tiles", "headrace.kernels.coded_linear.tiles:multiply_normalised", doc="one kernel")

EXPAND_CODES = Operation("code expansion kernel")
"""``expand(weight: DeviceCodes [O, I], dtype) -> [O, I]``: the plain weight, computed in float32 and rounded once, its
inputs in their own order."""

EXPAND_CODES.add("reference", "headrace.kernels.coded_linear.reference:dequantise", doc="plain torch")
EXPAND_CODES.add(
    "triton", "headrace.kernels.coded_linear.expand:expand", supports=_reason_against_codes, priority=10,
    doc="one pass over the codes"
)

QUANTISE_ROWS = Operation("row fp8 quantisation kernel")
"""``quantise_rows(x [T, I], group=0) -> Fp8Rows``: a scale is the largest magnitude of the group (0: of the row) over
448, or 1 for a group of (nearly) zeros. Computed in float32, by the scale's reciprocal."""

NORM_ROWS = Operation("norm with fp8 rows kernel")
"""``norm_rows(x | None, residual [T, D], weight [D], eps, offset=0.0, *, group=0) -> (Fp8Rows, new_residual)``:
`ADD_RMS_NORM`, or for no x `RMS_NORM` of the residual, then `QUANTISE_ROWS`."""

GATE_ROWS = Operation("gated activation with fp8 rows kernel")
"""``gate_rows(x [T, 2F], gate: Gate, group=0) -> Fp8Rows`` of [T, F]: `SILU_MUL`, `GELU_TANH_MUL` or `CLAMPED_SWIGLU`,
then `QUANTISE_ROWS`."""

for _operation, _name in ((QUANTISE_ROWS, "quantise_rows"), (NORM_ROWS, "norm_rows"), (GATE_ROWS, "gate_rows")):
    _operation.add("reference", f"headrace.kernels.coded_linear.reference:{_name}", doc="plain torch")
    _operation.add(
        "triton", f"headrace.kernels.coded_linear.fp8_triton:{_name}", supports=_with_fp8, priority=10,
        doc="one pass over a row",
    )
    _operation.add(
        "triton_pdl", f"headrace.kernels.coded_linear.fp8_triton:{_name}_pdl", supports=_with_hopper, priority=15,
        doc="with dependent launch",
    )
