"""guidellm: a short synchronous benchmark of made-up prompts, without failed requests. ``guidellm`` is run as a command."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(url: str) -> None:
    folder = Path(tempfile.mkdtemp())
    tokenizer = sys.argv[2] if len(sys.argv) > 2 else "gpt2"
    command = [
        str(Path(sys.executable).parent / "guidellm"), "benchmark", "--target", url, "--rate-type", "synchronous", "--max-requests", "3",
        "--data", "prompt_tokens=16,output_tokens=4", "--processor", tokenizer, "--output-path", str(folder / "out.json"),
    ]
    subprocess.run(command, check=True, timeout=300)
    (benchmark,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 3 and not totals["errored"], totals


if __name__ == "__main__":
    main(sys.argv[1])
