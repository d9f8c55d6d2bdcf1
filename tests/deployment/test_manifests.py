"""Manifests for a cluster: fields that operators have, commands that exist, GPUs that add up.

The operators' schemas are too large to keep. The tables have the fields of their Go types, as far
as they are used or near: Dynamo's operator (ai-dynamo/dynamo, deploy/operator/api/v1beta1, and the
examples in the ai-dynamo wheel, 1.6), LeaderWorkerSet (kubernetes-sigs/lws, api/leaderworkerset/v1)
and Prometheus's. Pods, and what is Kubernetes' own, kubernetes-validate knows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import dflash_trt
from dflash_trt import CacheOptions
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.cli.dynamo_worker import command
from dflash_trt.cli.main import main
from dflash_trt.errors import DflashError
from dflash_trt.serving.dynamo.packages import RELEASE, TENSORRT_LLM
from dflash_trt.serving.kubernetes import manifests
from tests.cli.conftest import Run, run
from tests.trtllm.conftest import pair

__all__ = ["pair", "run"]

TREE = Path(__file__).parents[2]
TYPES = {
    "DynamoGraphDeployment": (
        "nvidia.com/v1beta1",
        "annotations backendFramework components env labels",
    ),
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        "leaderWorkerTemplate networkConfig replicas rolloutStrategy startupPolicy",
    ),
    "PodMonitor": (
        "monitoring.coreos.com/v1",
        "jobLabel namespaceSelector podMetricsEndpoints podTargetLabels selector",
    ),
}
COMPONENT = (
    "compilationCache dynamoSidecar frontendSidecar minAvailable modelRef multinode name "
    "podTemplate replicas roles runtimeVersionOverride scalingAdapter sharedMemorySize "
    "topologyConstraint type"
)
GROUP = "leaderTemplate restartPolicy size subGroupPolicy volumeClaimTemplates workerTemplate"
ENDPOINT = "honorLabels interval path port relabelings scheme scrapeTimeout"
OWN = ("--image", "own:1")
CASES = {
    "demo": ("paged", "--dynamo"),
    "linear": ("linear", "--dynamo", "--threads", 3, "--max-queue-size", 9, *OWN),
    "one node": ("b300x8",),
    "two nodes": ("gb300x8", *OWN),
    "one node of Dynamo": ("b300x8", "--dynamo"),
    "two nodes of Dynamo": ("gb300x8", "--dynamo", *OWN),
    "own weights": ("local", "--dynamo", *OWN),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> dict[str, Path]:
    """What `package` takes: two bundles, four deployments."""
    root = tmp_path_factory.mktemp("built")
    dflash_trt.build("demo", root / "paged", caches=CacheOptions(kv_layout="paged", page_size=16))
    dflash_trt.build("demo", root / "linear")
    pairs = {"b300x8": ("gpt-oss-120b", "b300x8"), "gb300x8": ("gpt-oss-120b", "gb300x8")}
    pairs |= {"local": (str(pair), "one"), "older": ("gpt-oss-120b", "b300x8")}
    for name, (target, profile) in pairs.items():
        options = ["--target", target, "--profile", profile, "-o", str(root / name)]
        options += ["--trtllm-version", "1.3.0rc27"] if name == "older" else []
        assert main(["build", "--executor", "trtllm", *options]) == 0
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest, built: dict[str, Path], run: Run, tmp_path: Path) -> Any:
    """The manifests of a case by their kinds."""
    name, *options = CASES[request.param]
    told = run.well("package", built[name], *options, "-o", tmp_path / "out")
    texts = [path.read_text("utf-8") for path in sorted((tmp_path / "out").iterdir())]
    found = {one["kind"]: one for text in texts for one in yaml.safe_load_all(text)}
    assert all(kind in told.out for kind in found) and "no cluster has seen" in told.out
    return found


def pods_of(one: Any) -> list[Any]:
    """The pod templates in a manifest."""
    spec = one.get("spec", {})
    found = [component["podTemplate"] for component in spec.get("components", ())]
    for place in (spec, spec.get("leaderWorkerTemplate", {})):
        names = ("template", "leaderTemplate", "workerTemplate")
        found += [place[name] for name in names if name in place]
    return found


def test_operators_have_every_field(made: Any) -> None:
    for kind, one in made.items():
        spec = one.get("spec", {})
        if kind in TYPES:
            version, known = TYPES[kind]
            assert one["apiVersion"] == version and set(spec) <= set(known.split())
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])
        for component in spec.get("components", ()):
            assert set(component) <= set(COMPONENT.split())
            assert component["type"] in ("frontend", "worker")
            assert component["podTemplate"]["spec"]["containers"][0]["name"] == "main"
            assert component["runtimeVersionOverride"] == RELEASE
        assert set(spec.get("leaderWorkerTemplate", ())) <= set(GROUP.split())
        for endpoint in spec.get("podMetricsEndpoints", ()):
            assert set(endpoint) <= set(ENDPOINT.split())
        for template in pods_of(one):
            _check_pod(template["spec"], of_dynamo=kind == "DynamoGraphDeployment")


def _check_pod(pod: Any, *, of_dynamo: bool) -> None:
    """What no schema says of a pod."""
    volumes = {one["name"] for one in pod.get("volumes", ())}
    (main,) = pod["containers"]
    for container in (*pod.get("initContainers", ()), main):
        mounts = container.get("volumeMounts", [])
        paths = [one["mountPath"] for one in mounts]
        assert {one["name"] for one in mounts} <= volumes and len(set(paths)) == len(paths)
        assert not of_dynamo or "/dev/shm" not in paths  # the operator's own
        assert "DYN_DISCOVERY_BACKEND" not in str(container)  # the operator's too
    probed = {one["httpGet"]["port"] for name, one in main.items() if name.endswith("Probe")}
    assert probed <= {one["name"] for one in main["ports"]}


def test_kubernetes_has_every_field(made: Any) -> None:
    reason = "kubernetes-validate (the test extra) is not installed"
    validator = pytest.importorskip("kubernetes_validate", reason=reason)
    shipped = (TREE / "deploy/kubernetes").rglob("*.yaml")
    for one in (*made.values(), *(yaml.safe_load(path.read_text("utf-8")) for path in shipped)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}}
        plain = [{**pod, **template} for template in pods_of(one)]
        for each in plain if one["kind"] in TYPES else [one]:
            for version in ("1.37", "1.30"):
                validator.validate(each, version, strict=True)


def test_gpus_add_up(made: Any) -> None:
    """Nodes × GPUs are TP × PP; a bundle for the CPU has none."""
    if "ConfigMap" not in made:
        assert "nvidia.com/gpu" not in str(made)
        return
    config, (workload,) = made["ConfigMap"], (one for one in made.values() if pods_of(one))
    arguments, spec = yaml.safe_load(config["data"]["dflash.yaml"]), workload["spec"]
    *others, worker = pods_of(workload)
    (container,) = worker["spec"]["containers"]
    nodes = spec.get("leaderWorkerTemplate", {"size": 1})["size"]
    if "components" in spec:
        nodes = spec["components"][1].get("multinode", {"nodeCount": 1})["nodeCount"]
        assert spec["backendFramework"] == "trtllm"
        assert container["command"] == ["python3", "-m", "dynamo.trtllm"]
        assert "--extra-engine-args=/etc/dflash-trt/dflash.yaml" in container["args"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    # As the deployment's README starts every variant.
    assert {"name": "TRTLLM_ENABLE_PDL", "value": "1"} in container["env"]
    # A baseline of several servers is no variant.
    assert (
        config["data"].keys() >= {"autoregressive.yaml"}
        and "disaggregated.yaml" not in config["data"]
    )
    assert nodes * gpus == arguments["tensor_parallel_size"]
    assert f"'{config['metadata']['name']}'" in str(worker["spec"]["volumes"])
    named = re.findall(r"/etc/dflash-trt/([\w.]+)", str(pods_of(workload)))
    assert named and set(named) <= set(config["data"])
    # Weights that came along lie in the claim; the frontend reads their tokenizer.
    if arguments["speculative_config"]["speculative_model"].startswith("/deployment/"):
        assert "'mountPath': '/deployment', 'subPath': 'local'" in str(others[0])


@pytest.mark.parametrize("name", ["demo", "linear"])
def test_a_bundles_graph_runs_what_there_is(
    built: dict[str, Path], run: Run, tmp_path: Path, name: str
) -> None:
    bundle, *options = CASES[name]
    run.well("package", built[bundle], *options, "-o", tmp_path / "out")
    graph = yaml.safe_load((tmp_path / "out/manifests.yaml").read_text("utf-8"))
    frontend, worker = (one["spec"]["containers"][0] for one in pods_of(graph))
    read = copy(command).make_context("dynamo-worker", list(worker["args"])).params
    assert read["bundle"] == Path("/models", bundle)
    routing = {"demo": ["--router-mode=kv", "--kv-cache-block-size=16"]}
    assert frontend["args"][1:] == routing.get(name, ["--router-mode=least-loaded"])
    if name == "linear":
        assert (read["threads"], read["max_queue_size"]) == (3, 9)
        assert worker["resources"]["limits"]["cpu"] == "3" and worker["image"] == "own:1"
    waits = {one["name"]: one["value"] for one in worker["env"]}
    grace = int(waits["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"])
    assert pods_of(graph)[1]["spec"]["terminationGracePeriodSeconds"] > grace
    pins = (TREE / "deploy/dynamo/requirements.txt").read_text("utf-8")
    assert f"\nai-dynamo=={RELEASE}\n" in pins
    assert f"{manifests.OUR_IMAGE} " in (TREE / "deploy/dynamo/Dockerfile").read_text("utf-8")


def test_what_cannot_be_is_refused(
    built: dict[str, Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(piece: str, name: str, *options: object) -> None:
        run("package", built[name], *options, "-o", tmp_path / "out").fails(2, piece)

    refused("openssh-server", "gb300x8")
    refused("--threads: is a bundle's", "b300x8", "--threads", 2)
    refused("--image: is for manifests", "linear", *OWN)
    refused("is a file of this", "linear", "--dynamo", "--block-schedule", __file__)
    refused(f"image has {TENSORRT_LLM}", "older", "--dynamo")
    opened = open_bundle(built["linear"])
    engines = replace(opened, manifest=opened.manifest.model_copy(update={"executor": "tensorrt"}))
    with pytest.raises(DflashError, match="for the CPU, this is one for tensorrt; pass --image"):
        manifests.bundle_graph(engines, (), "auto", None)
    graph = manifests.bundle_graph(engines, (), "auto", "own:1")["manifests.yaml"]
    assert 'limits: {"cpu": "4", "nvidia.com/gpu": "1"}' in graph
    with pytest.raises(DflashError, match="cannot be a name"):
        manifests.resource_name("a" * 29)
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    run("dynamo-worker", built["linear"]).fails(2, "a pod's files are its own")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("before", "after", "piece"),
    [
        ("gpus_per_node: 4", "gpus_per_node: 8", "gpus_per_node 8 is not 4"),
        ("gpus_per_node: 4\n", "", "gpus_per_node missing is not 4"),
        ("tensor_parallel_size: 8", "tensor_parallel_size: 4", "tensor_parallel_size 4 is not 8"),
    ],
)
def test_other_gpus_than_the_profiles(
    built: dict[str, Path], run: Run, tmp_path: Path, before: str, after: str, piece: str
) -> None:
    folder = Path(shutil.copytree(built["gb300x8"], tmp_path / "edited"))
    path = folder / "serve/autoregressive.yaml"  # whichever variant is to be served
    path.write_text(path.read_text("utf-8").replace(before, after), "utf-8")
    for options in (["--dynamo"], []):
        run("package", folder, *OWN, *options, "-o", tmp_path / "x").fails(2, piece)
    run("inspect", folder).fails(2, piece)


def test_pods_of_a_group_find_each_other(tmp_path: Path) -> None:
    """The script of both, with programs that tell what they are asked."""
    told = {name: f'"{name} $*"' for name in ("ssh", "sshd", "mpirun")}
    for name, text in (told | {"getent": f"x:x:0:0::{tmp_path}:/bin/sh"}).items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "id.pub").write_text("ssh-ed25519 AAAA somebody\n")
    script = manifests.fill("launch.sh", {}).replace("/ssh/id", f"{tmp_path}/id")
    script = script.replace("/run/sshd", f"{tmp_path}/run")

    def launch(index: int) -> str:
        own = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LWS_WORKER_INDEX": str(index)}
        own |= {"LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "set-0.set.ns", "HF_TOKEN": "secret"}
        command = ["bash", "-c", script, "launch.sh", "4", "trtllm-serve", "a/b"]
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    lines = launch(0).splitlines()
    assert lines[:2] == ["ssh set-0-1.set.ns true", "ssh set-0-2.set.ns true"]
    assert "-np 12 -H " in lines[2] and ":4,set-0-1.set.ns:4,set-0-2.set.ns:4 " in lines[2]
    assert lines[2].endswith(" trtllm-llmapi-launch trtllm-serve a/b")
    assert (tmp_path / ".ssh/group").read_text() == "* ssh-ed25519 AAAA\n"
    assert launch(1).startswith("sshd -D -e -p 2222 -h ")
    assert "HF_TOKEN=secret\n" in (tmp_path / ".ssh/environment").read_text()
    assert (tmp_path / ".ssh/environment").stat().st_mode & 0o077 == 0
