"""Rules of the house that a reader could miss: environment reads, broad excepts, forbidden names, hidden waits."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from sources import PACKAGE, ROOT, docstrings, dotted, scope_of, sources

ALLOWLIST = json.loads((Path(__file__).parent / "allowlist.json").read_text())
FORBIDDEN_MODULE_NAMES = {"utils", "util", "common", "misc", "helper", "helpers", "manager"}
HOT_ROOMS = ("execution", "layers", "models", "memory", "kernels")
WAITS = {"item", "cpu", "tolist", "numpy", "synchronize", "nonzero"}


def test_environment_is_read_in_one_place():
    readers = {
        f"{s.name}:{n.lineno}" for s in sources() for n in s.walk()
        if dotted(n) in ("os.environ", "os.getenv", "environ") and s.name != "base/env.py"
    }
    assert not readers


def test_environment_variables_are_few_and_documented():
    text = (PACKAGE / "base/env.py").read_text()
    from headrace.base.env import VARIABLES

    assert len(VARIABLES) <= 10
    read = set(re.findall(r'environ(?:\.get\(|\.setdefault\(|\[)"([A-Z_]+)"', text))
    for_libraries = {"OMP_WAIT_POLICY", "HOME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"}
    assert read - for_libraries <= set(VARIABLES)


def test_names_say_what_things_are():
    bad = [s.name for s in sources() if set(re.split(r"[/_.]", s.name.removesuffix(".py"))) & FORBIDDEN_MODULE_NAMES]
    # families are called as their models are
    bad += [s.name for s in sources() if s.room != "models" and re.search(r"_v\d+(\.py|/)", s.name)]
    bad += [
        f"{s.name}: {n.name}"
        for s in sources()
        for n in s.walk() if isinstance(n, ast.ClassDef) and n.name.endswith("Manager")
    ]
    assert not bad


def test_modules_open_with_what_they_own():
    missing = [s.name for s in sources() if s.text.strip() and not ast.get_docstring(s.tree)]
    assert not missing


def test_no_unsafe_deserialisation():
    unsafe = [
        f"{s.name}:{n.lineno}" for s in sources() for n in s.walk()
        if (
            isinstance(n, ast.Import)
            and {a.name for a in n.names} & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
        )
        or (isinstance(n, ast.ImportFrom) and n.module in ("pickle", "dill", "cloudpickle", "marshal", "shelve"))
        or (isinstance(n, ast.Call) and dotted(n.func) in ("eval", "exec", "torch.load", "pickle.loads"))
    ]
    assert not unsafe


def _is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(c is None or dotted(c) in ("Exception", "BaseException") for c in caught)


def test_broad_excepts_are_listed():
    found = sorted(
        {
            f"{s.name}: {scope_of(s, n.lineno)}"
            for s in sources()
            for n in s.walk() if isinstance(n, ast.ExceptHandler) and _is_broad(n)
        }
    )
    assert found == sorted(ALLOWLIST["broad_except"]), (
        "broad excepts belong to process mains, plug-in loads and request edges only"
    )


def test_no_error_is_swallowed():
    silent = [
        f"{s.name}:{n.lineno}" for s in sources() for n in s.walk()
        if isinstance(n, ast.ExceptHandler) and len(n.body) == 1 and isinstance(n.body[0], ast.Pass)
    ]
    assert not silent, "an `except: pass` hides an error; use contextlib.suppress with a narrow type and a reason"


def test_no_hidden_wait_on_the_hot_path():
    found = sorted({
        f"{s.name}: {scope_of(s, n.lineno)}: {n.func.attr}" for s in sources()
        if s.room in HOT_ROOMS and not s.name.endswith("/cpu.py")  # solutions for a CPU, whose tensors nobody waits for
        for n in s.walk()
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in WAITS
        and not dotted(n.func).startswith("np.")
    })
    assert found == sorted(ALLOWLIST["synchronisation"]), (
        "each may wait for the device; off the hot path it belongs in the allowlist"
    )


COMPILING = {"compile_source", "load_kernel", "find_kernel", "find_kernels"}


def test_kernels_are_not_remembered_before_they_are_compiled():
    """A plain cache would keep what a dry run is given, whose launches do nothing, for all steps to come."""
    found = [
        f"{s.name}: {n.name}" for s in sources() for n in s.walk() if isinstance(n, ast.FunctionDef)
        and {dotted(d.func if isinstance(d, ast.Call) else d).split(".")[-1] for d in n.decorator_list}
        & {"cache", "lru_cache", "cache_once"}
        and any(isinstance(c, ast.Call) and dotted(c.func).split(".")[-1].lstrip("_") in COMPILING for c in ast.walk(n))
    ]
    assert not found, "use cache_compiled"


CAPABILITY_ROOMS = ("scheduling", "execution", "layers", "models", "memory", "service")


def test_capabilities_are_declared():
    """What a component can do is a typed attribute of its protocol, never looked up by name with a default."""
    found = sorted({
        f"{s.name}: {scope_of(s, n.lineno)}: {n.args[1].value}" for s in sources() if s.room in CAPABILITY_ROOMS
        for n in s.walk() if isinstance(n, ast.Call) and dotted(n.func) in ("getattr", "hasattr")
        and (dotted(n.func) == "hasattr" or len(n.args) == 3) and isinstance(n.args[1], ast.Constant)
    })
    assert found == sorted(ALLOWLIST["optional_attributes"]), "only objects of other packages may be asked so"


def test_library_code_does_not_print():
    printing = [
        f"{s.name}:{n.lineno}" for s in sources() if not s.name.startswith("serving/") for n in s.walk()
        if isinstance(n, ast.Call) and dotted(n.func) == "print"
    ]
    assert not printing


GENERIC_ROOMS = ("base", "memory", "execution", "scheduling", "service")
ARCHITECTURE_NAME = re.compile(
    r"(?i)\b(llama|qwen\d?|gemma\d?|phi3|olmo2?|granite|glm4?|mistral|mixtral|deepseek|cohere|starcoder)"
    r"|For(CausalLM|ConditionalGeneration)"
)
BACKEND_NAME = re.compile(r"(?i)\b(cudnn|flashinfer|triton|flash_?attn|cutlass)\b")


def _words(source) -> list[tuple[int, str]]:
    skip = docstrings(source.tree)
    found = []
    for n in source.walk():
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in skip:
            found.append((n.lineno, n.value))
        elif isinstance(n, ast.Name):
            found.append((n.lineno, n.id))
        elif isinstance(n, ast.Attribute):
            found.append((n.lineno, n.attr))
    return found


# The words of formats are not architecture names: tokenizer models are called so in GGUF metadata, and the ways to
# write
# tool calls after those who write them.
FORMAT_MODULES = ("service/tokenization/gguf_vocabulary.py", "service/parsing/known_formats.py")


def test_generic_code_names_no_architecture_and_no_backend():
    named = [
        f"{s.name}:{line}: {word[:60]}"
        for s in sources() if s.room in GENERIC_ROOMS and not s.name.startswith(FORMAT_MODULES)
        for line, word in _words(s) if ARCHITECTURE_NAME.search(word) or BACKEND_NAME.search(word)
    ]
    assert not named


def test_the_repository_is_about_the_product():
    """No machine paths and no registry host names in tracked text."""
    hosts = re.compile(r"/work/|/opt/wheels|\bpypi\.org|files\.pythonhosted")
    suffixes = {
        ".py", ".md", ".toml", ".json", ".cpp", ".h", ".cu", ".cuh", ".html", ".yml", ".yaml", ".txt", ".sh", "",
    }
    found = []
    for top in ("headrace", "tests", "docs", "benchmarks", ".ci", "csrc"):
        for path in (ROOT / top).rglob("*"):
            if (
                path.is_file() and path.suffix in suffixes and path != Path(__file__)
                and "__pycache__" not in path.parts and hosts.search(path.read_text(errors="ignore"))
            ):
                found.append(path.relative_to(ROOT).as_posix())
    assert not found


def test_modules_of_tests_have_names_of_their_own():
    """They are imported by their bare names, so two with one name would be one."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
