"""The catalog: architecture to family, out-of-tree families, and what is said when none fits."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import transformers

from headrace.base.errors import PluginError, UnknownArchitecture
from headrace.base.registry import Registry
from headrace.models import catalog
from headrace.models.family import PLUGIN_API, Family


@pytest.mark.parametrize("architecture", catalog.ARCHITECTURES)
def test_every_architecture_is_real_and_claimed_by_its_family(architecture: str):
    causal = architecture.replace("ForSequenceClassification", "ForCausalLM")  # of which not all have a classifier
    assert hasattr(transformers, architecture) or hasattr(transformers, causal)
    assert architecture in catalog.find_family(architecture).architectures


def test_families_claim_nothing_else():
    families = [catalog.load_family(name) for name in set(catalog.ARCHITECTURES.values())]
    assert sorted(a for f in families for a in f.architectures) == sorted(catalog.ARCHITECTURES)
    assert sorted(a for f in families for a in f.gguf_architectures) == sorted(catalog.GGUF_ARCHITECTURES)


@pytest.mark.parametrize("architecture", catalog.GGUF_ARCHITECTURES)
def test_gguf_architectures(architecture: str):
    family = catalog.find_gguf_family(architecture)
    assert architecture in family.gguf_architectures and family.gguf_config is not None


def test_unknown_architecture_lists_the_nearest():
    with pytest.raises(UnknownArchitecture, match="Qwen2ForCausalLM"):
        catalog.find_family("Qwen2LargeForCausalLM")
    with pytest.raises(UnknownArchitecture, match="gemma3"):
        catalog.find_gguf_family("gemma3n")
    with pytest.raises(UnknownArchitecture) as found:
        catalog.find_family("KimiLinearForCausalLM")  # only its end is like that of others
    assert "nearest" not in str(found.value) and "plug-in may serve it" in str(found.value)


@pytest.mark.parametrize("architecture", ["Emu3MultimodalForCausalLM", "Idefics3ForConditionalGeneration"])
def test_unknown_models_of_media_are_told_which_families_there_are(architecture: str):
    with pytest.raises(UnknownArchitecture, match=r"images or sound are gemma3, .*qwen2_5_vl.*whisper"):
        catalog.find_family(architecture)
    with pytest.raises(UnknownArchitecture) as found:
        catalog.find_family("Qwen2LargeForCausalLM")
    assert "images" not in str(found.value)


def test_one_family_is_imported_and_no_torch():
    code = """
import sys
from headrace.models.catalog import find_family
family = find_family("Qwen3ForCausalLM")
config = dict(architectures=["Qwen3ForCausalLM"], vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
              num_attention_heads=2)
specs = family.cache_specs(family.read_config(config), "float32")
assert len(specs) == 2 and specs[0].head_dim == 128
assert "torch" not in sys.modules
print(sorted(n for n in sys.modules if n.endswith(".family") and n != "headrace.models.family"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['headrace.models.qwen3.family']"


def _family(name: str, plugin_api: int = PLUGIN_API) -> Family:
    return Family(
        name=name, architectures=(f"{name.title()}ForCausalLM",), read_config=dict, cache_specs=lambda spec, dtype: [],
        model="nowhere:Model",
        gguf_architectures=(name,), plugin_api=plugin_api,
    )


GOOD, OLD, WRONG = _family("good"), _family("old", PLUGIN_API - 1), object()


@pytest.fixture
def out_of_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages with families, most of them unfit, and a catalog of their own."""
    points = [
        EntryPoint(name, value, catalog.ENTRY_POINT_GROUP)
        for name,
        value in {
            "llama": "no_such_module_at_all:FAMILY", "broken": "no_such_module_at_all:FAMILY", "old": f"{__name__}:OLD",
            "wrong": f"{__name__}:WRONG", "good": f"{__name__}:GOOD"
        }.items()
    ]
    monkeypatch.setattr("headrace.base.registry.installed_points", lambda group: points)
    registry: Registry[Family] = Registry("model family")
    registry.add("llama", "headrace.models.llama.family:FAMILY")
    monkeypatch.setattr(catalog, "FAMILIES", registry)


def test_out_of_tree_family_is_found_beside_broken_ones(out_of_tree, caplog: pytest.LogCaptureFixture):
    assert catalog.find_family("GoodForCausalLM") is GOOD
    assert catalog.find_gguf_family("good") is GOOD
    assert "'llama' is already registered" in caplog.text
    assert catalog.find_family("LlamaForCausalLM").name == "llama"


def test_broken_families_are_explained_when_nothing_fits(out_of_tree):
    with pytest.raises(UnknownArchitecture) as caught:
        catalog.find_family("OldForCausalLM")
    for reason in ("'broken' failed to load", f"plug-in API {PLUGIN_API - 1}", "does not say for which plug-in API"):
        assert reason in str(caught.value)


def test_family_for_another_plugin_api_is_refused(out_of_tree):
    catalog.add_out_of_tree_families()
    with pytest.raises(PluginError, match="plug-in API"):
        catalog.load_family("old")
