"""Writers of quantised checkpoints, from the documented layouts and, for compressed-tensors, by that package: loops
over single codes, which share nothing with the readers. Each returns a module's tensors, by name, and the weight [O, I]
that they stand for, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
FP8_MOST = 448.0
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], dtype=torch.float64)


def pack_stream(codes: list[int], bits: int) -> list[int]:
    """Codes as one little-endian stream of bits in signed 32-bit words."""
    stream = sum(code << (bits * place) for place, code in enumerate(codes))
    words = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(codes) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def round_integers(
    weight: torch.Tensor, bits: int, ids: torch.Tensor, *, symmetric: bool, scale_dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [O, I], scales and zeros [O, G], and the float64 weight; ``ids`` [I] is each input's group."""
    most, groups = (1 << bits) - 1, int(ids.max()) + 1
    scales, zeros = torch.zeros(len(weight), groups, dtype=scale_dtype), torch.zeros(len(weight), groups).long()
    for group in range(groups):
        part = weight[:, ids == group]
        if symmetric:
            scales[:, group] = (2 * part.abs().amax(1) / most).to(scale_dtype)
            zeros[:, group] = (most + 1) // 2
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = ((high - low) / most).to(scale_dtype)
            zeros[:, group] = (-low / scales[:, group].float()).round().clamp(0, most).long()
    steps, offsets = scales.double()[:, ids], zeros[:, ids]
    codes = (weight.double() / steps + offsets).round().clamp(0, most).long()
    return codes, scales, zeros, (codes - offsets).double() * steps


def gptq(
    weight: torch.Tensor, bits: int = 4, group: int = 32, *, symmetric: bool = True, order: bool = False,
    v2: bool = False, with_ids: bool = True,
) -> Written:
    """``order``: activation order, which scatters the inputs of a group."""
    inputs = weight.shape[1]
    group = inputs if group == -1 else group
    ids = torch.arange(inputs) // group
    if order:
        ids = ids[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    codes, scales, zeros, expected = round_integers(weight, bits, ids, symmetric=symmetric)
    stored = zeros if v2 else (zeros - 1) % (1 << bits)
    tensors = {
        "qweight": torch.tensor([pack_stream(row, bits) for row in codes.tolist()], dtype=torch.int32).T,
        "qzeros": torch.tensor([pack_stream(row, bits) for row in stored.T.tolist()], dtype=torch.int32),
        "scales": scales.T,
    }
    return tensors | ({"g_idx": ids.int()} if with_ids else {}), expected


def awq(weight: torch.Tensor, group: int = 32) -> Written:
    """The gemm packing: word j of a row holds outputs 8 j + (0, 2, 4, 6, 1, 3, 5, 7), from the lowest bits on."""
    codes, scales, zeros, expected = round_integers(
        weight, 4, torch.arange(weight.shape[1]) // group, symmetric=False
    )

    def pack(table: torch.Tensor) -> torch.Tensor:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return torch.tensor([
            [pack_stream([row[at + place] for place in order], 4)[0] for at in range(0, len(row), 8)]
            for row in table.T.tolist()
        ], dtype=torch.int32)

    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales.T}, expected


