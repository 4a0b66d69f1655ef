"""One family hurts no other: what is imported to serve a model, what a broken or disabled family changes, and a family
that lives in a package of its own. Each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "torch_dtype": "float32",
}
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "compress_ratios": [0], "num_attention_heads": 2, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2, "o_groups": 1, "o_lora_rank": 8, "max_position_embeddings": 512, "torch_dtype": "float32",
}
SERVE = """
import sys
from headrace import LLM, SamplingParams
def serve(folder):
    options = dict(load_format="dummy", skip_tokenizer=True, device="cpu", dtype="float32", kv_pages=8, threads=1)
    with LLM(folder, **options) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        outputs = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=sampling)
        return outputs[0].outputs[0].token_ids, llm.facts
"""
WAYS_TO_BREAK = {
    "SyntaxError: invalid syntax": SyntaxError("invalid syntax", ("family.py", 3, 1, "def broken(:")),
    "No module named 'a_kernel_package'": ModuleNotFoundError("No module named 'a_kernel_package'"),
    "RuntimeError: raised at import": RuntimeError("raised at import"),
}
BREAK = """
import importlib.abc, sys
class Break(importlib.abc.MetaPathFinder):
    error, broken = None, ("headrace.models.deepseek_v4.family",)
    def find_spec(self, name, path=None, target=None):
        if name in self.broken:
            raise self.error
sys.meta_path.insert(0, Break())
"""


def run_python(code: str, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_model(folder: Path, config: dict) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_serving_one_family_imports_no_other(tmp_path: Path):
    llama, v4 = write_model(tmp_path / "llama", LLAMA), write_model(tmp_path / "v4", V4)
    found = json.loads(run_python(f"""{SERVE}
import json
tokens, facts = serve({llama!r})
after_llama = sorted(n for n in sys.modules if "deepseek" in n)
assert len(tokens) == 3 and facts.family == "llama"
tokens, facts = serve({v4!r})
modules = [name.split(".") for name in sys.modules]
families = sorted({{parts[2] for parts in modules if parts[:2] == ["headrace", "models"] and parts[3:] == ["family"]}})
assert len(tokens) == 3 and facts.page_size == 256
print(json.dumps([after_llama, families]))
"""))
    assert found == [[], ["deepseek_v4", "llama"]]


def test_a_broken_family_fails_alone_and_at_once(tmp_path: Path):
    """Others are served in the same process; serving the broken one tells the original error; the inventory explains
    it."""
    llama, v4 = write_model(tmp_path / "llama", LLAMA), write_model(tmp_path / "v4", V4)
    said = run_python(f"""{BREAK}{SERVE}
from headrace.base.errors import HeadraceError
for Break.error in {list(WAYS_TO_BREAK.values())!r}:
    try:
        serve({v4!r})
    except HeadraceError as error:
        print(error)
assert len(serve({llama!r})[0]) == 3
from headrace.service.inventory import find_machine, take_inventory
findings = {{f.name: f for f in take_inventory(find_machine()) if f.kind == "model family"}}
assert findings["deepseek_v4"].status == "broken"
assert all(f.status == "ok" for n, f in findings.items() if n != "deepseek_v4")
print(findings["deepseek_v4"].detail)
""")
    assert [told in said for told in WAYS_TO_BREAK] == [True] * 3, said
    assert said.count("raised at import") == 2, "once when served, once in the inventory"


def test_a_broken_part_of_a_family_leaves_the_rest(tmp_path: Path):
    """The pools in 8 bits cannot be imported: served all the same, in bfloat16, and a warning names them."""
    config = {**V4, "head_dim": 128, "qk_rope_head_dim": 64}
    v4 = write_model(tmp_path / "v4", config)
    break_pools = BREAK.replace("deepseek_v4.family", "deepseek_v4.packed_pools")
    serve_in_8_bits = SERVE.replace("kv_pages=8", "kv_pages=8, kv_dtype='float8_e4m3fn'")
    said = run_python(f"""{break_pools}{serve_in_8_bits}
