"""The catalog: which family serves an architecture. It holds names only, so that just the family served is imported.

Out-of-tree families are entry points of group ``headrace.families``; they are imported only when no built-in family
serves the architecture. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches

from headrace.base.errors import PluginError, UnknownArchitecture
from headrace.base.registry import Registry
from headrace.models.family import Family, decoder_architectures

ENTRY_POINT_GROUP = "headrace.families"
BESIDE_TEXT = re.compile(".*ForConditionalGeneration|.*Multimodal.*")
"""Names of architectures that take media beside text, all but a few."""
USE = re.compile("(For|LMHead|Model).*")
"""What an architecture's name says of its use, behind what it says of its kind."""

DECODERS = {
    "Arcee": "arcee",
    "Cohere": "cohere",
    "Cohere2": "cohere",
    "DeepseekV2": "deepseek_v3",
    "DeepseekV3": "deepseek_v3",
    "DeepseekV32": "deepseek_v32",
    "Dots1": "dots1",
    "Ernie4_5": "ernie4_5",
    "Ernie4_5_Moe": "ernie4_5",
    "Exaone4": "exaone4",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Glm": "glm4",
    "Glm4": "glm4",
    "Glm4Moe": "glm4_moe",
    "Glm4MoeLite": "deepseek_v3",
    "GlmMoeDsa": "deepseek_v32",
    "GptOss": "gpt_oss",
    "Granite": "granite",
    "GraniteMoe": "granite",
    "GraniteMoeShared": "granite",
    "Helium": "helium",
    "HunYuanDenseV1": "hunyuan",
    "HunYuanMoEV1": "hunyuan",
    "Llama": "llama",
    "MiniMaxM2": "minimax_m2",
    "Ministral": "llama",
    "Ministral3": "llama",
    "Mistral": "llama",
    "Mixtral": "mixtral",
    "Olmo2": "olmo2",
    "Olmo3": "olmo2",
    "Olmoe": "olmoe",
    "Phi": "phi",
    "Phi3": "phi3",
    "Qwen2": "qwen2",
    "Qwen2Moe": "qwen2_moe",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
    "SeedOss": "seed_oss",
    "SmolLM3": "smollm3",
    "SolarOpen": "glm4_moe",
    "StableLm": "stablelm",
    "Starcoder2": "starcoder2",
}
"""Beginnings of names of decoders: family. Each is served as it is named by `decoder_architectures`."""

ARCHITECTURES = {
    **{name: family for kind, family in DECODERS.items() for name in decoder_architectures(kind)},
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "BertModel": "bert",
    "CLIPModel": "clip",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3TextForSequenceClassification": "gemma3",
    "Gemma3TextModel": "gemma3",
    "InternVLForConditionalGeneration": "internvl",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava",
    "LlavaOnevisionForConditionalGeneration": "llava",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Phi4MultimodalForCausalLM": "phi4_multimodal",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "Qwen2VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "SiglipModel": "siglip",
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
            "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "glm4", "granite", "llama", "olmo2", "olmoe", "phi3",
            "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
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
    reasons = [f"no model family serves {architecture!r}"]
    if near := _find_nearest(architecture, known):
        reasons.append(f"the nearest known are {', '.join(near)}")
    # failures are reported too: the family the user wants may be the one that could not be loaded
    plugin = f"a plug-in may serve it, an entry point of {ENTRY_POINT_GROUP} (docs/adding-a-family.md)"
    reasons += [plugin, *failures]
    if BESIDE_TEXT.fullmatch(architecture):
        able = sorted({name for known_one, name in known.items() if BESIDE_TEXT.fullmatch(known_one)})
        reasons.insert(-1 - len(failures), f"families with models for images or sound are {', '.join(able)}")
    raise UnknownArchitecture("; ".join(reasons))


def _find_nearest(architecture: str, known: dict[str, str]) -> list[str]:
    """Known names whose beginnings are like this one's: nearly all end alike."""
    beginning, end = _split_use(architecture)
    beginnings = dict(reversed([(_split_use(name)[0], name) for name in known]))
    near = get_close_matches(beginning, beginnings, n=3, cutoff=0.6)
    return [name + end if name + end in known else beginnings[name] for name in near]


def _split_use(architecture: str) -> tuple[str, str]:
    found = USE.search(architecture)
    return (architecture[: found.start()], found[0]) if found else (architecture, "")
