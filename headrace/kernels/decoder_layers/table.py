"""`LayerTable` and `FusedDecode`: layers encoded for the C++ kernels, one row of integers and addresses per layer.

The order of fields is that of `Layer` and `Reals` in csrc/cpu/bind_layers.h: change both together. Hazard: rows hold
raw addresses, so the table keeps a reference to every tensor; after one is replaced or moved, build a new table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.kernels.decoder_layers.parts import EndParts, Heads, LayerParts, Mixture, Pages, Product, Rotation
from headrace.kernels.lora import LowRankBank
from headrace.kernels.lora.codes import CodedBank
from headrace.kernels.moe.cpu import SCORES
from headrace.kernels.native import NATIVE
from headrace.kernels.rowwise.cpu import GATE_NUMBERS

BANK_CODES = 2
"""The native kernels' number of a bank in 8 bits."""
ALL_ROWS = (None,) * 4
"""``wanted`` of `LayerTable.run` where no row is pruned."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
NO_MIXTURE = ((0,) * 16, (0.0,) * 4)
"""Numbers and reals of a layer without experts."""


class LayerTable:
    """Layers that run in one call; owns the encoded rows, [layers, fields] int64 and [layers, fields] float64."""

    def __init__(self, layers: Sequence[LayerParts]):
        # tensors whose addresses are in the rows
        self._kept: list[torch.Tensor] = []
        rows = [self._row(layer) for layer in layers]
        self._numbers = torch.tensor([numbers for numbers, _ in rows], dtype=torch.int64)
        self._reals = torch.tensor([reals for _, reals in rows], dtype=torch.float64)
        self.last_group = layers[-1].pages.group
        self.banks: torch.Tensor | None = None
        if all(layer.banks for layer in layers):
            self.banks = torch.tensor([self._bank(bank) for layer in layers for bank in layer.banks])

    def run(
        self, x: torch.Tensor, positions: torch.Tensor, groups: Sequence[tuple[torch.Tensor, torch.Tensor]],
        lengths: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, ...] = (), *,
        adapter_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run all layers on ``x`` [T, D] float32 or bfloat16, which is overwritten. Returns ``(branch, residual)`` [T,
        D], whose sum is the output, or None while the native library is not loaded. ``positions`` [T] int64;
        ``groups``: slots [T] int64 and page table [R, *] int32 of each cache group; ``lengths``: query_start [R + 1]
        and kv_lens [R] int32, as in the attention contract.

        ``wanted`` prunes the last layer to the rows whose output is needed: their indices [S] int64, and query_start,
        kv_lens and page table as if each were a request; both results are then [S, D]. ``adapter_rows``: as for
        `FusedDecode.run`."""
        ops = NATIVE.find()
        if ops is None:
            return None
        # [groups, 3] as `Group` in bind_layers.h; raw addresses again: the caller's ``groups`` keep the tensors alive
        # during the call
        addresses = torch.tensor([(slots.data_ptr(), table.data_ptr(), table.stride(0)) for slots, table in groups])
        x = x.contiguous()
        # x is overwritten with the residual; of pruned rows, the results are in the first S
        branch = ops.decoder_layers(
            self._numbers, self._reals, addresses, x, positions, *lengths, *(wanted or ALL_ROWS),
            None if adapter_rows is None else self.banks, adapter_rows,
        )
        return (branch[: len(wanted[0])], x[: len(wanted[0])]) if wanted else (branch, x)

    @property
    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(integers, reals)``: the encoded rows, as the kernels take them."""
        return self._numbers, self._reals

    def _row(self, layer: LayerParts) -> tuple[list[int], list[float]]:
        """The fields of `Layer` and `Reals`, in their order."""
        norms, mlp = layer.norms, layer.mlp.experts if isinstance(layer.mlp, Mixture) else layer.mlp
        row = [
            n
            for weight in (norms.attention, norms.attention_post, norms.mlp, norms.mlp_post)
            for n in (self._address(weight), _type(weight))
        ]
        for product in (layer.qkv, layer.output, mlp.gate_up, mlp.down):
            row += self.describe(product)
        row += [
            *self._rotation(layer.rotation), *self._pages(layer.pages), *self._heads(layer.heads),
            GATE_NUMBERS[mlp.gate.kind]
        ]
        numbers, reals = self._mixture(layer.mlp) if isinstance(layer.mlp, Mixture) else NO_MIXTURE
        return [*row, *numbers], [norms.eps, norms.offset, layer.heads.scale, layer.heads.softcap, *reals]

    def _bank(self, bank: LowRankBank | CodedBank) -> list[int]:
        """The fields of `Bank`, in their order."""
        factors = (bank.codes, None) if isinstance(bank, CodedBank) else (bank.a, bank.b)
        addresses = [self._address(tensor) for tensor in (*factors, bank.ranks, torch.tensor(bank.ends))]
        form = BANK_CODES if isinstance(bank, CodedBank) else int(bank.b.dtype == torch.bfloat16)
        return [*addresses, len(bank.ends), bank.most_ranks, bank.inputs, bank.ends[-1], form]

    def _mixture(self, mixture: Mixture) -> tuple[list[int], list[float]]:
        shape, router = mixture.shape, mixture.router
        groups = [shape["num_groups"], shape["top_groups"], shape["group_best"]]
        numbers = [
            router.weight.out_features, shape["top_k"], SCORES[shape["score"]], int(shape["renormalise"]),
            self._address(mixture.choice_bias), *groups
        ]
        gate = mixture.experts.gate
        return [*numbers, *self.describe(router)], [shape["scale"], gate.limit, gate.alpha, gate.up_offset]

    def describe(self, product: Product) -> list[int]:
        """The fields of a C++ `Product`; keeps the tensors whose addresses they hold."""
        weight = product.weight
        addresses = [self._address(weight.words), self._address(weight.scales), self._address(weight.mins)]
        return [
            *addresses, weight.number, weight.out_features, weight.in_features, self._address(product.bias),
            _type(product.bias)
        ]

    def _rotation(self, rotation: Rotation) -> list[int]:
        norms = [self._address(rotation.q_norm), self._address(rotation.k_norm), _type(rotation.q_norm)]
        return [self._address(rotation.cos_sin), rotation.rotary_dim, int(rotation.interleaved), *norms]

    def _pages(self, pages: Pages) -> list[int]:
        return [
            self._address(pages.k), self._address(pages.v), self._address(pages.scales), _type(pages.k),
            pages.k.shape[1], pages.group
        ]

    def _heads(self, heads: Heads) -> list[int]:
        return [heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.window, self._address(heads.sinks)]

    def _address(self, tensor: torch.Tensor | None) -> int:
        """The address of a contiguous tensor, 0 for None; keeps the tensor alive."""
        if tensor is None:
            return 0
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _type(tensor: torch.Tensor | None) -> int:
    """The native kernels' number of its dtype; any for None, since an address of 0 means it is not read."""
    return 0 if tensor is None else TYPES[tensor.dtype]


