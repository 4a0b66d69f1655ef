"""Own CUDA C++ compiled by NVRTC without a device, as the product asks for it. What does not compile would otherwise be
noticed on a GPU first, where another kernel takes its place."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="modules that ask for the sources import Triton")

from cuda_source_cases import CASES

from headrace.kernels import cuda_source, nvrtc
from headrace.kernels.cuda_source import Compiling, CudaSourceError, Source, compiled_by
from headrace.kernels.streams import groups as streams_groups

SOURCES = sorted(path.stem for path in nvrtc.FOLDER.glob("*.cu"))
HOPPER, AMPERE = (9, 0), (8, 0)
NUM_SMS = 132
ARCHITECTURE = b"__CUDA_ARCH__"
EARLY = """
#define MULTIPLY asm volatile( \\
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;" \\
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b))
extern "C" __global__ void early(float *out, unsigned long long a, unsigned long long b) {
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  MULTIPLY;
  d[0] += 1.0f;
  MULTIPLY;
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}
"""


class Nvrtc:
    """Of a version whose code no cache has."""

    def nvrtcVersion(self, major: object, minor: object) -> None:
        pass


@cache
def list_sources(name: str, capability: tuple[int, int] = HOPPER) -> tuple[Source, ...]:
    """What the cases of a source ask for, for a GPU of that compute capability."""
    asked: list[Source] = []

    def take(source: Source) -> Future[None]:
        asked.append(source)
        return Future()

    with pytest.MonkeyPatch.context() as patch, compiled_by(Compiling({}, take)):
        patch.setattr(nvrtc, "open_nvrtc", Nvrtc)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(streams_groups, "count_sms", lambda device: NUM_SMS)
        for find in CASES[name]:
            assert find(), f"{find} finds no kernel"
    assert asked and {own for own, _ in asked} == {name}
    return tuple(asked)


def list_macros(source: Source) -> dict[str, int]:
    defines = (option[2:].split("=") for option in source[1] if option.startswith("-D"))
    return {macro: int(value) for macro, value in defines}


def require_nvrtc() -> None:
    """Skips where there is none."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"there is no NVRTC for {sys.platform} on {platform.machine()}")
    try:
        nvrtc.open_nvrtc()
    except OSError as error:
        pytest.skip(f"NVRTC is not installed (PyPI: nvidia-cuda-nvrtc): {error}")


def test_each_source_has_cases():
    assert sorted(CASES) == SOURCES


@pytest.mark.parametrize("name", SOURCES)
def test_it_compiles(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """And no `wgmma` waits for the one before, which is how ptxas compiles them where its registers do not fit while
    they run on: that depends on lines far away, so a change elsewhere may bring it about."""
    require_nvrtc()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    has_older = ARCHITECTURE in nvrtc.read_source(name)
    for source in (*list_sources(name), *(list_sources(name, AMPERE)[-1:] if has_older else ())):
        try:
            code = cuda_source.compile_source(*source)
        except CudaSourceError as error:
            error.add_note(" ".join(source[1]))
            raise
        assert code[:4] == b"\x7fELF"
        assert not nvrtc.SERIALISED.search(caplog.text), " ".join(source[1])


def test_products_that_wait_for_each_other_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Of this NVRTC's log: sums change while products run."""
    require_nvrtc()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    (tmp_path / "early.cu").write_text(EARLY)
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    code = cuda_source.compile_source("early", ("-arch=sm_90a", "-std=c++17"))
    assert code[:4] == b"\x7fELF"
    assert "early.cu is slower" in caplog.text and nvrtc.SERIALISED.search(caplog.text)


def read_comment(text: str) -> str:
    """The comment that a file begins with."""
    lines = text.splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("//"))])


def list_files(name: str) -> list[Path]:
    """A source and the headers that it includes."""
    path = nvrtc.FOLDER / f"{name}.cu"
    return [path, *(path.parent / header.decode() for header in nvrtc.INCLUDE.findall(path.read_bytes()))]


@pytest.mark.parametrize("name", SOURCES)
def test_comments_name_its_macros(name: str):
    comments = " ".join(read_comment(path.read_text()) for path in list_files(name))
    named = set(re.findall(r"(?:-D|\b)([A-Z][A-Z0-9_]*)\b", comments))
    given = {macro for source in list_sources(name) for macro in list_macros(source)}
    assert given <= named, f"{name}.cu does not say what {sorted(given - named)} are"


CONDITION = re.compile(r"#\s*(ifdef|ifndef|if|elif|else|endif)\b\s*([^/]*)")


def holds(directive: str, condition: str, macros: dict[str, int]) -> bool:
    if directive in ("ifdef", "ifndef"):
        return (condition in macros) == (directive == "ifdef")
    python = condition.replace("&&", " and ").replace("||", " or ").replace("!=", "<>").replace("!", " not ")
    return bool(eval(re.sub(r"[A-Z_]\w*", lambda word: str(macros.get(word[0], 0)), python.replace("<>", "!="))))


def find_compiled(text: str, macros: dict[str, int]) -> Iterator[int]:
    """Numbers of the lines that the preprocessor keeps."""
    open_, taken = [], []  # of each condition around: whether this branch is compiled, and whether one was
    for number, line in enumerate(text.splitlines(), 1):
        match = CONDITION.match(line)
        directive, condition = (match[1], match[2].strip()) if match else ("", "")
        if directive.startswith("if"):
            open_.append(holds(directive, condition, macros))
            taken.append(open_[-1])
        elif directive == "endif":
            open_.pop()
            taken.pop()
        elif directive:
            open_[-1] = not taken[-1] and (directive == "else" or holds(directive, condition, macros))
            taken[-1] |= open_[-1]
        elif all(open_):
            yield number


def test_cases_compile_every_line():
    """A variant that no case has could be broken unnoticed."""
    compiled: dict[Path, set[int]] = {}
    for name in SOURCES:
        for capability, sources in ((HOPPER, list_sources(name)), (AMPERE, list_sources(name, AMPERE)[-1:])):
            for source in sources:
                macros = list_macros(source) | {ARCHITECTURE.decode(): 100 * capability[0] + 10 * capability[1]}
                for path in list_files(name):
                    compiled.setdefault(path, set()).update(find_compiled(path.read_text(), macros))
    left = [
        f"{path.name}:{number}: {line}" for path, found in compiled.items()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if number not in found and line.strip() and not CONDITION.match(line)
    ]
    assert set(compiled) == set(nvrtc.FOLDER.glob("*.cu*")), "headers that no source includes"
    assert not left, "no case compiles\n" + "\n".join(left)
