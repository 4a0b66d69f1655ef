"""guidellm: a short benchmark of prompts from a file, one after the other and two at once, without failed requests."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS = "prompt,output_tokens_count\nThe sky is,4\nOnce upon a time,4\nTwo and two make,4\n"


def main(url: str) -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "prompts.csv").write_text(PROMPTS)
    for profile in ("kind=synchronous", "kind=concurrent,streams=2"):
        command = [
            Path(sys.executable).parent / "guidellm", "run", "--backend", f"kind=openai_http,target={url}", "--profile",
            profile,
            "--constraint", "kind=max_requests,count=3", "--data", f"kind=csv_file,path={folder}/prompts.csv",
            "--output", f"kind=json,path={folder}/out.json", "--disable-console",
        ]
        subprocess.run(command, check=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        (benchmark,) = json.loads((folder / "out.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] == 3 and not totals["errored"], totals


if __name__ == "__main__":
    main(sys.argv[1])