class FusedDecode:
    """A whole step of decodes in one call on a CPU: embedding, layers, head, argmax. It holds raw addresses: if a
    tensor is replaced or moved, make a new object. The order of fields is that of `Ends` in csrc/cpu/bind_decodes.h.
    """

    def __init__(self, layers: LayerTable, ends: EndParts):
        self._layers, self._norm, self._vocab_size = layers, ends.norm, ends.head.out_features
        assert ends.norm.is_contiguous()
        products = [number for matrix in (ends.embedding, ends.head) for number in layers.describe(Product(matrix))]
        self._ends = torch.tensor([*products, ends.norm.data_ptr(), TYPES[ends.norm.dtype], TYPES[ends.dtype]])
        self._reals = torch.tensor((ends.embedding_scale, ends.eps, ends.offset), dtype=torch.float64)

    @property
    def takes_adapters(self) -> bool:
        """Whether rows may have adapters: low-rank additions to the linears of all layers."""
        return self._layers.banks is not None

    def run(
        self, requests: torch.Tensor, page_tables: torch.Tensor, sampled: torch.Tensor | None,
        adapter_rows: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run one step. ``requests`` [3, R] int64, contiguous: row indices, the rows' lengths up to and with the token
        that is computed, and that token; a row may occur several times, in order. ``page_tables`` [groups, rows,
        entries] int32. Writes ids and states as `SAMPLE_GREEDY` into ``sampled`` [2, R] int64 and returns None; without
        it, returns logits [R, V] float32. ``adapter_rows`` [2, n] int64, contiguous: decodes that have an adapter, and
        its slot; only where ``takes_adapters``."""
        ops, logits = NATIVE.find(), None
        assert ops is not None, "fused layers exist only where the native library is loaded"
        if sampled is None:
            count = requests.shape[1]
            sampled = torch.empty((2, count), dtype=torch.int64)  # not written
            logits = torch.empty((count, self._vocab_size), dtype=torch.float32)
        ops.decode_step(
            *self._layers.numbers, self._ends, self._reals, requests, page_tables, sampled, logits,
            self._layers.banks, adapter_rows,
        )
        return logits
