"""The examples in docs/examples say what is true: manifests parse, and their options are known and go together."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import command_options

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
COMMAND = re.compile(r"(?<!/)\bheadrace (serve|batch|router)((?:[^\n]|(?<=\\)\n)*)")


def known_flags(command: str) -> set[str]:
    return {info.flag for info in command_options(COMMANDS[command])} | {"--tp", "--pp", "--dp"}


def check_flags(command: str, text: str) -> int:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named <= known_flags(command), named - known_flags(command)
    return len(named)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.slurm")), ids=lambda path: path.name)
def test_jobs_of_slurm(path: Path):
    """They are shell, ask for what their commands need, and name options that exist."""
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert re.search(r"^#SBATCH --nodes=\d+$", text, re.MULTILINE) and "set -euo pipefail" in text
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    commands = COMMAND.findall(body)
    assert commands and all(check_flags(command, rest) >= 2 for command, rest in commands)


def find_pods(value: Any) -> list[dict[str, Any]]:
    """The specifications that have containers, at any depth."""
    if isinstance(value, list):
        return [found for part in value for found in find_pods(part)]
    if not isinstance(value, dict):
        return []
    return [value] * ("containers" in value) + [found for part in value.values() for found in find_pods(part)]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_of_kubernetes(path: Path):
    """Volumes that are mounted are declared, and arguments are options that exist."""
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    assert all({"apiVersion", "kind", "metadata", "spec"} <= document.keys() for document in documents)
    pods = find_pods(documents)
    assert pods
    for pod in pods:
        declared = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= declared
            command, *rest = container.get("args", [""])
            if command in COMMANDS:
                assert check_flags(command, " ".join(rest)) >= 2


def test_the_application_of_kuberay():
    """Its arguments are those that `headrace.ray:app` takes, and its engines fit the workers."""
    pytest.importorskip("ray")
    from headrace.serving.ray.app import plan_engine, read_arguments

    manifest = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "headrace.ray:app"
    scale, setup = read_arguments(application["args"])
    (workers,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert scale.min_replicas >= workers["minReplicas"] and scale.max_replicas <= workers["maxReplicas"]
    limits = container["resources"]["limits"]
    for bundle in plan_engine(setup.config).bundles:
        assert bundle["GPU"] <= int(limits["nvidia.com/gpu"]) and bundle["CPU"] <= int(limits["cpu"])


def test_the_hosts_of_one_engine():
    """Ranks go evenly over the pods, and the first is where the others look for it."""
    from headrace.base.config import engine_config

    documents = list(yaml.safe_load_all((FOLDER / "serve-on-nodes.yaml").read_text()))
    pods = next(document for document in documents if document["kind"] == "StatefulSet")
    ((container,),) = (pod["containers"] for pod in find_pods(pods))
    options = dict(part.removeprefix("--").split("=", 1) for part in container["args"] if part.startswith("--"))
    names = {name.replace("-", "_"): value for name, value in options.items() if name not in ("host", "node-rank")}
    numbers = ("tensor_parallel_size", "pipeline_parallel_size", "nnodes")
    config = engine_config(model=container["args"][1], **names | {name: int(names[name]) for name in numbers})
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    assert config.nodes.nnodes == pods["spec"]["replicas"]
    assert ranks == config.nodes.nnodes * int(container["resources"]["limits"]["nvidia.com/gpu"])
    service = next(document for document in documents if document["spec"].get("clusterIP") == "None")
    assert config.nodes.master_addr == f"{pods['metadata']['name']}-0.{service['metadata']['name']}"
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
