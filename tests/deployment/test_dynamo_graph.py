"""The graph for Dynamo's operator: fields that it has, and commands that exist.

The operator's schema is too large to keep. The fields are those of its Go types (deploy/operator,
api/v1beta1, 1.6) and of Kubernetes' PodSpec, as far as they are used or near.
"""

from __future__ import annotations

import re
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.dynamo_worker import command
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.version import __version__

FOLDER = Path(__file__).parents[2] / "deploy" / "dynamo"
SPEC = "backendFramework components env"
COMPONENT = (
    "compilationCache dynamoSidecar frontendSidecar minAvailable modelRef multinode name "
    "podTemplate replicas roles runtimeVersionOverride scalingAdapter sharedMemorySize "
    "topologyConstraint type"
)
TYPES = "frontend worker prefill decode planner epp"
POD = "containers initContainers securityContext terminationGracePeriodSeconds volumes"
CONTAINER = (
    "args command env envFrom image livenessProbe name ports readinessProbe resources "
    "securityContext startupProbe volumeMounts workingDir"
)


@pytest.fixture(scope="module")
def graph() -> Any:
    return read_yaml(FOLDER / "deployment.yaml")


def main_of(component: Any) -> Any:
    """The container that the operator looks for."""
    (container,) = component["podTemplate"]["spec"]["containers"]
    assert container["name"] == "main"
    return container


def test_the_operator_has_every_field(graph: Any) -> None:
    assert (graph["apiVersion"], graph["kind"]) == (
        "nvidia.com/v1beta1",
        "DynamoGraphDeployment",
    )
    assert graph.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert set(graph["spec"]) <= set(SPEC.split())
    for component in graph["spec"]["components"]:
        assert set(component) <= set(COMPONENT.split())
        assert component["type"] in TYPES.split()
        assert component["podTemplate"].keys() == {"spec"}
        pod = component["podTemplate"]["spec"]
        assert set(pod) <= set(POD.split())
        assert set(main_of(component)) <= set(CONTAINER.split())
        volumes = {one["name"] for one in pod.get("volumes", ())}
        assert {one["name"] for one in main_of(component).get("volumeMounts", ())} <= volumes


def test_its_commands_are_ours_and_its_versions_the_pinned(graph: Any) -> None:
    frontend, worker = graph["spec"]["components"]
    pins = (FOLDER / "requirements.txt").read_text("utf-8")
    (pinned,) = re.findall(r"^ai-dynamo==(.*)$", pins, re.MULTILINE)
    for component in (frontend, worker):
        assert component["runtimeVersionOverride"] == pinned
        assert main_of(component)["image"] == f"dflash-trt-dynamo:{__version__}"
    (size,) = re.findall(r"--page-size (\d+)", (FOLDER / "deployment.yaml").read_text("utf-8"))
    assert f"--kv-cache-block-size={size}" in main_of(frontend)["args"]
    container = main_of(worker)
    assert container["command"][-2:] == ["dflash-trt", "dynamo-worker"]
    read = copy(command).make_context("dynamo-worker", list(container["args"])).params
    mounts = [one["mountPath"] for one in container["volumeMounts"]]
    assert str(read["bundle"].parent) in mounts
    environment = {one["name"]: one["value"] for one in container["env"]}
    grace = int(environment["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"])
    assert worker["podTemplate"]["spec"]["terminationGracePeriodSeconds"] > grace
    # In a cluster nothing finds workers by the files of one machine.
    assert environment.get("DYN_DISCOVERY_BACKEND") != "file"
    assert "multinode" not in worker  # one process on one device