import logging
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
Break.error = RuntimeError("raised at import")
tokens, facts = serve({v4!r})
assert len(tokens) == 3
from headrace.service.inventory import find_machine, take_inventory
findings = {{(f.kind, f.name): f for f in take_inventory(find_machine())}}
assert findings["model family", "deepseek_v4"].status == "ok"
assert findings["KV pool", "deepseek_v4.window_fp8"].status == "broken"
assert findings["KV pool", "deepseek_v4.window"].status == "ok"
""")
    assert (
        "WARNING keys and values are kept in bfloat16" in said and "deepseek_v4.window_fp8" in said
        and "raised at import" in said
    )


def test_broken_kernels_of_a_family_cost_others_nothing(tmp_path: Path):
    """Whole packages, which no other family imports; then solutions alone, without which the family itself is served on
    a CPU, where others are chosen."""
    llama, v4 = write_model(tmp_path / "llama", LLAMA), write_model(tmp_path / "v4", V4)
    run_python(f"""{BREAK}{SERVE}
Break.error = SyntaxError("invalid syntax", ("triton.py", 3, 1, "def broken(:"))
own = [f"headrace.kernels.{{name}}" for name in ("compressor", "latents", "sparse_attention", "streams")]
Break.broken = (*own, "headrace.kernels.hot_slots.triton")
assert len(serve({llama!r})[0]) == 3
assert not [name for name in sys.modules if name.startswith(tuple(own))]
try:
    serve({v4!r})
except Exception as error:
    assert "invalid syntax" in str(error), error
else:
    raise AssertionError("served without its kernels")
faster = ("triton", "cuda", "few", "fused", "decodes", "hopper", "rows", "indexer", "selection")
faster += ("few_scores", "paired_scores")
Break.broken = tuple(f"{{name}}.{{solution}}" for name in own for solution in faster)
assert len(serve({v4!r})[0]) == len(serve({llama!r})[0]) == 3
""")


@pytest.mark.parametrize("way", ["variable", "flag"])
def test_a_disabled_family_is_never_imported(tmp_path: Path, way: str):
    """The flag holds for the processes that the command starts, too."""
    v4 = write_model(tmp_path / "v4", V4)
    said = run_python(f"""{SERVE}
import contextlib, io, subprocess
from headrace.base.errors import HeadraceError
from headrace.serving.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["show-config"{', "--disable-models", "deepseek_v4"' if way == "flag" else ""}]) == 0
try:
    serve({v4!r})
except HeadraceError as error:
    print(error)
assert not [n for n in sys.modules if "deepseek_v4" in n]
code = "from headrace.base.env import disabled_plugins; print(sorted(disabled_plugins()))"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
""", **({"HEADRACE_DISABLE_PLUGINS": "deepseek_v4"} if way == "variable" else {}))
    assert "'deepseek_v4' is disabled" in said and "['deepseek_v4']" in said, said


FAMILY = '''
from headrace.models.family import Family
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_decoder


def read_config(config):
    return read_decoder(Fields(config))


FAMILY = Family(
    name="acme", architectures=("AcmeForCausalLM",), read_config=read_config, model="acme_models.model:AcmeModel",
)
OLD = Family(
    name="acme_old", architectures=("AcmeOldForCausalLM",), read_config=read_config, plugin_api=0,
)
'''
MODEL = '''
from headrace.layers.decoder.decoder import Decoder


class AcmeModel(Decoder):
    """The shared decoder."""
'''
ENTRY_POINTS = """[headrace.families]
acme = acme_models.family:FAMILY
acme_old = acme_models.family:OLD
acme_broken = acme_models.not_there:FAMILY

[headrace.hooks]
acme_told = acme_models.hook:Told
acme_faulty = acme_models.hook:Faulty

