"""The catalog: which family serves an architecture. It holds names only, so that just the family served is imported.

Out-of-tree families are entry points of group ``headrace.families``; they are imported only when no built-in family
serves the architecture. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from headrace.base.errors import PluginError, UnknownArchitecture
from headrace.base.registry import Registry
from headrace.models.family import Family

ENTRY_POINT_GROUP = "headrace.families"
BESIDE_TEXT = "ForConditionalGeneration"
"""How names of architectures end that take media beside text, all but a few."""

ARCHITECTURES = {
    "ArceeForCausalLM": "arcee",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "BertModel": "bert",
    "CLIPModel": "clip",
    "Cohere2ForCausalLM": "cohere",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "deepseek_v3",
    "GlmForCausalLM": "glm4",
    "GlmMoeDsaForCausalLM": "deepseek_v32",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite",
    "GraniteMoeSharedForCausalLM": "granite",
    "HeliumForCausalLM": "helium",
    "InternVLForConditionalGeneration": "internvl",
    "LlamaForCausalLM": "llama",
    "LlamaForSequenceClassification": "llama",
    "LlamaModel": "llama",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava",
    "LlavaOnevisionForConditionalGeneration": "llava",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "llama",
    "MistralForSequenceClassification": "llama",
    "MistralModel": "llama",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen2VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2ForSequenceClassification": "qwen2",
    "Qwen2Model": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3ForSequenceClassification": "qwen3",
    "Qwen3Model": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "SeedOssForCausalLM": "seed_oss",
    "SiglipModel": "siglip",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "WhisperForConditionalGeneration": "whisper",
    **{
        kind + use: "roberta"
        for kind in ("Roberta", "XLMRoberta")
        for use in ("ForMaskedLM", "ForSequenceClassification", "Model")
    },
}
"""Hugging Face class name: family."""

GGUF_ARCHITECTURES = {
    **{
        name: name for name in (
            "gemma", "gemma2", "gemma3", "glm4", "granite", "llama", "olmo2", "olmoe", "phi3", "qwen2", "qwen3",
            "seed_oss", "smollm3",
        )
    },
    "gpt-oss": "gpt_oss",
    "qwen3moe": "qwen3_moe",
}
"""``general.architecture`` of GGUF files: family."""

FAMILIES: Registry[Family] = Registry("model family")
for _name in sorted({*ARCHITECTURES.values(), *GGUF_ARCHITECTURES.values()}):
    FAMILIES.add(_name, f"headrace.models.{_name}.family:FAMILY")


def find_family(architecture: str) -> Family:
    """The family that serves a Hugging Face architecture.

    Raises `UnknownArchitecture` listing the nearest known ones, or `PluginError` with the original error when the
    family that should serve it cannot be loaded.
    """
    return _find(architecture, ARCHITECTURES, lambda family: family.architectures)


def find_gguf_family(gguf_architecture: str) -> Family:
    """The same for a value of ``general.architecture`` in GGUF metadata."""
    return _find(gguf_architecture, GGUF_ARCHITECTURES, lambda family: family.gguf_architectures)


def load_family(name: str) -> Family:
    """Import one family; raises `PluginError` also when it was made for another version of the contract."""
    family = FAMILIES.load(name)
    if not isinstance(family, Family):
        raise PluginError(f"model family {name!r} is a {type(family).__name__}, not a Family")
    return family


def add_out_of_tree_families() -> list[str]:
    """Register the families of installed packages, without importing them; returns their names."""
    return FAMILIES.add_installed(ENTRY_POINT_GROUP)


def _find(architecture: str, known: dict[str, str], serves: Callable[[Family], tuple[str, ...]]) -> Family:
    if architecture in known:
        return load_family(known[architecture])
    failures = []
    for name in add_out_of_tree_families():
        try:
            family = load_family(name)
        except PluginError as error:
            failures.append(str(error))
            continue
        if architecture in serves(family):
            return family
    # failures are reported too: the family the user wants may be the one that could not be loaded
    near = get_close_matches(architecture, known, n=3, cutoff=0.4) or sorted(known)
    reasons = [f"no model family serves {architecture!r}; the nearest known are {', '.join(near)}", *failures]
    if "Multimodal" in architecture or architecture.endswith(BESIDE_TEXT):
        able = sorted({name for known_one, name in known.items() if known_one.endswith(BESIDE_TEXT)})
        reasons.insert(1, f"families with models for images or sound are {', '.join(able)}")
    raise UnknownArchitecture("; ".join(reasons))
