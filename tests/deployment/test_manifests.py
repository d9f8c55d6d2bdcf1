"""Manifests for a cluster: fields that operators have, commands that exist, GPUs that add up.

The operators' schemas are too large to keep. The tables have the fields of their Go types, as far
as they are used or near: Dynamo's operator (ai-dynamo/dynamo, deploy/operator/api/v1beta1, and the
examples in the ai-dynamo wheel, 1.6), LeaderWorkerSet (kubernetes-sigs/lws, api/leaderworkerset/v1)
and Prometheus's. Pods, and what is Kubernetes' own, kubernetes-validate knows.
"""

from __future__ import annotations

import re
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
from dflash_trt.errors import DflashError
from dflash_trt.serving.dynamo.packages import RELEASE, TENSORRT_LLM
from dflash_trt.serving.kubernetes import manifests
from dflash_trt.serving.kubernetes.manifests import bundle_graph, resource_name
from tests.cli.conftest import Run, run
from tests.trtllm.conftest import pair

__all__ = ["pair", "run"]

TREE = Path(__file__).parents[2]
SPECS = {
    "DynamoGraphDeployment": "annotations backendFramework components env labels",
    "LeaderWorkerSet": "leaderWorkerTemplate networkConfig replicas rolloutStrategy startupPolicy",
    "PodMonitor": "jobLabel namespaceSelector podMetricsEndpoints podTargetLabels selector",
}
COMPONENT = (
    "compilationCache dynamoSidecar frontendSidecar minAvailable modelRef multinode name "
    "podTemplate replicas roles runtimeVersionOverride scalingAdapter sharedMemorySize "
    "topologyConstraint type"
)
GROUP = "leaderTemplate restartPolicy size subGroupPolicy volumeClaimTemplates workerTemplate"
ENDPOINT = "honorLabels interval path port relabelings scheme scrapeTimeout"
VERSIONS = {
    "DynamoGraphDeployment": "nvidia.com/v1beta1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}
KUBERNETES = ("1.37", "1.30")
CASES = {
    "demo": ("paged", "--dynamo"),
    "linear": ("linear", "--dynamo", "--threads", 3, "--max-queue-size", 9, "--image", "own:1"),
    "b300x8": ("b300x8",),
    "gb300x8": ("gb300x8", "--image", "own:1"),
    "b300x8-dynamo": ("b300x8", "--dynamo", "--image", "own:1"),
    "gb300x8-dynamo": ("gb300x8", "--dynamo", "--image", "own:1"),
    "local": ("local", "--dynamo", "--image", "own:1"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> dict[str, Path]:
    """What `package` takes: two bundles, three deployments."""
    root = tmp_path_factory.mktemp("built")
    caches = CacheOptions(kv_layout="paged", page_size=16)
    dflash_trt.build("demo", root / "paged", caches=caches)
    dflash_trt.build("demo", root / "linear")
    for name in ("b300x8", "gb300x8"):
        _build(root / name, "--target", "gpt-oss-120b", "--profile", name)
    _build(root / "local", "--target", pair, "--profile", "one")
    return {path.name: path for path in root.iterdir()}


def _build(output: Path, *options: object) -> None:
    from dflash_trt.cli.main import main

    assert main(["build", "--executor", "trtllm", "-o", str(output), *map(str, options)]) == 0


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest, built: dict[str, Path], run: Run, tmp_path: Path) -> Any:
    """The manifests of a case by their kinds."""
    name, *options = CASES[request.param]
    output = tmp_path / "out"
    told = run.well("package", built[name], *options, "-o", output)
    texts = [path.read_text("utf-8") for path in sorted(output.iterdir())]
    found = {one["kind"]: one for text in texts for one in yaml.safe_load_all(text)}
    assert all(kind in told.out for kind in found) and "no cluster has seen" in told.out
    return found


def pods_of(one: Any) -> list[Any]:
    """The pod templates in a manifest."""
    spec = one.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = [component["podTemplate"] for component in spec.get("components", ())]
    found += [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]
    return found + ([spec["template"]] if "template" in spec else [])


def test_operators_have_every_field(made: Any) -> None:
    for kind, one in made.items():
        if kind in VERSIONS:
            assert one["apiVersion"] == VERSIONS[kind]
            assert one.keys() == {"apiVersion", "kind", "metadata", "spec"}
            assert set(one["spec"]) <= set(SPECS[kind].split())
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])
        for component in one.get("spec", {}).get("components", ()):
            assert set(component) <= set(COMPONENT.split())
            assert component["type"] in ("frontend", "worker")
            (main,) = component["podTemplate"]["spec"]["containers"]
            assert main["name"] == "main" and component["runtimeVersionOverride"] == RELEASE
        assert set(one.get("spec", {}).get("leaderWorkerTemplate", ())) <= set(GROUP.split())
        for endpoint in one.get("spec", {}).get("podMetricsEndpoints", ()):
            assert set(endpoint) <= set(ENDPOINT.split())
        for template in pods_of(one):
            _check_pod(template["spec"], of_dynamo=kind == "DynamoGraphDeployment")


