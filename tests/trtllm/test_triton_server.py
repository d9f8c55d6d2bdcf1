"""A real Triton server takes the repository as the script puts it together.

TensorRT-LLM's model.py stays where it is: a model in its place reads model.yaml and answers as it
does, as far as Triton server is concerned.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.serving.server.launcher import bind_port
from dflash_trt.serving.server.tritonserver import (
    find_tritonserver,
    prepare_backends,
    server_environment,
)
from tests.trtllm.conftest import QWEN3, Run, install_tensorrt_llm
from tests.waiting import PATIENCE_S, wait_until

MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils
import yaml


class TritonPythonModel:
    @classmethod
    def auto_complete_config(cls, config):
        path = os.path.join(pb_utils.get_model_dir(), "model.yaml")
        with open(path) as file:
            triton = yaml.safe_load(file)["triton_config"]
        config.set_model_transaction_policy(dict(decoupled=bool(triton["decoupled"])))
        config.set_max_batch_size(int(triton["max_batch_size"]))
        return config

    def initialize(self, args):
        with open(os.path.join(pb_utils.get_model_dir(), "model.yaml")) as file:
            self.arguments = yaml.safe_load(file)

    def execute(self, requests):
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
            text = prompt + b" by " + self.arguments["speculative_config"]["decoding_type"].encode()
            answer = pb_utils.Tensor("text_output", np.array([text], dtype=np.object_))
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(pb_utils.InferenceResponse([answer]), final)
"""


def _get(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=PATIENCE_S) as reply:
        text: str = reply.read().decode()
        return text


@pytest.fixture
def url(run: Run, tmp_path: Path) -> Iterator[str]:
    """The served model's address, once it is ready; in CI a missing server is a failure."""
    try:
        binary = find_tritonserver()
    except DflashError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(error.message)
    output = tmp_path / "deployment"
    run.well(*QWEN3, "-o", output)
    # Held until the server listens: nobody else may take them meanwhile.
    held = {name: bind_port("127.0.0.1", 0, name) for name in ("http", "grpc", "metrics")}
    ports = {name: one.getsockname()[1] for name, one in held.items()}
    options = [*prepare_backends(binary, tmp_path), "--exit-timeout-secs=2"]
    options += [f"--backend-config=python,shm-region-prefix-name={tmp_path.name}{os.getpid()}"]
    options += [f"--{name}-port={port}" for name, port in ports.items()]
    launcher = f'shift\nexec {binary.path} "$@" {" ".join(options)}'
    environment = install_tensorrt_llm(tmp_path, MODEL, launcher, server_environment(binary))
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [output / "serve-triton.sh", "dflash"],
            env=environment,
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{ports['http']}"

    def is_ready() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        with contextlib.suppress(OSError):
            return bool(_get(f"{address}/v2/health/ready") is not None)
        return False

    try:
        wait_until(is_ready, "Triton server")
        for one in held.values():
            one.close()
        yield f"{address}/v2/models/tensorrt_llm"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)


def test_the_repository_serves(url: str) -> None:
    config = json.loads(_get(f"{url}/config"))
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    asked = {
        "text_input": "drafted",
        "streaming": True,
        "sampling_param_max_tokens": 4,
        "sampling_param_seed": 7,
        "sampling_param_return_perf_metrics": True,
    }
    assert "drafted by DFlash" in _get(f"{url}/generate_stream", asked)
