"""Each plug-in imports alone; one that is broken hurts nobody and is explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sources import PACKAGE, ROOT

from headrace.kernels.operation import Operation

FAMILIES = sorted(p.parent.name for p in (PACKAGE / "models").glob("*/family.py"))
OPERATIONS = sorted(p.parent.name for p in (PACKAGE / "kernels").glob("*/__init__.py"))

BROKEN = {
    "syntax_error": "def broken(:\n",
    "missing_dependency": "import a_package_that_does_not_exist\n",
    "raising": "raise RuntimeError('raised at import')\n",
}


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250,
        env={**os.environ, **variables}
    )


FAMILIES_ALONE = """
import importlib, json, os, sys, traceback
first, *families = sys.argv[1:]
if first == "torch":
    import torch
for family in families:
    child = os.fork()
    if not child:
        told = {"family": family}
        try:
            declared = importlib.import_module(f"headrace.models.{family}.family").FAMILY
            told |= {"name": declared.name, "has_torch": "torch" in sys.modules}
            if first == "torch":
                importlib.import_module(declared.model.partition(":")[0])
        except BaseException:
            told["error"] = traceback.format_exc()
        ours = (name.split(".") for name in sys.modules if name.startswith("headrace.models."))
        told["folders"] = sorted({name[2] for name in ours if len(name) > 3} & set(families))
        os.write(1, json.dumps(told).encode() + b"\\n")
        os._exit(0)
    os.waitpid(child, 0)
"""


def import_families(first: str) -> dict[str, dict]:
    """What each family's own process has after importing its declaration, and after ``first`` torch, its model."""
    done = subprocess.run(
        [sys.executable, "-c", FAMILIES_ALONE, first, *FAMILIES], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return {told["family"]: told for told in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def declared() -> dict[str, dict]:
    return import_families("nothing")


@pytest.fixture(scope="module")
def modelled() -> dict[str, dict]:
    return import_families("torch")


@pytest.mark.parametrize("family", FAMILIES)
def test_family_imports_alone(family: str, declared: dict[str, dict], modelled: dict[str, dict]):
    alone = {"family": family, "name": family, "folders": [family]}
    assert declared[family] == {**alone, "has_torch": False}, "a family imports another one, or torch"
    assert modelled[family] == {**alone, "has_torch": True}, "a family's model imports another family"


OPERATIONS_ALONE = """
import importlib, os, sys
import torch
for operation in sys.argv[1:]:
    child = os.fork()
    if not child:
        importlib.import_module(f"headrace.kernels.{operation}")
        ours = [name for name in sys.modules if name.startswith("headrace")]
        found = [name for name in ours if name.split(".")[-1] in ("triton", "cudnn", "flashinfer")]
        os.write(1, " ".join([operation, *found, *({"triton"} & sys.modules.keys())]).encode() + b"\\n")
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_operations_import_without_their_solutions():
    done = subprocess.run(
        [sys.executable, "-c", OPERATIONS_ALONE, *OPERATIONS], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.stdout.splitlines() == OPERATIONS, done.stderr


@pytest.mark.parametrize("target", ["service.ranks.build", "service.build", "serving.offline.llm", "serving.cli.serve"])
def test_an_engine_needs_no_library_of_a_gpu(target: str):
    """As on a machine without one, where the default installation has none of them."""
    code = f"""
import sys
for name in ('triton', 'cudnn', 'flashinfer', 'cuda'):
    sys.modules[name] = None
import headrace.{target}
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_family_hurts_nobody(kind: str, tmp_path: Path):
    (tmp_path / "broken_family.py").write_text(BROKEN[kind])
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from headrace.base.errors import PluginError
from headrace.models.catalog import FAMILIES, find_family
FAMILIES.add("broken", "broken_family:FAMILY")
assert find_family("LlamaForCausalLM").name == "llama"
try:
    FAMILIES.load("broken")
except PluginError as error:
    assert error.__cause__ is not None
    print(type(error.__cause__).__name__)
else:
    raise SystemExit("the broken family loaded")
assert find_family("Qwen3ForCausalLM").name == "qwen3"
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("SyntaxError", "ModuleNotFoundError", "RuntimeError")


def test_disabled_family_is_refused_by_name():
    code = """
from headrace.base.errors import HeadraceError
from headrace.models.catalog import find_family
assert find_family("Qwen3ForCausalLM").name == "qwen3"
try:
    find_family("LlamaForCausalLM")
except HeadraceError as error:
    print(error)
"""
    done = run_python(code, HEADRACE_DISABLE_PLUGINS="llama")
    assert done.returncode == 0, done.stderr
    assert "HEADRACE_DISABLE_PLUGINS" in done.stdout


IMPORT_ALONE = """
import contextlib, importlib, os, sys, traceback
import torch
with contextlib.suppress(ImportError):
    import triton
for target in sys.argv[1:]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            importlib.import_module(target)
        except ModuleNotFoundError as error:
            os.write(writer, str(error.name).encode())
            os._exit(2)
        except BaseException:
            os.write(writer, traceback.format_exc()[-500:].encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    code, said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.read(reader, 4096).decode()
    os.close(reader)
    if code:
        print(target, code, said)
"""


def registered_modules() -> list[str]:
    """Of everything that is registered but families, their kinds of cache included."""
    import importlib

    import headrace.service.build  # noqa: F401
    from headrace.base import cache, hooks
    from headrace.layers.attention import ATTENTION_BACKENDS
    from headrace.layers.moe import ADAPTERS, DISPATCHERS, EXPERTS
    from headrace.layers.quantization import SCHEMES
    from headrace.models.catalog import FAMILIES
    from headrace.models.drafters.contract import DRAFT_KINDS
    from headrace.service.coordination import COORDINATORS

    for name in FAMILIES.names():
        FAMILIES.load(name)
    operations = [
        value
        for name in OPERATIONS
        for value in vars(importlib.import_module(f"headrace.kernels.{name}")).values() if isinstance(value, Operation)
    ]
    registries = [
        ATTENTION_BACKENDS, ADAPTERS, DISPATCHERS, DRAFT_KINDS, EXPERTS, SCHEMES, hooks.HOOKS, COORDINATORS,
        cache.CACHE_POLICIES, cache.CACHE_POOLS, cache.CACHE_BACKENDS, *operations,
    ]
    return sorted({entry.target.partition(":")[0] for registry in registries for entry in registry})


def test_every_plugin_imports_alone():
    """Each module in a process that has torch and nothing of ours; what is missing must be somebody else's package."""
    modules = registered_modules()
    assert len(modules) > 30
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE, *modules], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    missing = [line.split() for line in done.stdout.splitlines()]
    assert all(
        code == "2" and package.partition(".")[0] in ("cudnn", "triton") for _, code, package in missing
    ), done.stdout