def _check_pod(pod: Any, *, of_dynamo: bool) -> None:
    """What no schema says of a pod."""
    volumes = {one["name"] for one in pod.get("volumes", ())}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        mounts = container.get("volumeMounts", [])
        paths = [one["mountPath"] for one in mounts]
        assert {one["name"] for one in mounts} <= volumes and len(set(paths)) == len(paths)
        assert not of_dynamo or "/dev/shm" not in paths  # the operator's own
        assert "DYN_DISCOVERY_BACKEND" not in str(container)  # the operator's too
    (container,) = pod["containers"]
    ports = {one["name"] for one in container["ports"]}
    probes = [container[name] for name in container if name.endswith("Probe")]
    assert {one["httpGet"]["port"] for one in probes} <= ports


def test_kubernetes_has_every_field(made: Any) -> None:
    reason = "kubernetes-validate (the test extra) is not installed"
    validator = pytest.importorskip("kubernetes_validate", reason=reason)
    shipped = (TREE / "deploy/kubernetes").rglob("*.yaml")
    for one in (*made.values(), *(yaml.safe_load(path.read_text("utf-8")) for path in shipped)):
        plain = [one] if one["kind"] not in VERSIONS else []
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}}
        for each in (*plain, *({**head, **template} for template in pods_of(one))):
            for version in KUBERNETES:
                validator.validate(each, version, strict=True)


