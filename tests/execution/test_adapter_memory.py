"""Where a loaded model has the factors of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.base.config import engine_config
from headrace.execution import loading, sketch
from headrace.execution.loading import LoadedModel, load_model
from headrace.layers import linear
from headrace.layers.loading import find_targets
from headrace.layers.lora.bank import LinearBank
from headrace.layers.lora.parts import BankSizes

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "eos_token_id": 2,
}
SLOTS, RANK = 4, 16


@pytest.fixture
def _as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have room for factors, and stay plain."""
    def count_spare(sizes: BankSizes, num_parts: int, _: object) -> int:
        return sizes.num_slots * num_parts * sizes.padded_rank

    monkeypatch.setattr(linear, "count_spare", count_spare)
    monkeypatch.setattr(loading, "store_fastest", lambda _: None)


def load(folder: Path, *, load_format: str = "dummy", lends: bool = False, device: str = "cpu") -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = engine_config(
        model=str(folder), load_format=load_format, device=device, dtype="float32" if device == "cpu" else "bfloat16",
        enable_lora=True, max_loras=SLOTS, max_lora_rank=RANK,
    )
    return load_model(options, torch.device(device), lambda *_: None, fill=sketch.lend_weights if lends else None)


def list_banks(loaded: LoadedModel) -> dict[str, LinearBank]:
    found = loaded.model.named_modules()
    return {name.removesuffix(".lora"): bank for name, bank in found if type(bank) is LinearBank}


@pytest.mark.usefixtures("_as_on_gpus")
@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_a_loaded_model_has_factors_behind_its_weights(tmp_path: Path, load_format: str) -> None:
    """Weights get their memory when they are filled, with room behind them: none is copied for it."""
    if load_format == "auto":
        model: Any = load(tmp_path).model
        targets = find_targets(model, model.names.modules)
        save_file({name: torch.randn(target.shape) for name, target in targets.items()}, tmp_path / "model.safetensors")
    loaded = load(tmp_path, load_format=load_format)
    banks = list_banks(loaded)
    assert len(banks) == 3 * 4
    for name, bank in banks.items():
        weight, extended = loaded.model.get_submodule(name).weight, bank.tensors.extended
        assert extended is not None and extended.data_ptr() == weight.data_ptr()
        assert len(extended) == len(weight) + SLOTS * len(bank.ends) * RANK
        assert bank.a.data_ptr() == weight.data_ptr() + weight.nbytes and not bank.a.any()
        assert weight.untyped_storage().nbytes() == extended.nbytes
        assert weight.isfinite().all() and weight.any()


@pytest.mark.usefixtures("_as_on_gpus")
def test_a_sketch_has_them_there_too(tmp_path: Path) -> None:
    """Layers share one memory: its steps are those of the model, and weights are not copied."""
    loaded = load(tmp_path, lends=True)
    banks = list_banks(loaded).values()
    assert all(bank.tensors.extended is not None for bank in banks)
    assert len({bank.a.untyped_storage().data_ptr() for bank in banks}) == 4


@pytest.mark.cuda
def test_gpus_have_them_there(tmp_path: Path) -> None:
    banks = list_banks(load(tmp_path, device="cuda")).values()
    assert len(banks) == 3 * 4 and all(bank.tensors.extended is not None for bank in banks)
