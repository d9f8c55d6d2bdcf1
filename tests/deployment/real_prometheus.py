"""`python -m tests.deployment.real_prometheus BUNDLE` tries every query on a real Prometheus.

It follows BUNDLE, served here, through some requests and the death of a model; then each panel of
the dashboard must show a number, and each rule be one that Prometheus evaluates. `prometheus` (of
Debian's package, say) must be in PATH, or be named by --prometheus.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from dflash_trt.serving.server.processes import find_models
from tests.deployment.clean_root import TREE
from tests.serving.served import fetch, serving
from tests.serving.test_supervision import find_server
from tests.waiting import wait_until

_LOAD_S = 30.0
_VARIABLES = {"$job": "dflash-trt", "$instance": ".*", "$__rate_interval": "20s"}


def load(front: str, seconds: float) -> int:
    """Asks one request after another; how many were answered."""
    body = {"model": "demo", "prompt": "jobs: red fox gold", "max_tokens": 64}
    deadline, answered = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        answered += fetch(front, "/v1/completions", body)[0] == 200
        time.sleep(0.1)
    return answered


def ask(prometheus: str, path: str, **fields: str) -> Any:
    status, content, _ = fetch(
        prometheus, f"/api/v1/{path}?{urllib.parse.urlencode(fields)}", b"", "GET"
    )
    answer = json.loads(content)
    assert status == 200 and answer["status"] == "success", answer
    return answer["data"]


def try_queries(prometheus: str) -> None:
    dashboard = json.loads((TREE / "deploy/grafana/dashboard.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in _VARIABLES.items():
                query = query.replace(name, value)
            found = ask(prometheus, "query", query=query)["result"]
            values = [float(one["value"][1]) for one in found]
            assert values and not any(map(math.isnan, values)), (panel["title"], query, found)
            print(f"{panel['title']}: {', '.join(f'{value:.4g}' for value in values)}")
    for group in ask(prometheus, "rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
            print(f"{rule['name']}: {rule['health']}, {rule.get('state', 'recorded')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prometheus", default="prometheus")
    parser.add_argument("--port", type=int, default=9390)
    given = parser.parse_args()
    address = f"127.0.0.1:{given.port}"
    with tempfile.TemporaryDirectory() as work, serving(given.bundle, given.bundle) as served:
        front = urlsplit(served.openai).netloc
        config = yaml.safe_load((TREE / "deploy/prometheus/prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
        config["rule_files"] = [str(TREE / "deploy/prometheus/rules.yaml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [front]}]
        Path(work, "prometheus.yaml").write_text(yaml.safe_dump(config))
        options = ["--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--log.level=warn"]
        command = [given.prometheus, *options, f"--web.listen-address={address}"]
        prometheus = subprocess.Popen(command, cwd=work)
        try:
            wait_until(lambda: _is_up(address), "Prometheus")
            print(f"{load(front, _LOAD_S)} requests")
            (model, *_) = find_models(find_server(served.pid))
            os.kill(model, signal.SIGKILL)
            query = "max_over_time(dflash_server_failures_total[1m])"
            wait_until(
                lambda: "1" in str(ask(address, "query", query=query)["result"]), "a failure"
            )
            print(f"{load(front, _LOAD_S)} requests after a restart")
            try_queries(address)
        finally:
            prometheus.terminate()
            prometheus.wait()


def _is_up(address: str) -> bool:
    try:
        return fetch(address, "/-/ready", b"", "GET")[0] == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