def test_gpus_add_up(made: Any) -> None:
    """Nodes × GPUs are TP × PP; a bundle for the CPU has none."""
    if "ConfigMap" not in made:
        assert "nvidia.com/gpu" not in str(made)
        return
    config, (workload,) = made["ConfigMap"], (one for one in made.values() if pods_of(one))
    arguments = yaml.safe_load(config["data"]["dflash.yaml"])
    *_, worker = pods_of(workload)
    (container,) = worker["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    spec = workload["spec"]
    nodes = spec.get("leaderWorkerTemplate", {"size": 1})["size"]
    if "components" in spec:
        nodes = spec["components"][1].get("multinode", {"nodeCount": 1})["nodeCount"]
        assert spec["backendFramework"] == "trtllm"
        assert container["command"] == ["python3", "-m", "dynamo.trtllm"]
        assert "--extra-engine-args=/etc/dflash-trt/dflash.yaml" in container["args"]
    assert nodes * gpus == arguments["tensor_parallel_size"]
    assert f"{config['metadata']['name']}'" in str(worker["spec"]["volumes"])
    for path in re.findall(r"/etc/dflash-trt/([\w.]+)", str(pods_of(workload))):
        assert path in config["data"]
    # Weights that came along lie in the claim; the frontend reads their tokenizer.
    if arguments["speculative_config"]["speculative_model"].startswith("/deployment/"):
        for pod in pods_of(workload):
            assert "'mountPath': '/deployment', 'subPath': 'local'" in str(pod)


@pytest.mark.parametrize("name", ["demo", "linear"])
def test_a_bundles_graph_runs_what_there_is(
    built: dict[str, Path], run: Run, tmp_path: Path, name: str
) -> None:
    bundle, *options = CASES[name]
    run.well("package", built[bundle], *options, "-o", tmp_path / "out")
    graph = yaml.safe_load((tmp_path / "out/manifests.yaml").read_text("utf-8"))
    frontend, worker = (one["spec"]["containers"][0] for one in pods_of(graph))
    routing = [one for one in frontend["args"] if "kv" in one or "least" in one]
    paged = ["--router-mode=kv", "--kv-cache-block-size=16"]
    assert routing == (paged if name == "demo" else ["--router-mode=least-loaded"])
    read = copy(command).make_context("dynamo-worker", list(worker["args"])).params
    assert read["bundle"] == Path("/models", bundle)
    if name == "linear":
        assert (read["threads"], read["max_queue_size"]) == (3, 9)
        assert worker["resources"]["limits"]["cpu"] == "3" and worker["image"] == "own:1"
    pod = graph["spec"]["components"][1]["podTemplate"]["spec"]
    grace = {one["name"]: one["value"] for one in worker["env"]}
    waits = int(grace["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"])
    assert pod["terminationGracePeriodSeconds"] > waits


def test_versions_are_the_pinned() -> None:
    pins = (TREE / "deploy/dynamo/requirements.txt").read_text("utf-8")
    assert f"\nai-dynamo=={RELEASE}\n" in pins and re.fullmatch(r"1\.3\.0rc\d+", TENSORRT_LLM)
    assert f"{manifests.OUR_IMAGE} " in (TREE / "deploy/dynamo/Dockerfile").read_text("utf-8")


def test_what_cannot_be_is_refused(built: dict[str, Path], run: Run, tmp_path: Path) -> None:
    def refused(name: str, *options: object) -> str:
        return run("package", built[name], *options, "-o", tmp_path / "out").fails(2)

    assert f"image has {TENSORRT_LLM}" in refused("b300x8", "--dynamo")
    assert "openssh-server" in refused("gb300x8")
    assert "--threads: is a bundle's" in refused("b300x8", "--threads", 2)
    assert "--image: is for manifests" in refused("linear", "--image", "own:1")
    assert "is a file of this" in refused("linear", "--dynamo", "--block-schedule", __file__)
    opened = open_bundle(built["linear"])
    engines = opened.manifest.model_copy(update={"executor": "tensorrt"})
    with pytest.raises(DflashError, match="for the CPU, this is one for tensorrt; pass --image"):
        bundle_graph(replace(opened, manifest=engines), (), "auto", None)
    graph = bundle_graph(replace(opened, manifest=engines), (), "auto", "own:1")
    assert '"nvidia.com/gpu": "1"' in graph["manifests.yaml"]
    with pytest.raises(DflashError, match="cannot be a name"):
        resource_name("a" * 29)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("before", "after", "piece"),
    [
        ("gpus_per_node: 4", "gpus_per_node: 8", "gpus_per_node 8: not 2 nodes × 4 GPUs"),
        ("gpus_per_node: 4\n", "", "gpus_per_node 8: not 2 nodes × 4 GPUs"),
        ("tensor_parallel_size: 8", "tensor_parallel_size: 4", "tensor_parallel_size 4 is not 8"),
    ],
)
def test_other_gpus_than_the_profiles(
    built: dict[str, Path], run: Run, tmp_path: Path, before: str, after: str, piece: str
) -> None:
    import shutil

    folder = Path(shutil.copytree(built["gb300x8"], tmp_path / "edited"))
    path = folder / "serve/dflash.yaml"
    path.write_text(path.read_text("utf-8").replace(before, after), "utf-8")
    for options in (["--dynamo"], []):
        run("package", folder, "--image", "own:1", *options, "-o", tmp_path / "x").fails(2, piece)


def test_discovery_by_files_is_no_clusters(
    built: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    run("dynamo-worker", built["linear"]).fails(2, "a pod's files are its own")


def test_pods_of_a_group_find_each_other(tmp_path: Path) -> None:
    """The script of both, with programs that tell what they are asked."""
    for name in ("ssh", "sshd", "mpirun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $*"\n')
        program.chmod(0o755)
    (tmp_path / "id.pub").write_text("ssh-ed25519 AAAA somebody\n")
    (tmp_path / "getent").write_text(f"#!/bin/sh\necho x:x:0:0::{tmp_path}:/bin/sh\n")
    (tmp_path / "getent").chmod(0o755)
    script = manifests.fill("launch.sh", {}).replace("/ssh/id", f"{tmp_path}/id")
    script = script.replace("/run/sshd", f"{tmp_path}/run")

    def launch(index: int) -> str:
        own = {"PATH": f"{tmp_path}/bin:{tmp_path}:/usr/bin:/bin", "LWS_WORKER_INDEX": str(index)}
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
