"""The compose file and the Kubernetes manifests against the code that they run.

That they are what Kubernetes takes, the package kubernetes-validate says; too large to be installed
for it (docs/serving.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.serving.openai.app import OpenAiApp
from dflash_trt.serving.openai.figures import FrontFigures
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.version import __version__
from tests.deployment.test_image import TREE, read_dockerfile, read_serve
from tests.serving.fronts import ScriptedModel

DEPLOY = TREE / "deploy"
TO_END_S = 10  # beside the drain: the server's overtime, what sockets still hold
SLOWEST_RESTART_S = 30 * 60  # a model may take as long to load


def manifest(kind: str) -> Any:
    found = [read_yaml(path) for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))]
    (one,) = (each for each in found if each["kind"] == kind)
    return one


@pytest.fixture(scope="module")
def pod() -> Any:
    return manifest("Deployment")["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    (container,) = pod["containers"]
    return container


def seconds(probe: Any) -> float:
    """How long a probe may fail before it acts."""
    return float(probe["periodSeconds"] * probe["failureThreshold"])


def test_probes_ask_what_the_front_has(container: Any) -> None:
    options = read_serve(container["args"])
    assert {one["name"]: one["containerPort"] for one in container["ports"]} == {
        "openai": options["openai_port"]
    }
    tokenizer = BundleTokenizer(TREE / "demo_pair/target")
    app = OpenAiApp(("demo",), ScriptedModel(), tokenizer, 512, FrontFigures()).starlette()
    routes = {route.path for route in app.routes}
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    for probe in probes:
        assert probe["httpGet"] == {"path": "/health", "port": "openai"}
    assert "/health" in routes and "/metrics" in routes
    startup, readiness, liveness = map(seconds, probes)
    assert readiness <= 2, "health tells within two seconds; so must its reader"
    assert startup >= SLOWEST_RESTART_S and liveness >= SLOWEST_RESTART_S
    assert manifest("Deployment")["spec"]["progressDeadlineSeconds"] > startup


def test_a_pod_has_time_to_drain(pod: Any, container: Any) -> None:
    drain = read_serve(container["args"])["drain_seconds"]
    name, waits = container["lifecycle"]["preStop"]["exec"]["command"]
    assert name == "sleep" and float(waits) > seconds(container["readinessProbe"])
    assert pod["terminationGracePeriodSeconds"] >= float(waits) + drain + TO_END_S


def test_a_pod_is_nobody_and_writes_where_it_must(pod: Any, container: Any) -> None:
    user, group = map(int, read_dockerfile()["USER"].split(":"))
    rights, own = pod["securityContext"], container["securityContext"]
    assert rights["runAsNonRoot"] and (rights["runAsUser"], rights["runAsGroup"]) == (user, group)
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    written = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert written == {"/tmp", "/dev/shm"}
    assert all("emptyDir" in volumes[mounts[path]["name"]] for path in written)
    keys: Path = read_serve(container["args"])["key_file"]
    secret = volumes[mounts[str(keys.parent)]["name"]]["secret"]
    # A file of its own (subPath) would never change; fsGroup lets the user read it.
    assert "subPath" not in mounts[str(keys.parent)] and keys.name == "keys"
    assert secret["defaultMode"] == 0o440 and rights["fsGroup"] == group


def test_manifests_name_each_other(pod: Any, container: Any) -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    policy = manifest("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    (open_port,) = policy["ingress"][0]["ports"]
    (offered,) = manifest("Service")["spec"]["ports"]
    (named,) = (port["name"] for port in container["ports"])
    assert named == offered["targetPort"] == open_port["port"]
    scraped = manifest("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert scraped["prometheus.io/port"] == str(container["ports"][0]["containerPort"])


def test_one_version_everywhere(container: Any) -> None:
    images = {container["image"], compose()["services"]["pair"]["image"]}
    assert images == {f"dflash-trt:{__version__}"}


def test_compose_runs_the_image() -> None:
    pair = compose()["services"]["pair"]
    options = read_serve(pair["command"])
    assert pair["ports"] == [f"127.0.0.1:{options['openai_port']}:{options['openai_port']}"]
    assert options["key_file"] == Path("/run/secrets", *pair["secrets"])
    assert float(pair["stop_grace_period"].rstrip("s")) >= options["drain_seconds"] + TO_END_S
    assert pair["read_only"] and pair["cap_drop"] == ["ALL"]
    (tmp,) = pair["tmpfs"]
    assert tmp.startswith("/tmp:exec,")
    for place in (pair["build"]["dockerfile"], pair["build"]["context"]):
        assert (DEPLOY.parent / place).exists() or (DEPLOY / place).exists()
    assert pair["volumes"][0].endswith(f":{options['source']}:ro")


def compose() -> Any:
    return read_yaml(DEPLOY / "compose.yaml")
