"""What commands print in a terminal of 80 columns: no line is longer, no word is broken, what matters comes first."""

from __future__ import annotations

import contextlib
import io

import pytest

from headrace.kernels import nvrtc
from headrace.service import inventory as inventory_module
from headrace.service.inventory import BROKEN, OK, UNAVAILABLE, Finding, Machine, find_machine, take_inventory
from headrace.serving.cli import check
from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import build_parser, parse_command
from headrace.serving.cli.layout import Block, lay_out
from headrace.serving.cli.main import overview

ABOUT = {"cpu": "a", "memory": "b GiB free", "cuda": "none", "python": "3", "torch": "2"}
LAPTOP = Machine((("cpu", "float32", (0, 0)),), ABOUT)
WITH_GPU = Machine((*LAPTOP.devices, ("cuda", "bfloat16", (9, 0))), ABOUT)


def lines_of(blocks: list[Block]) -> list[str]:
    return [line for block in blocks if block.lines for line in (block.title, *block.lines)]


def assert_wrapped(text: str, wide: str, width: int = 80) -> None:
    """``wide`` is the same text with room for every line: the same words, so none of them was broken."""
    for line in text.splitlines():
        assert len(line) <= width or len(line.split()) == 1, line
    assert text.split() == wide.split()


def run(name: str, *argv: str) -> str:
    invocation = parse_command(COMMANDS[name], list(argv))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert invocation.command.load()(invocation) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def inventory() -> tuple[Machine, list[Finding]]:
    machine = find_machine()
    return machine, [*take_inventory(machine), *check.find_libraries()]


def test_the_summary_of_check_fits_a_screen_and_the_details_have_everything(inventory):
    machine, findings = inventory
    texts = {
        width: ["\n".join(lines_of(list(blocks))) for blocks in
                (check.summarize(machine, findings, width), check.details(findings, width))]
        for width in (80, 10_000)
    }
    for narrow, wide in zip(texts[80], texts[10_000], strict=True):
        assert_wrapped(narrow, wide)
    summary, details = texts[80]
    assert len(summary.splitlines()) < 40
    assert " GiB free" in summary and "llama" in summary and "int4" in summary and "CPU kernels" in summary
    words = details.split()
    assert all(finding.name in words for finding in findings)


def missing(machine: Machine, *names: str) -> str:
    findings = [
        Finding(check.KIND, library.package, UNAVAILABLE if library.package in names else OK, (), "1.0: it")
        for library in check.LIBRARIES
    ]
    return "\n".join(lines_of(list(check.summarize(machine, findings, 80))))


def test_the_summary_names_one_command_for_what_is_missing():
    text = missing(LAPTOP, "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "nvidia-cudnn-frontend")
    assert text.count("install '") == 1 and "install 'headrace[otel]'" in text
    assert "traces of requests" in text and "cudnn" not in text  # of no use without a GPU
    with_gpu = missing(WITH_GPU, "opentelemetry-sdk", "nvidia-cudnn-frontend")
    assert "install 'headrace[cuda,otel]'" in with_gpu
    assert "install '" not in missing(LAPTOP)


def test_the_summary_tells_what_is_broken_and_which_kernels_there_are():
    findings = [
        Finding("model family", "llama", OK), Finding("model family", "odd", BROKEN, (), "raised at import"),
        Finding("native kernels", "cpu", UNAVAILABLE, (), "unavailable: no C++ compiler found (g++); install one"),
        Finding("native kernels", "other", OK, (), "idle: never asked for"),
        Finding("native kernels", "third", OK, (), "ready: avx2")
    ]
    text = "\n".join(lines_of(list(check.summarize(LAPTOP, findings, 80))))
    words = " ".join(text.split())
    assert "families llama" in words and "Broken model family odd raised at import" in words
    assert "CPU kernels none, plain torch is used: no C++ compiler found (g++); install one" in words
    assert "-m headrace.kernels.native" in words
    assert "OTHER kernels not compiled yet" in words and "THIRD kernels compiled (avx2)" in words


def test_the_summary_tells_that_a_gpu_runs_slower_kernels(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: (13, 0))
    found = inventory_module._compiler(WITH_GPU)
    assert (found.status, found.devices, found.detail[:5]) == (OK, ("cuda",), "13.0:")
    monkeypatch.setattr(nvrtc, "find_nvrtc", fail)
    assert inventory_module._compiler(LAPTOP).status == UNAVAILABLE
    text = "\n".join(lines_of(list(check.summarize(WITH_GPU, [inventory_module._compiler(WITH_GPU)], 80))))
    words = " ".join(text.split())
    assert "Broken kernel compiler nvrtc slower kernels run on the GPU: libnvrtc.so.13: cannot open" in words


def test_what_was_changed_comes_first_in_show_config(monkeypatch):
    for variable in ("OMP_NUM_THREADS", "HEADRACE_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    argv = ["--page-size", "32", "--served-model-name", "a name"]
    for more in ([], ["-v"], ["--verbose"]):
        monkeypatch.setenv("COLUMNS", "80")
        text = run("show-config", *argv, *more)
        monkeypatch.setenv("COLUMNS", "120")
        assert_wrapped(text, run("show-config", *argv, *more))
        assert text.index("page_size = 32 (flag)") < text.index("served_model_name = a name") < text.index("Defaults")
        assert "policy" in text and ("order of waiting requests" in text) == bool(more)
    assert "Defaults" not in run("show-config", *argv, "--changed")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_breaks_no_words(name: str, monkeypatch: pytest.MonkeyPatch):
    texts = {}
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        texts[columns] = build_parser(COMMANDS[name]).format_help()
    examples = {example for _, example in COMMANDS[name].examples}
    for line in texts["80"].splitlines():
        assert len(line) <= 80 or line.strip() in examples, line
    assert texts["80"].split() == texts["120"].split()


def test_the_overview_fits():
    assert max(map(len, overview().splitlines())) <= 80


def test_texts_of_long_terms_begin_below():
    lines = list(lay_out([("short", "one two"), ("a-term-that-is-far-too-long-for-a-column", "three four")], 40))
    assert lines == [
        "  short" + " " * 21 + "one two", "  a-term-that-is-far-too-long-for-a-column", " " * 28 + "three four"
    ]


def test_a_word_longer_than_the_terminal_stays_whole():
    path = "/" + "x" * 90
    assert path in "\n".join(lay_out([("path", f"see {path} there")], 40)).split()