def awq_gemv(weight: torch.Tensor, group: int = 64) -> Written:
    """The gemv packing: outputs in rows, tables padded to a width that its kernel wants."""
    outputs, inputs = weight.shape
    codes, scales, zeros, expected = round_integers(weight, 4, torch.arange(inputs) // group, symmetric=False)
    multiple = {128: 1, 64: 2, 32: 4}[group]
    words = -(-inputs // (8 * group * multiple)) * multiple
    padded = torch.zeros(outputs, words * 8).long()
    padded[:, : zeros.shape[1]] = zeros
    wide = torch.zeros(outputs, words * 8, dtype=torch.float16)
    wide[:, : scales.shape[1]] = scales
    return {
        "qweight": torch.tensor([pack_stream(row, 4) for row in codes.tolist()], dtype=torch.int32),
        "qzeros": torch.tensor([pack_stream(row, 4) for row in padded.tolist()], dtype=torch.int32), "scales": wide,
    }, expected


def _spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    rows = scales.double().repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def fp8_block(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128), *, name: str = "weight_scale_inv", powers: str = ""
) -> Written:
    """``powers``: scales are powers of two, kept as "float32" or "e8m0"."""
    outputs, inputs = weight.shape
    scales = torch.stack([
        torch.stack([
            weight[i : i + block[0], j : j + block[1]].abs().max() / FP8_MOST for j in range(0, inputs, block[1])
        ]) for i in range(0, outputs, block[0])
    ])
    if powers:
        scales = torch.exp2(scales.log2().ceil())
    spread = _spread(scales, block, weight.shape)
    codes = (weight.double() / spread).clamp(-FP8_MOST, FP8_MOST).float().to(torch.float8_e4m3fn)
    kept = scales.to(torch.float8_e8m0fnu) if powers == "e8m0" else scales
    return {"weight": codes, name: kept}, codes.double() * spread


def fp8_tensor(weight: torch.Tensor) -> Written:
    """AutoFP8's and ModelOpt's: one scale for the weight, one for activations."""
    tensors, expected = fp8_block(weight, tuple(weight.shape), name="weight_scale")
    return {**tensors, "weight_scale": tensors["weight_scale"].reshape(()), "input_scale": torch.tensor(0.03)}, expected


def fp8_channel(weight: torch.Tensor) -> Written:
    """FBGEMM's: a scale per output."""
    return fp8_block(weight, (1, weight.shape[1]), name="weight_scale")


def fp8_modelopt_blocks(weight: torch.Tensor) -> Written:
    """ModelOpt's FP8_PB_WO: scales keep the blocks' dims, [O / 128, 1, I / 128, 1]."""
    tensors, expected = fp8_block(weight, name="weight_scale")
    return {**tensors, "weight_scale": tensors["weight_scale"][:, None, :, None]}, expected


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (values.unsqueeze(-1) - table).abs().argmin(-1)


def nvfp4(weight: torch.Tensor) -> Written:
    """ModelOpt's: groups of 16 with scales in e4m3, and one float32 scale of these."""
    outputs, inputs = weight.shape
    groups = weight.double().unflatten(1, (-1, 16))
    factor = (weight.abs().max() / (6 * FP8_MOST)).float()
    scales = (groups.abs().amax(2) / 6 / factor).clamp(1e-3, FP8_MOST).float().to(torch.float8_e4m3fn)
    steps = scales.double() * factor.double()
    codes = _nearest(groups / steps.unsqueeze(2), E2M1)
    expected = (E2M1[codes] * steps.unsqueeze(2)).flatten(1)
    flat = codes.view(outputs, inputs)
    packed = (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.ones(())}, expected


def nf4(weight: torch.Tensor, *, nested: bool = False, block: int = 64) -> Written:
    """bitsandbytes': blocks of the flattened weight, the first code of a byte in its high half. ``nested``: the blocks'
    maxima are codes of a map, in blocks of 256, plus their mean."""
    flat = weight.double().flatten()
    padded = torch.cat((flat, torch.zeros(-len(flat) % block, dtype=torch.float64))).view(-1, block)
    maxima = padded.abs().amax(1).float()
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)
    }
    tensors: dict[str, torch.Tensor] = {"weight.absmax": maxima, "weight.quant_map": NF4.float()}
    if nested:
        offset, table = maxima.mean(), torch.linspace(-1, 1, 256)
        inner = torch.stack([part.abs().max() for part in (maxima - offset).split(256)])
        scaled = (maxima - offset) / inner.repeat_interleave(256)[: len(maxima)]
        codes = _nearest(scaled, table).to(torch.uint8)
        maxima = table[codes.int()] * inner.repeat_interleave(256)[: len(maxima)] + offset
        tensors |= {"weight.absmax": codes, "weight.nested_absmax": inner, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_offset": float(offset), "nested_dtype": "float32"}
    codes = _nearest(padded / maxima.double().unsqueeze(1), NF4)
    expected = (NF4[codes] * maxima.double().unsqueeze(1)).flatten()[: len(flat)].view(weight.shape)
    codes = codes.flatten()[: len(flat)]
    tensors["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, expected


def bnb_int8(weight: torch.Tensor) -> Written:
    """LLM.int8(): code 127 is the output's largest magnitude, ``SCB``."""
    most = weight.abs().amax(1)
    codes = (weight.double() * 127 / most.unsqueeze(1)).round().to(torch.int8)
    expected = codes.double() * most.double().unsqueeze(1) / 127
    return {"weight": codes, "SCB": most, "weight_format": torch.zeros((), dtype=torch.uint8)}, expected


def nf4_in_bfloat16(weight: torch.Tensor) -> Written:
    """The same bytes under another dtype, as ``bnb_4bit_quant_storage`` asks."""
    tensors, expected = nf4(weight)
    return {**tensors, "weight": tensors["weight"].flatten().view(torch.bfloat16).unsqueeze(1)}, expected


def mlx(weight: torch.Tensor, bits: int = 4, group: int = 32, *, biases: str = "biases") -> Written:
    """Codes from the low bits of 32-bit words on; a weight is code * scale + bias, where scales may be negative."""
    groups = weight.double().unflatten(1, (-1, group))
    low, high = groups.amin(2), groups.amax(2)
    step = (high - low).clamp(min=1e-7) / ((1 << bits) - 1)
    flips = low.abs() < high.abs()  # the larger magnitude is code 0
    scales, bias = torch.where(flips, -step, step).half(), torch.where(flips, high, low).half()
    codes = ((groups - bias.unsqueeze(2)) / scales.double().unsqueeze(2)).round().clamp(0, (1 << bits) - 1)
    expected = (codes * scales.double().unsqueeze(2) + bias.unsqueeze(2)).flatten(1)
    words = torch.tensor([pack_stream(row, bits) for row in codes.flatten(1).long().tolist()], dtype=torch.int32)
    return {"weight": words.view(torch.uint32), "scales": scales, biases: bias}, expected


def mlx_floats(weight: torch.Tensor, mode: str) -> Written:
    """Its modes mxfp4, mxfp8 and nvfp4: codes in words, scales as bytes, no biases."""
    group, bits, most = {"mxfp4": (32, 4, 6.0), "mxfp8": (32, 8, FP8_MOST), "nvfp4": (16, 4, 6.0)}[mode]
    groups = weight.double().unflatten(1, (-1, group))
    steps = (groups.abs().amax(2) / most).float()
    powers = torch.exp2(steps.log2().ceil())
    kept = steps.to(torch.float8_e4m3fn) if mode == "nvfp4" else powers.to(torch.float8_e8m0fnu)
    scaled = groups / kept.double().unsqueeze(2)
    if bits == 8:
        rounded = scaled.float().to(torch.float8_e4m3fn)
        codes, values = rounded.view(torch.uint8).long(), rounded.double()
    else:
        codes = _nearest(scaled, E2M1)
        values = E2M1[codes]
    words = torch.tensor([pack_stream(row, bits) for row in codes.flatten(1).tolist()], dtype=torch.int32)
    expected = (values * kept.double().unsqueeze(2)).flatten(1)
    return {"weight": words.view(torch.uint32), "scales": kept.view(torch.uint8)}, expected


def torchao_float(weight: torch.Tensor) -> Written:
    tensors, expected = fp8_channel(weight)
    return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}, expected


def torchao_integers(weight: torch.Tensor, bits: int = 8, group: int = 0) -> Written:
    """Signed integers in bytes, with zero points of the same type."""
    ids = torch.arange(weight.shape[1]) // (group or weight.shape[1])
    codes, scales, zeros, expected = round_integers(weight, bits, ids, symmetric=False, scale_dtype=torch.bfloat16)
    middle = 1 << (bits - 1)
    return {
        "_weight_qdata": (codes - middle).to(torch.int8), "_weight_scale": scales,
        "_weight_zero_point": (zeros - middle).to(torch.int8)
    }, expected


def torchao_int8(weight: torch.Tensor) -> Written:
    """With a scale per output; its zero points are 0."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).float()
    codes = (weight.double() / scales.double()).round()
    tensors = {"_weight_qdata": codes.to(torch.int8), "_weight_scale": scales}
    return {**tensors, "_weight_zero_point": torch.zeros(len(weight), 1, dtype=torch.int8)}, codes * scales.double()


def torchao_int4(weight: torch.Tensor, group: int = 32) -> Written:
    """Pairs of signed codes in a byte, the first in its low half; tables [G, O], and zero points that are weights."""
    ids = torch.arange(weight.shape[1]) // group
    codes, scales, zeros, expected = round_integers(weight, 4, ids, symmetric=False, scale_dtype=torch.float32)
    signed = codes - 8 & 15
    return {
        "_weight_qdata": (signed[:, ::2] | signed[:, 1::2] << 4).to(torch.uint8).view(torch.int8),
        "_weight_scale": scales.T, "_weight_zero_point": ((8 - zeros) * scales).T
    }, expected


def hqq(weight: torch.Tensor, bits: int = 4, group: int = 32, *, axis: int = 1, as_float: bool = False) -> Written:
    """Groups are lines of the flattened weight (``axis`` 1) or columns; of the lines of codes, the first part is in the
    highest bits of the words."""
    lines = weight.reshape(-1, group).double() if axis else weight.reshape(group, -1).double()
    low, high = lines.amin(axis, keepdim=True), lines.amax(axis, keepdim=True)
    scale = ((high - low) / ((1 << bits) - 1)).half()
    zero = (-low / scale.double()).half()
    codes = (lines / scale.double() + zero.double()).round().clamp(0, (1 << bits) - 1).long()
    expected = ((codes - zero.double()) * scale.double()).reshape(weight.shape)
    width, step = (10, 3) if bits == 3 else (8 // bits, bits)
    padded = torch.cat((codes, torch.zeros(-len(codes) % width, codes.shape[1]).long()))
    words = sum(part << step * (width - 1 - at) for at, part in enumerate(padded.chunk(width)))
    kept = torch.as_tensor(words).to(torch.int32 if bits == 3 else torch.uint8)
    return {
        "W_q": kept.view(torch.float16) if as_float else kept, "scale": scale, "zero": zero, "axis": torch.tensor(axis),
        "nbits": torch.tensor(bits), "shape": torch.tensor(weight.shape), "group_size": torch.tensor(group),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8)
    }, expected


def quanto(weight: torch.Tensor, *, is_float: bool = False) -> Written:
    tensors, expected = torchao_float(weight) if is_float else torchao_int8(weight)
    ones = {"input_scale": torch.ones(()), "output_scale": torch.ones(())}
    return {"weight._data": tensors["_weight_qdata"], "weight._scale": tensors["_weight_scale"], **ones}, expected


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> Callable[..., Written]:
    """A writer by the compressed-tensors package, which also says what the tensors stand for."""

    def write(weight: torch.Tensor) -> Written:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        scheme = QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(**weights),
            input_activations=None if activations is None else QuantizationArgs(**activations),
        )
        args, inputs = scheme.weights, weight.shape[1]
        state: dict[str, torch.Tensor] = {"weight": weight}
        if args.strategy == "tensor":
            low, high = weight.amin().reshape(1), weight.amax().reshape(1)
        elif args.strategy == "block":
            blocks = _blocks(weight, args.block_structure)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            size = args.group_size or inputs
            groups = weight.unflatten(1, (-1, inputs if size == -1 else size))
            low, high = groups.amin(2), groups.amax(2)
        extra = {}
        if args.strategy == "tensor_group":
            extra["global_scale"] = state["weight_global_scale"] = generate_gparam(low.amin(), high.amax())
        state["weight_scale"], zeros = calculate_qparams(low, high, args, **extra)
        if not args.symmetric:
            state["weight_zero_point"] = zeros
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        expected = compressor.decompress({k: v.clone() for k, v in stored.items()}, scheme)["weight"]
        return {name: tensor.contiguous() for name, tensor in stored.items()}, expected.double()

    return write


def rename_part(written: Written, old: str, new: str) -> Written:
    tensors, expected = written
    return {new if name == old else name: tensor for name, tensor in tensors.items()}, expected


def _blocks(weight: torch.Tensor, block: Any) -> torch.Tensor:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    return padded.view(-(-rows // block[0]), block[0], -(-columns // block[1]), block[1])