[headrace.plugins]
acme = acme_models.hook:start
acme_failing = acme_models.hook:fail
"""
HOOK = """
class Told:
    plugin_api = 1
    def __init__(self, config):
        pass
    def request_finished(self, update, reason):
        print("told of", update.output_len, "tokens,", reason)
class Faulty(Told):
    def step_planned(self, plan):
        raise OSError("its own fault")
def start():
    from headrace.layers.attention import ATTENTION_BACKENDS
    ATTENTION_BACKENDS.add("acme", "acme_models.hook:Told", supports=lambda geometry: "serves nobody", priority=99)
start.plugin_api = 1
def fail():
    raise KeyError("nothing there")
fail.plugin_api = 1
"""


def test_a_family_installed_beside_headrace_is_served(tmp_path: Path):
    """Found by its entry point; one beside it was made for another version of the contract, another cannot be imported.
    So are its step hooks, of which one raises."""
    site = tmp_path / "site"
    package, info = site / "acme_models", site / "acme_models-1.0.dist-info"
    for folder in (package, info):
        folder.mkdir(parents=True)
    for path, text in (
        (package / "__init__.py", ""), (package / "family.py", FAMILY), (package / "model.py", MODEL),
        (package / "hook.py", HOOK),
        (info / "METADATA", "Metadata-Version: 2.1\nName: acme-models\nVersion: 1.0\n"),
        (info / "entry_points.txt", ENTRY_POINTS),
    ):
        path.write_text(text)
    acme = write_model(tmp_path / "acme", {**LLAMA, "architectures": ["AcmeForCausalLM"]})
    llama = write_model(tmp_path / "llama", LLAMA)
    old = write_model(tmp_path / "old", {**LLAMA, "architectures": ["AcmeOldForCausalLM"]})
    said = run_python(f"""{SERVE}
import logging
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from headrace.base.errors import HeadraceError
tokens, facts = serve({acme!r})
assert facts.family == "acme" and "headrace.models.llama.family" not in sys.modules
assert tokens == serve({llama!r})[0], "the same decoder with the same seed"
from headrace.layers.attention import ATTENTION_BACKENDS
assert ATTENTION_BACKENDS.names()[0] == "acme"
from headrace.service.inventory import find_machine, take_inventory
findings = {{(f.kind, f.name): f.status for f in take_inventory(find_machine())}}
assert [findings["plug-in package", name] for name in ("acme", "acme_failing")] == ["ok", "broken"]
assert findings["attention backend", "acme"] == "unavailable" and findings["model family", "acme"] == "ok"
try:
    serve({old!r})
except HeadraceError as error:
    print(error)
""", PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]))
    assert "plug-in API 0" in said and "'acme_broken' failed to load" in said
    assert said.count("told of 3 tokens, length") == 2, "by two models"
    assert said.count("step hook 'acme_faulty' is switched off: step_planned raised OSError: its own fault") == 2
    assert "plug-in package 'acme_failing' failed to start: KeyError: 'nothing there'" in said


@pytest.mark.parametrize("config", [LLAMA, V4], ids=["llama", "deepseek_v4"])
def test_counting_parameters_imports_no_compiler(config: dict):
    """Ranks build the whole model on the meta device to count it; torch's own compiler takes seconds to import."""
    found = json.loads(run_python(f"""
import json, sys, torch
from headrace.layers.build import Build
from headrace.layers.quantization.storage import count_elements
from headrace.models.catalog import find_family
family = find_family({config["architectures"][0]!r})
spec = family.read_config({config!r})
builds = [Build(torch.device(device), torch.float32, 64) for device in ("cpu", "meta")]
counts = [count_elements(family.build_model(spec, build)) for build in builds]
print(json.dumps([counts, sorted({{"torch._dynamo", "sympy"}} & set(sys.modules))]))
"""))
    assert found == [[found[0][0]] * 2, []] and found[0][0] > 0
