"""The manifests of ``deploy/kubernetes`` are valid, and leave room and time for a last save."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from ckpt.agent.folder import AgentFolder
from ckpt.cli.main import app
from ckpt.storage.tiers import urls_of
from tests.agent.conftest import holders, new_place
from tests.kit.stores import whole
from tests.kit.waiting import until
from tests.launch import one_step, training
from tests.launch.training import ROOT
from tests.processes import ended

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (the extra [integrations])")

FOLDER = ROOT / "deploy" / "kubernetes"
_GIB = 1 << 30


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def pod_and_container(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the spec of the pods, and their container with its resources."""
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
    assert command[0] == "torchrun"  # process 1: a shell there would not forward SIGTERM
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
@pytest.mark.parametrize(
    "name",
    ["job.yaml", "job-with-agent.yaml", "agent-daemonset.yaml", "jobset.yaml", "a pod beside it"],
)
def test_a_manifest_is_what_the_schema_of_kubernetes_describes(name: str) -> None:
    import kubernetes_validate

    if name == "a pod beside it":
        job = manifest("job.yaml")
        job["spec"]["template"]["spec"] = pod_beside_the_daemonset()
    else:
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
    assert_is_a_call_of_the_agent(agent["command"])
    assert "lifecycle" not in agent  # a hook runs at once, and SIGTERM comes after the trainer


def assert_is_a_call_of_the_agent(words: list[str]) -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert words[:2] == ["ckpt", "agent"]
    verbs["agent"].make_context("agent", words[2:])


# -- the agent on each node ------------------------------------------------------------------------


def pod_beside_the_daemonset() -> dict[str, Any]:
    """Return the pod of job.yaml, with what the page adds to it."""
    page = (ROOT / "docs" / "launch" / "kubernetes.md").read_text()
    added = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    pod, container = pod_and_container("job.yaml")
    (more,) = added["containers"]
    assert more["name"] == container["name"]
    container["env"] += more["env"]
    container["volumeMounts"] = by_name(container["volumeMounts"] + more["volumeMounts"])
    volumes = by_name(pod["volumes"] + added["volumes"])
    return pod | added | {"volumes": volumes, "containers": [container]}


def by_name(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last entry of each name."""
    return list({entry["name"]: entry for entry in entries}.values())


def test_an_agent_on_a_node_and_its_pods_share_processes_user_memory_socket_and_tiers() -> None:
    spec = manifest("agent-daemonset.yaml")["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    node, beside = spec["template"]["spec"], pod_beside_the_daemonset()
    (agent,), (trainer,) = node["containers"], beside["containers"]
    assert node["hostPID"] is beside["hostPID"] is True
    assert node["securityContext"] == beside["securityContext"]
    assert_is_a_call_of_the_agent(agent["command"])
    assert agent["image"] == trainer["image"]
    (env,) = agent["env"]
    assert env in trainer["env"]
    for part in (agent["volumeMounts"], node["volumes"]):
        part.sort(key=lambda entry: entry["name"])
    assert agent["volumeMounts"] == sorted(trainer["volumeMounts"], key=lambda each: each["name"])
    assert node["volumes"] == sorted(beside["volumes"], key=lambda each: each["name"])

    (folder,) = node["initContainers"]
    user = node["securityContext"]["runAsUser"]
    assert folder["command"][:4] == ["install", "-d", "-o", str(user)]
    assert folder["command"][-3:] == ["-m", "0700", env["value"]]
    assert folder["securityContext"]["runAsUser"] == 0
    assert folder["volumeMounts"][0] in agent["volumeMounts"]
    assert env["value"].startswith(f"{folder['volumeMounts'][0]['mountPath']}/")


CONTAINER = ("unshare", "--mount", "--net", "--ipc", "--uts")
"""The namespaces of a container with ``hostPID``."""
ALONE = (*CONTAINER, "--pid", "--fork", "--kill-child", "--mount-proc")


@contextmanager
def contained(words: Sequence[object], place: AgentFolder) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, **training.ENVIRONMENT, "CKPT_AGENT_FOLDER": place.path}
    env["CKPT_AGENT_MEMORY_SECONDS"] = "0"
    command = [str(word) for word in words]
    with ended(
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    ) as process:
        yield process


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.distributed
def test_an_agent_of_another_container_finishes_the_step_if_it_sees_the_process(
    tmp_path: Path,
) -> None:
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces (unshare)")
    (agent,) = manifest("agent-daemonset.yaml")["spec"]["template"]["spec"]["containers"]
    main = [sys.executable, "-m", "ckpt.cli.main", *agent["command"][1:]]
    script = [sys.executable, ROOT / "tests" / "launch" / "one_step.py", tmp_path]
    with new_place() as place, contained([*CONTAINER, *main], place) as process:
        assert until(lambda: holders(place, "listen") == [process.pid])
        with contained([*ALONE, *script], place) as trainer:
            said, _ = trainer.communicate(timeout=100)
            assert trainer.returncode != 0
            assert "different process namespaces" in said
        with contained([*CONTAINER, *script], place) as trainer:
            assert until((tmp_path / "saved").exists)
            trainer.kill()
        assert until(lambda: whole(tmp_path / "disk") == [1])
        held = f"ckpt-memory-{os.getuid()}-{urls_of(one_step.tiers(tmp_path))[0][6:]}"
        assert until(lambda: not Path("/dev/shm", held).exists())
        assert holders(place, "listen") == [process.pid]
