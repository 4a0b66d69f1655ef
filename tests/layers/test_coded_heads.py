"""Heads in codes, as on a GPU: logits in float32 that are not rounded, whatever the number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layers.format_cases import CASES, KEPT_PLAIN, LLAMA, make_checkpoint

from headrace.base.config import engine_config
from headrace.execution.loading import load_model
from headrace.kernels import native
from headrace.kernels.coded_linear import CODED_FLOAT, CODED_LINEAR
from headrace.kernels.coded_linear.choice import ROWS, CodedChoice, make_plan
from headrace.kernels.coded_linear.codes import CodedMatrix
from headrace.kernels.coded_linear.device_codes import pack_for_device, read_codes
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.layers.quantization import blocks as quantised
from headrace.layers.quantization.blocks import BlockTensor, CodedTensor, store_on_gpu
from headrace.layers.quantization.storage import StorableWeight
from headrace.layers.vocabulary import Head

CPU = torch.device("cpu")
HIDDEN, VOCABULARY = 256, 160
CHOSEN: list[bool] = []
"""Of each weight that was stored, whether by products with float32 results."""


class Choice(CodedChoice):
    """Keeps all codes, without measuring."""

    def choose(self, weight: Any, dtype: torch.dtype, capability: tuple[int, int], *, in_float: bool = False) -> Any:
        CHOSEN.append(in_float)
        return make_plan({rows: {"reference": 1.0} for rows in ROWS})


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Weights of files are stored on a CPU as on a GPU."""
    if native.build().status != "ready":
        pytest.skip("no native library")
    CHOSEN.clear()

    def store_matrix(matrices: list[CodedMatrix], weight: StorableWeight) -> CodedWeight | None:
        stacked = quantised.stack_matrices(matrices)
        return None if stacked is None else store_on_gpu(stacked, weight, Choice())

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (0, 0))
    monkeypatch.setattr(BlockTensor, "store", classmethod(
        lambda cls, parts, weight, choice: store_matrix([read_codes(part.blocks, CPU) for part in parts], weight)
    ))
    monkeypatch.setattr(CodedTensor, "store", classmethod(
        lambda cls, parts, weight, choice: store_matrix([part.matrix for part in parts], weight)
    ))


def write_gguf(path: Path, *, is_tied: bool) -> None:
    """A Llama of one layer whose matrices are random codes, the head's in Q6_K."""
    chance, writer = np.random.default_rng(1), gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 1, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 64, "vocab_size": VOCABULARY,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    matrices = {
        "token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN), "blk.0.attn_q": (256, HIDDEN),
        "blk.0.attn_k": (128, HIDDEN), "blk.0.attn_v": (128, HIDDEN), "blk.0.attn_output": (HIDDEN, 256),
        "blk.0.ffn_gate": (512, HIDDEN), "blk.0.ffn_up": (512, HIDDEN), "blk.0.ffn_down": (HIDDEN, 512),
    }
    if is_tied:
        del matrices["output"]
    kind = gguf.GGMLQuantizationType.Q6_K
    for name, (outputs, inputs) in matrices.items():
        raw = chance.integers(0, 256, (outputs * inputs // 256, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        raw[:, -2:] = np.array([1e-4], np.float16).view(np.uint8)
        writer.add_tensor(f"{name}.weight", raw.reshape(outputs, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_head(model: Path, **options: Any) -> tuple[Head, torch.Tensor]:
    """The head, and its logits of five rows."""
    config = engine_config(model=str(model), dtype="bfloat16", skip_tokenizer=True, **options)
    head = load_model(config, CPU, lambda *_: None).model.head
    rows = torch.randn(5, head_width(head), generator=torch.manual_seed(2))
    with torch.no_grad():
        return head, head(rows.bfloat16())


def head_width(head: Head) -> int:
    """Its inputs."""
    return head.weight.shape[1] if head.stored is None else head.stored.shape[1]


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_of_a_gguf_file_stays_in_codes(is_tied: bool, tmp_path: Path):
    """Unless it is the embedding."""
    write_gguf(tmp_path / "m.gguf", is_tied=is_tied)
    plain, expected = load_head(tmp_path / "m.gguf", quantization="none")
    head, logits = load_head(tmp_path / "m.gguf", quantization="stored")
    assert not isinstance(plain.stored, CodedWeight) and logits.dtype == torch.float32
    assert CHOSEN.count(True) == (0 if is_tied else 1) and len(CHOSEN) > 1
    assert isinstance(head.stored, CodedWeight) != is_tied
    # rounded once more, to 8 bits with a scale per 32, and to bfloat16 by the product on a CPU
    assert (logits - expected).norm() < 0.01 * expected.norm()
    if not is_tied:
        assert head.stored.num_bytes < 0.6 * 2 * VOCABULARY * HIDDEN


def test_a_quantised_head_of_a_checkpoint_stays_in_codes(tmp_path: Path):
    """GPTQ quantises it where its writer asked for that."""
    plain = [name for name in KEPT_PLAIN if "lm_head" not in name]
    make_checkpoint(tmp_path / "m", LLAMA, CASES["gptq"], plain=plain)
    head, logits = load_head(tmp_path / "m", quantization="stored")
    assert isinstance(head.stored, CodedWeight) and CHOSEN.count(True) == 1
    _, expected = load_head(tmp_path / "m", quantization="none")
    assert logits.dtype == torch.float32 and (logits - expected).norm() < 0.01 * expected.norm()


def test_float_results_are_of_the_solution_that_was_chosen(monkeypatch: pytest.MonkeyPatch):
    """By the number of rows; others and a bias take the product in x's dtype."""
    weight = pack_for_device(quantised_matrix(48, 64))
    assert weight is not None
    for name in ("first", "second"):
        monkeypatch.setitem(CODED_LINEAR._loaded, name, lambda x, weight, bias: F.linear(x, torch.ones(48, 64).to(x)))
    monkeypatch.setattr(CODED_FLOAT, "names", lambda: ["first"])
    monkeypatch.setitem(CODED_FLOAT._loaded, "first", lambda x, weight: torch.full((len(x), 48), 7.0))
    stored = CodedWeight(weight, make_plan({1: {"first": 1.0}, 2: {"second": 1.0}}))
    one, two = torch.ones(1, 64).bfloat16(), torch.ones(2, 64).bfloat16()
    assert (stored.multiply(one, None, torch.float32) == 7).all()
    assert (stored.multiply(one, None) == 64).all() and stored.multiply(one, None).dtype == torch.bfloat16
    assert (stored.multiply(two, None, torch.float32) == 64).all()
    assert stored.multiply(one[:0], None, torch.float32).shape == (0, 48)


def quantised_matrix(outputs: int, inputs: int) -> CodedMatrix:
    """Of 8 bits in groups of 32."""
    from headrace.kernels.coded_linear.codes import Code

    codes = torch.randint(-127, 128, (outputs, inputs), generator=torch.manual_seed(3)).to(torch.int8)
    return CodedMatrix(Code.INT, codes, torch.rand(outputs, inputs // 32) * 1e-3, 32)
