"""The manifests of ``deploy/kubernetes`` are valid, and leave room and time for a last save."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import typer

from ckpt.cli.main import app
from tests.launch.training import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (the extra [integrations])")

FOLDER = ROOT / "deploy" / "kubernetes"
_GIB = 1 << 30


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def pod_and_container(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The spec of the pods, and their container with its resources."""
    spec = manifest(name)["spec"]
    if name == "trainjob.yaml":
        (patch,) = spec["runtimePatches"]
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        trainer = spec["trainer"]
        resources = {"resources": trainer["resourcesPerNode"], "command": trainer["command"]}
        return pod, pod["containers"][0] | resources
    if name == "jobset.yaml":
        (job,) = spec["replicatedJobs"]
        spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    return pod, pod["containers"][0]


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml", "trainjob.yaml"])
def test_the_last_save_has_its_time_and_two_images_per_rank_their_memory(name: str) -> None:
    pod, container = pod_and_container(name)
    command = container["command"]
    assert command[0] == "torchrun"  # process 1: a shell in its place does not pass SIGTERM on
    (patience,) = (
        int(word.partition("=")[2]) for word in command if word.startswith("--shutdown-timeout=")
    )
    assert 25 < patience < pod["terminationGracePeriodSeconds"]  # grace_seconds=25

    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == {"/dev/shm", "/checkpoints"}
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory"
    size = int(shared["sizeLimit"].removesuffix("Gi")) * _GIB
    memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * _GIB
    assert size < memory  # what is in /dev/shm counts as the container's memory
    assert size * 0.9 >= 8 * 2 * 20 * _GIB  # 8 ranks, two images of 20 GiB; ckpt leaves a tenth


@pytest.mark.integration
@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate is not installed (the extra [integrations])",
)
@pytest.mark.parametrize("name", ["job.yaml", "job-with-agent.yaml", "jobset.yaml"])
def test_a_job_is_what_the_schema_of_kubernetes_describes(name: str) -> None:
    import kubernetes_validate

    job = manifest(name)
    if name == "jobset.yaml":
        (replicated,) = job["spec"]["replicatedJobs"]
        named = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
        job = named | {"spec": replicated["template"]["spec"]}
    kubernetes_validate.validate(job, "1.34", strict=True)
    job["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 120
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.34", strict=True)


def test_an_agent_beside_the_trainer_sees_its_processes_its_memory_and_its_socket() -> None:
    pod, trainer = pod_and_container("job-with-agent.yaml")
    alone, _ = pod_and_container("job.yaml")
    (agent,) = pod["initContainers"]
    assert pod["shareProcessNamespace"] is True
    assert agent["restartPolicy"] == "Always"  # Kubernetes stops it after the trainer
    assert agent["image"] == trainer["image"]
    assert agent["volumeMounts"] == trainer["volumeMounts"]
    assert agent["env"][0] in trainer["env"]
    folder = agent["env"][0]["value"]
    mounts = [mount["mountPath"] for mount in agent["volumeMounts"]]
    assert any(folder.startswith(f"{mount}/") for mount in mounts)
    assert pod["terminationGracePeriodSeconds"] > alone["terminationGracePeriodSeconds"]
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert agent["command"][:2] == ["ckpt", "agent"]
    verbs["agent"].make_context("agent", agent["command"][2:])
    assert "lifecycle" not in agent  # a hook runs at once, and SIGTERM comes after the trainer
