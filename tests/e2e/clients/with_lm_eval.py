"""lm-eval's `local-completions`: multiple choice and rolling perplexity by echoed logprobs, and generation, over a task
of its own that needs no network."""

import json
import math
import sys
import tempfile
import urllib.request
from pathlib import Path

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

DOCS = [
    {"question": "The sky is", "choices": ["blue", "made of cheese"], "answer": 0, "text": "The sky is blue."},
    {"question": "Two and two make", "choices": ["four", "a lamp"], "answer": 0, "text": "Two and two make four."},
]
COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {data}}}\ntest_split: test\n"
TASKS = {
    "offline_choice": (
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: '
        '"{{answer}}"\nmetric_list:\n  - metric: acc\n'
    ),
    "offline_rolling": (
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n  - metric: '
        'bits_per_byte\n'
    ),
    "offline_generate": (
        'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{choices[0]}}"\ngeneration_kwargs: '
        '{until: ["."], max_gen_toks: 8}\nmetric_list:\n  - metric: exact_match\n'
    ),
}


def main(url: str) -> None:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    folder = Path(tempfile.mkdtemp())
    data = folder / "docs.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    for task, text in TASKS.items():
        (folder / f"{task}.yaml").write_text(f"task: {task}\n" + COMMON.format(data=data) + text)
    model = LocalCompletionsAPI(
        model=name, base_url=url + "/v1/completions", tokenizer_backend="remote", max_length=512, num_concurrent=2,
        max_retries=1, batch_size=2,
    )
    results = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0
    )["results"]
    print(json.dumps(results, indent=1, default=str))
    assert 0 <= results["offline_choice"]["acc,none"] <= 1
    assert (
        math.isfinite(results["offline_rolling"]["bits_per_byte,none"])
        and results["offline_rolling"]["bits_per_byte,none"] > 0
    )
    assert "exact_match,none" in results["offline_generate"]


if __name__ == "__main__":
    main(sys.argv[1])
