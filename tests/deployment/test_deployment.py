"""The image, the manifests and the alerts name what the code has."""

from __future__ import annotations

import json
import os
import re
import tomllib
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.serve import command
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.decoding.jobs import Outcome
from dflash_trt.serving.openai.app import OpenAiApp
from dflash_trt.serving.openai.figures import FRONT_KINDS, FrontFigures
from dflash_trt.serving.server.metrics import KINDS
from dflash_trt.serving.server.tritonserver import TritonServerBinary, server_environment
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.version import __version__
from tests.serving.fronts import ScriptedModel

TREE = Path(__file__).parents[2]


def read_dockerfile() -> dict[str, str]:
    """The last of each instruction, its lines joined."""
    text = re.sub(r"\\\n", " ", read("deploy/Dockerfile"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: rest for name, _, rest in (line.partition(" ") for line in lines)}


def read_serve(arguments: list[str]) -> dict[str, Any]:
    """What `serve` makes of these arguments; it refuses what it does not know."""
    # A copy: a command keeps the help option of the first context that it is asked in.
    return copy(command).make_context("serve", list(arguments)).params


def test_the_command_is_one_that_serve_takes() -> None:
    image = read_dockerfile()
    assert json.loads(image["ENTRYPOINT"])[-2:] == ["dflash-trt", "serve"]
    options = read_serve(json.loads(image["CMD"]))
    ports = [options[f"{name}_port"] for name in ("openai", "grpc", "metrics")]
    assert image["EXPOSE"].split() == list(map(str, ports))
    assert options["host"] == "0.0.0.0" and not options["expose_http"]
    assert f"http://127.0.0.1:{options['openai_port']}/health" in image["HEALTHCHECK"]
    assert image["USER"] == "10001:10001" and "--uid 10001" in read("deploy/install.sh")


def test_a_build_sees_what_the_wheel_is_made_of() -> None:
    project = tomllib.loads(read("pyproject.toml"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], *project["project"]["license-files"]}
    needed |= {project["project"]["readme"], "pyproject.toml", "constraints.txt"}
    lines = read(".dockerignore").splitlines()
    needed |= {"deploy/install.sh", "deploy/dynamo/requirements.txt"}
    assert {line[1:] for line in lines if line.startswith("!")} == needed


def read(name: str) -> str:
    return (TREE / name).read_text(encoding="utf-8")


DEPLOY = TREE / "deploy"
TO_END_S = 10  # beside the drain: the server's overtime, what sockets still hold
SLOWEST_RESTART_S = 30 * 60  # a model may take as long to load


def manifest(kind: str) -> Any:
    found = [read_yaml(path) for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml"))]
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
    drain = read_serve(container["args"])["exit_timeout_s"]
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


def test_the_autoscaler_follows_figures_that_there_are(container: Any) -> None:
    scaler = manifest("HorizontalPodAutoscaler")["spec"]
    scaled = manifest("Deployment")
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": scaled["metadata"]["name"]}
    assert (
        scaler["scaleTargetRef"] == target and scaler["minReplicas"] == scaled["spec"]["replicas"]
    )
    pods = {one["pods"]["metric"]["name"]: one["pods"]["target"] for one in scaler["metrics"]}
    assert all(KINDS[name] == "gauge" for name in pods)
    waiting = pods["dflash_waiting_requests"]["averageValue"]
    assert float(waiting) < read_serve(container["args"])["max_queue_size"]
    rule = (DEPLOY / "kubernetes/prometheus/autoscaler.yaml").read_text("utf-8")
    (named,) = re.findall(r"dflash_\((\w+)\|(\w+)\)", rule)
    assert {f"dflash_{name}" for name in named} == set(pods)


def test_prometheus_operator_finds_the_pods(container: Any) -> None:
    monitor = manifest("PodMonitor")["spec"]
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"] == labels
    assert labels[monitor["jobLabel"]] == "dflash-trt"  # the rules' job
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {one["name"] for one in container["ports"]}


def test_one_version_everywhere(container: Any) -> None:
    images = {container["image"], compose()["services"]["pair"]["image"]}
    assert images == {f"dflash-trt:{__version__}"}


def test_compose_runs_the_image() -> None:
    pair = compose()["services"]["pair"]
    options = read_serve(pair["command"])
    assert pair["ports"] == [f"127.0.0.1:{options['openai_port']}:{options['openai_port']}"]
    assert options["key_file"] == Path("/run/secrets", *pair["secrets"])
    assert float(pair["stop_grace_period"].rstrip("s")) >= options["exit_timeout_s"] + TO_END_S
    assert pair["read_only"] and pair["cap_drop"] == ["ALL"]
    (tmp,) = pair["tmpfs"]
    assert tmp.startswith("/tmp:exec,")
    for place in (pair["build"]["dockerfile"], pair["build"]["context"]):
        assert (DEPLOY.parent / place).exists() or (DEPLOY / place).exists()
    assert pair["volumes"][0].endswith(f":{options['repository']}:ro")


def compose() -> Any:
    return read_yaml(DEPLOY / "compose.yaml")


ALL = FRONT_KINDS | KINDS
FOLDER = TREE / "deploy"
NAME = re.compile(r"\b(?:dflash|up)[a-z_:0-9]*\b(?=[\s{\[)]|$)")


def _rules() -> list[dict[str, Any]]:
    (group,) = read_yaml(FOLDER / "prometheus" / "rules.yaml")["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def _dashboard() -> Any:
    return json.loads((FOLDER / "grafana" / "dashboard.json").read_text(encoding="utf-8"))


def _queries() -> list[str]:
    targets = [target for panel in _dashboard()["panels"] for target in panel["targets"]]
    return [rule["expr"] for rule in _rules()] + [target["expr"] for target in targets]


def test_names_follow_the_conventions() -> None:
    for name, kind in ALL.items():
        assert re.fullmatch(r"dflash(_[a-z]+)+", name)
        assert (kind == "counter") == name.endswith("_total"), name
        assert kind != "histogram" or name.endswith(("_seconds", "_tokens")), name
        assert not re.search(r"_(ms|millis\w*|us|minutes|kb|mb|percent)\b", name), name


@pytest.mark.parametrize("query", _queries())
def test_queries_ask_for_what_there_is(query: str) -> None:
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    names = NAME.findall(query)
    assert names
    for name in names:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        known = name in ("up", *recorded) or family in ALL
        assert known, name
        kind = ALL.get(family)
        assert (kind == "histogram") == (family != name), name
        if kind in ("counter", "histogram"):  # what only grows says nothing by itself
            assert re.search(rf"(rate|increase)\({name}[^()]*\[", query), name
    for outcome in re.findall(r'outcome="(\w*)"', query):
        assert outcome in set(Outcome)


def test_every_alert_is_explained() -> None:
    """In the page that says what to do about it, in its rule's unit test, and by a summary."""
    alerts = [rule for rule in _rules() if "alert" in rule]
    page = (TREE / "docs" / "serving.md").read_text(encoding="utf-8")
    tried = (FOLDER / "prometheus" / "rules_test.yaml").read_text(encoding="utf-8")
    for alert in alerts:
        assert f"`{alert['alert']}`" in page and f'"{alert["alert"]}"' in tried
        assert alert["labels"]["severity"] in ("page", "ticket") and alert["annotations"]["summary"]
    assert set(re.findall(r"`(Dflash\w+)`", page)) == {alert["alert"] for alert in alerts}


def test_the_variables_of_a_plain_server_are_explained() -> None:
    """Those that `serve` sets, for whoever starts Triton server without it."""
    page = (TREE / "docs" / "serving.md").read_text(encoding="utf-8")
    given = server_environment(TritonServerBinary(Path("tritonserver"), Path("/wheel/server")))
    changed = [name for name, value in given.items() if value != os.environ.get(name)]
    assert changed and all(f"\n| `{name}` | " in page for name in changed)


def test_panels_lie_side_by_side() -> None:
    cells = [
        (x, y)
        for panel in _dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in _dashboard()["panels"]}) == len(_dashboard()["panels"])
