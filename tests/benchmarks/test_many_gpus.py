"""The benchmark of several GPUs: commands and options of all parts are accepted, parts resume, and the table."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cpu_servers import free_port
from benchmarks.cuda import make_workload
from benchmarks.disaggregation import Result
from benchmarks.forms import engine_options, join_options, model_folder, read_config
from benchmarks.many_gpus.__main__ import choose, main
from benchmarks.many_gpus.plan import MOST_LIMIT_S, Part, fit_layers, list_parts, ways_of
from benchmarks.many_gpus.running import NO_TIME, run_part, run_parts
from benchmarks.many_gpus.table import Row, find_efficiency, format_table, read_results, read_rows
from benchmarks.roofline import Shape
from headrace.base.config import engine_config
from headrace.models.catalog import find_family
from headrace.parallel.division import Division

ALL = {gpus: list_parts(gpus) for gpus in (2, 4, 8)}
PARTS = [pytest.param(part, id=f"{gpus}-{part.name}") for gpus, parts in ALL.items() for part in parts]


class Parsed(Exception):
    """Raised in place of a benchmark's run."""


@pytest.mark.parametrize("part", PARTS)
def test_commands_are_those_of_benchmarks(part: Part, monkeypatch: pytest.MonkeyPatch):
    parse, found = argparse.ArgumentParser.parse_known_args, []

    def stop(self: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        _, rest = parse(self, *given, **named)
        found.extend(rest)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.setattr(sys, "argv", [*part.command, "--json", "FILE"])
    with pytest.raises(Parsed):
        importlib.import_module(part.command[0]).main()
    assert not found


@pytest.mark.parametrize("part", [value for value in PARTS if "--options" in value.values[0].command])
def test_models_can_be_divided_so(part: Part):
    """Without a device: the engine's configuration, and each layer by the rules of ranks."""
    form = engine_options(part.model)
    config = engine_config(**join_options(form, part.options))
    parallel = config.parallel
    assert parallel.data_parallel_size * parallel.num_ranks == part.gpus
    model = read_config(part.model, part.options)
    spec = find_family(model["architectures"][0]).read_config(model)
    spec.check_division(Division.of(parallel))
    assert part.gpus == 1 or ways_of(part.options) != "one GPU"


@pytest.mark.parametrize("gpus", ALL)
def test_parts_are_independent_and_short(gpus: int):
    parts = ALL[gpus]
    assert len({part.name for part in parts}) == len(parts)
    assert all(0 < part.limit_s <= MOST_LIMIT_S <= 480 - 35 and 1 <= part.gpus <= gpus for part in parts)
    assert all(model_folder(part.model).exists() for part in parts if part.kind in ("cuda", "deepseek_v4", "trace"))
    names, half = {part.name for part in parts}, gpus // 2
    pipeline = "pp2" if half == 1 else f"pp2-tp{half}"
    assert names >= {
        "llama-3.3-70b-tp2", f"llama-3.3-70b-tp{gpus}", f"llama-3.3-70b-{pipeline}", "llama-3.3-70b-fp8-onegpu",
        "llama-3.3-70b-fp8-tp2", f"llama-3.3-70b-fp8-tp{gpus}", f"qwen3-30b-a3b-tp{gpus}",
        f"qwen3-30b-a3b-tp{gpus}-ep{gpus}", f"qwen3-30b-a3b-dp{gpus}", f"deepseek-v4-flash-tp{gpus}-ep{gpus}",
        f"deepseek-v4-flash-dp{gpus}-ep{gpus}", f"collectives-{gpus}", f"pair-{half}-{half}",
        f"dispatch-qwen3-30b-{gpus}", f"dispatch-deepseek-v3-{gpus}-128",
    }
    large = {name for name in names if name.startswith("deepseek-v3")}
    assert large == ({
        "deepseek-v3-fp8-block-tp8-61-layers", "deepseek-v3-fp8-block-dp8-ep8-61-layers",
    } if gpus == 8 else set())
    balanced = {part.name: part for part in parts if "experts" in part.name}
    assert balanced.keys() == ({
        "deepseek-v4-flash-dp8-ep8-redundant-experts", "deepseek-v4-flash-dp8-ep8-skewed-experts-stay",
        "deepseek-v4-flash-dp8-ep8-skewed-experts-move",
    } if gpus == 8 else set())
    for name, part in balanced.items():
        assert bool(part.options.get("enable_eplb")) == (not name.endswith("stay"))
        assert ("config_overrides" in part.options) == ("skewed" in name)


def test_deepseek_v3_is_as_large_as_its_makers_say():
    """671 billion parameters, of which a token takes 37."""
    shape = Shape.of(read_config("deepseek-v3"))
    experts = shape.num_experts * shape.expert_parameters
    assert (shape.matmul_parameters + experts + 2 * shape.head_parameters) / 1e9 == pytest.approx(671, abs=0.5)
    assert (shape.used_parameters + shape.head_parameters) / 1e9 == pytest.approx(36.6, abs=0.5)
    spec = find_family("DeepseekV3ForCausalLM").read_config(read_config("deepseek-v3"))
    routing = spec.layers[-1].mlp.routing if spec.layers[-1].mlp else spec.mlp.routing
    assert (routing.num_experts, routing.top_k, routing.num_groups, routing.top_groups) == (256, 8, 8, 4)
    assert spec.layers[0].rope.scaling.factor == 40


def test_layers_that_fit_and_those_asked_for():
    assert 4 < fit_layers(4, divides_attention=False) < fit_layers(4, divides_attention=True) < 61
    names = {part.name for part in list_parts(8, layers=20)}
    assert {"deepseek-v3-fp8-block-tp8-20-layers", "deepseek-v3-fp8-block-dp8-ep8-20-layers"} <= names
    part = next(part for part in list_parts(8, layers=20) if part.name == "deepseek-v3-fp8-block-tp8-20-layers")
    joined = join_options(engine_options(part.model), part.options)
    assert json.loads(joined["config_overrides"]).keys() == {"quantization_config", "num_hidden_layers"}
    with pytest.raises(SystemExit, match="its own dtype"):
        join_options({"dtype": "bfloat16"}, {"dtype": "float32"})


def test_copies_of_a_workload_have_other_tokens():
    one, two = make_workload("offline256", 4096, 1), make_workload("offline256", 4096, 2)
    assert len(two[0]) == len(two[1]) == 512 and two[0][:256] == one[0] and two[0][256] != one[0][0]


def program(folder: Path, name: str, text: str, limit_s: float = 60) -> Part:
    """A part that runs a small program; ``FILE`` in its text is where it writes."""
    (folder / f"{name}.py").write_text(f"import sys, time\nFILE = sys.argv[-1]\n{text}\n")
    return Part(name, "trace", 2, "a", "TP 2", (name,), limit_s)


def test_parts_resume_and_do_not_stop_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    out = tmp_path / "out"
    write = "open(FILE, 'w').write('{\"workload\": \"w\", \"kernels\": [[\"sum_x\", 1, 3, 1], [\"gemm\", 1, 3, 3]]}')"
    good = program(tmp_path, "good", write)
    bad = program(tmp_path, "bad", "print('why'); raise SystemExit(3)")
    late = program(tmp_path, "late", "time.sleep(290)", 1.0)
    silent = program(tmp_path, "silent", "")
    faults = run_parts([bad, late, silent, good], out)
    assert faults.keys() == {"bad", "late", "silent"} and "exit status 3" in faults["bad"]
    assert faults["late"] == "took more than 1 s" and (out / "bad.log").read_text() == "why\n"
    assert (out / "late.failed").exists() and not (out / "good.failed").exists()
    kept = (out / "good.json").stat().st_mtime_ns
    program(tmp_path, "bad", write)
    assert not run_parts([good, bad], out)
    assert (out / "good.json").stat().st_mtime_ns == kept and not (out / "bad.failed").exists()
    assert run_parts([silent], out, seconds=10) == {"silent": NO_TIME}
    rows = [row for result in read_results(out) for row in read_rows(result)]
    assert [(row.part, row.cell, row.value) for row in rows] == [
        ("bad", "w: communication", 25.0), ("good", "w: communication", 25.0)
    ]
    assert "silent: no time left" in format_table(rows, {"silent": NO_TIME})


def test_a_part_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(290)'])\n" \
        "print(child.pid, flush=True)\ntime.sleep(290)"
    assert "took more than" in (run_part(program(tmp_path, "parent", text), tmp_path, 2.0) or "")
    child = int((tmp_path / "parent.log").read_text())
    for _ in range(100):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child is still there")


def test_ranks_on_a_cpu_from_end_to_end(tmp_path: Path):
    command = ("benchmarks.expert_dispatch", "--device", "cpu", "--model", "tiny", "--ranks", "2", "--tokens", "4")
    part = Part("tiny", "dispatch", 2, "tiny", "2 ranks", (*command, "--port", str(free_port())))
    assert not run_parts([part], tmp_path), (tmp_path / "tiny.log").read_text()[-2000:]
    [result] = read_results(tmp_path)
    rows = read_rows(result)
    assert [row.cell for row in rows] == ["all-gather, 4 tokens", "all-to-all, 4 tokens"]
    assert all(row.value > 0 and row.peer.endswith("us (local)") for row in rows)


def result(part: Part, made: Any) -> dict[str, Any]:
    return json.loads(json.dumps({"part": part.__dict__, "made": made}))


def find(name: str, gpus: int) -> Part:
    return next(part for part in ALL[gpus] if part.name == name)


def test_the_table_compares_gpus_and_goals():
    def seconds(name: str, gpus: int, value: float) -> dict[str, Any]:
        return result(find(name, gpus), [{"cell": "offline256", "seconds": value, "better_peer": 99.0}])

    results = [
        seconds("llama-3.3-70b-fp8-onegpu", 4, 80.0), seconds("llama-3.3-70b-fp8-tp2", 4, 50.0),
        seconds("llama-3.3-70b-fp8-tp4", 4, 25.0), seconds("llama-3.3-70b-tp2", 4, 44.0),
        seconds("llama-3.3-70b-tp4", 4, 30.0), seconds("llama-3.1-8b-onegpu", 2, 13.0),
        seconds("llama-3.1-8b-dp2-copies", 2, 13.0),
    ]
    rows = [row for one in results for row in read_rows(one)]
    by_name = {row.part: row for row in rows}
    shares = {name: [find_efficiency(row, rows, gpus) for gpus in (1, 2)] for name, row in by_name.items()}
    assert shares["llama-3.3-70b-fp8-onegpu"] == [None, None] and shares["llama-3.3-70b-fp8-tp2"] == [0.8, None]
    assert shares["llama-3.3-70b-fp8-tp4"] == [0.8, 1.0]
    assert shares["llama-3.3-70b-tp4"] == [None, pytest.approx(44 * 2 / (30 * 4))]
    assert shares["llama-3.1-8b-dp2-copies"] == [1.0, None]  # twice the work in the same time
    assert by_name["llama-3.3-70b-tp2"].peer == "52.200 s" and by_name["llama-3.3-70b-tp4"].peer == "-"
    line = next(line for line in format_table(rows, {}).splitlines() if "30.000 s" in line)
    assert line.split()[-7:] == ["24", "s", "1.25", "-", "-", "73", "%"]


def test_figures_of_each_kind():
    flash = find("deepseek-v4-flash-dp8-ep8-redundant-experts", 8)
    cells = {"decode64": {"prefill_ms": 9.0, "decode_ms": 9.5}, "prefill8k": {"prefill_ms": 700.0}}
    [decode, prefill] = read_rows(result(flash, {"layers": 43, "cells": cells}))
    assert (decode.value, decode.goal, decode.gpu_time) == (9.5, 10.0, 9.5) and prefill.value == 700.0
    [cut, _] = read_rows(result(flash, {"layers": 41, "cells": cells}))
    assert cut.cell == "decode64, 41 layers" and cut.goal is None
    line = {"one step": 5.0, "two steps": 4.0, "NCCL": 20.0, "all-to-all": 3.0, "NCCL all-to-all": 9.0}
    rows = read_rows(result(find("collectives-4", 4), {"microseconds": {"32768": line, "1048576": line}}))
    assert [(row.cell, row.value, row.goal, row.peer) for row in rows] == [
        ("all-reduce of 32 KB", 4.0, 6.0, "20.0 us (NCCL)"), ("all-to-all of 32 KB", 3.0, None, "9.0 us (NCCL)"),
    ]
    gaps = np.array([2.0, 2.0, 4.0])
    figures = [Result([first], [], gaps, 2 * gaps).figures() for first in (0.4, 0.39)]
    rows = read_rows(result(find("pair-1-1", 4), dict(zip(("pair", "one"), figures, strict=True))))
    assert [(row.cell, row.value, row.peer) for row in rows][:2] == [
        ("first alone", 400.0, "390.00 ms (one)"), ("gap alone p50", 2.0, "2.00 ms (one)")
    ]
    assert [row.cell for row in rows][2:] == ["gap alone p99", "gap beside p50", "gap beside p99"]
    assert find_efficiency(Row("a", "m", "w", 4, "c", 1.0, "us"), [], 1) is None


def test_parts_are_chosen_by_name_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert [part.name for part in choose(ALL[4], ["collectives-*"])] == ["collectives-4", "collectives-2"]
    with pytest.raises(SystemExit, match="no part 'nothing'"):
        choose(ALL[4], ["nothing"])
    (tmp_path / "collectives-2.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["x", "--gpus", "4", "--list", "--parts", "collec*", "--out", str(tmp_path)])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert ["done" in line for line in lines] == [False, True] and "--ranks 4" in lines[0]
