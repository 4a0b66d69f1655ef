"""Adapters on quantised checkpoints: PEFT over the matrices that the codes stand for is the oracle."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft_rig as rig
import pytest
import torch
from safetensors.torch import save_file
from test_adapted_families import OPTIONS, expect, read_logprobs
from transformers import LlamaConfig

from headrace import LLM, LoRARequest

pytest.importorskip("peft")
sys.path.append(str(Path(__file__).parents[1] / "layers"))

import format_writers as writers

WIDE = {**rig.LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WRITERS: dict[str, tuple[Callable[[torch.Tensor], writers.Written], dict[str, Any]]] = {
    "fp8": (writers.fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "gptq": (writers.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "awq": (writers.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "nf4": (writers.nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


def write(model: Any, folder: Path, form: str) -> Any:
    """The checkpoint in codes; returns the model with the weights that they stand for."""
    encode, stated = WRITERS[form]
    tensors, exact = dict[str, torch.Tensor](), copy.deepcopy(model)
    for name, parameter in exact.named_parameters():
        if "_proj" in name:
            own, meant = encode(parameter.detach())
            tensors |= {f"{name.removesuffix('.weight')}.{kind}": part.contiguous() for kind, part in own.items()}
            parameter.data.copy_(meant.to(parameter.dtype))
        else:
            tensors[name] = parameter.detach().clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    return exact


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", [
    {"target_modules": "all-linear"}, {"target_modules": ["q_proj", "up_proj", "down_proj"], "use_dora": True},
], ids=["low rank", "dora"])
@pytest.mark.parametrize("form", WRITERS)
def test_additions_to_codes(form: str, fields: dict[str, Any], tmp_path: Path):
    """Dequantised they are exact; in codes no further from that than the base alone is, and a few per cent of the
    change, as products of codes round their inputs, and adapters beside them are kept in 8 bits."""
    base = write(rig.make_model(LlamaConfig(**WIDE)), tmp_path / "base", form)
    adapted = rig.adapt(base, tmp_path / "adapter", **fields)
    request, wanted, plain = LoRARequest("a", str(tmp_path / "adapter")), expect(adapted), expect(base)
    with LLM(tmp_path / "base", **OPTIONS, quantization="none") as llm:
        torch.testing.assert_close(read_logprobs(llm, request), wanted, rtol=1e-3, atol=1e-3)
    with LLM(tmp_path / "base", **OPTIONS) as llm:
        found, lost = read_logprobs(llm, request), (read_logprobs(llm, None) - plain).abs().mean()
    change = (wanted - plain).abs().mean()
    assert change > 0.02 and (found - wanted).abs().mean() < 3 * lost + 0.03 * change
