"""Every field of PEFT on two ranks that divide each layer: the prompt's log probabilities are those of PEFT."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.rank_processes import RankProcesses
from transformers import LlamaConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from headrace import LLM, LoRARequest
from headrace.base.errors import UnsupportedFeature
from headrace.service import build

pytest.importorskip("peft")
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("adapters", "models")]

import peft_rig as rig
from family_cases import CASES, make_oracle
from test_adapted_families import FIRST, expect, read_logprobs
from test_peft import ATTENTION, FIELDS, MOE
from test_served_fields import OPTIONS

TIED = LlamaConfig(**{**rig.LLAMA, "tie_word_embeddings": True})
EXPERTS = {
    "target_modules": ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES_OF_FIELDS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (LlamaConfig(**rig.LLAMA), fields) for name, fields in FIELDS.items()},
    **{
        f"bias {bias}": (Qwen2Config(**rig.LLAMA), {"target_modules": ["q_proj", "k_proj", "o_proj"], "bias": bias})
        for bias in ("all", "lora_only")
    },
    "tied token rows": (TIED, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]}),
    "tied low rank": (TIED, {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
    "tied head": (TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "experts": (Qwen3MoeConfig(**MOE), EXPERTS), "experts of Mixtral": (MixtralConfig(**MOE), EXPERTS),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    made = RankProcesses(2, 1)
    yield made
    made.close()


def check(
    ranks: RankProcesses, base: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], **fields: Any
) -> None:
    base.save_pretrained(str(folder / "base"))
    adapted = rig.adapt(base, folder / "adapter", **fields)
    options = {**OPTIONS, "model": str(folder / "base")}
    monkeypatch.setattr(build, "build_executor", ranks.builder({**options, **own}))
    with LLM(**options) as llm:
        found = read_logprobs(llm, LoRARequest("a", str(folder / "adapter")))
        plain = read_logprobs(llm, None)
    torch.testing.assert_close(found, expect(adapted), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(plain, expect(base), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES_OF_FIELDS)
def test_a_field_on_two_ranks(
    ranks: RankProcesses, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, fields = CASES_OF_FIELDS[name]
    check(ranks, rig.make_model(config), tmp_path, monkeypatch, {}, **fields)


def test_beside_experts_that_are_divided_whole(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Adapters of attention are served, those of experts refused with what to do."""
    base, own = rig.make_model(Qwen3MoeConfig(**MOE)), {"enable_expert_parallel": True}
    check(ranks, base, tmp_path, monkeypatch, own, target_modules=ATTENTION)
    with pytest.raises(UnsupportedFeature, match="leave out enable_expert_parallel"):
        check(ranks, base, tmp_path, monkeypatch, own, **EXPERTS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FIRST)
def test_every_decoder_on_two_ranks(
    ranks: RankProcesses, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    check(ranks, make_oracle(*CASES[FIRST[kind]]), tmp_path, monkeypatch, {}, target_modules="all-linear")
