"""A pair served by `dflash-trt serve` as users start it, and the same pair in this process."""

from __future__ import annotations

import dataclasses
import http.client
import json
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc as grpcclient
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from dflash_trt.cli.main import main
from dflash_trt.decoding import SamplingParams
from dflash_trt.models.build_config import data_folder
from dflash_trt.serving.server.launcher import ServerOptions
from dflash_trt.serving.server.repository import RepositoryOptions, write_repository
from dflash_trt.text.prompts import read_prompts
from tests.pairs import SilentProgress
from tests.waiting import PATIENCE_S

SLOTS = 8
QUEUE = 8
LONG_CONTEXT = 1 << 14
SERVER_PORTS = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]  # any free ones
FREE_PORTS = [*SERVER_PORTS, "--openai-port", "0"]
PROMPTS = read_prompts(data_folder("demo_pair") / "prompts.jsonl")[:16]
GREEDY = SamplingParams()
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9, seed=11),
    SamplingParams(temperature=1.3, top_k=5, seed=2**64 - 1),
)


@dataclass(frozen=True)
class Served:
    """Where a served bundle answers: URLs, of HTTP and metrics host and port; `serve`'s process."""

    pid: int
    bundle: Path
    grpc: str
    http: str
    metrics: str
    openai: str

    @property
    def address(self) -> str:
        """Of gRPC, as clients other than ours write it."""
        return self.grpc.removeprefix("grpc://")


def package(bundle: Path, folder: Path, **options: Any) -> Path:
    """Writes a model repository of `bundle` to `folder`; `options` are RepositoryOptions'."""
    write_repository(bundle, folder, RepositoryOptions(**options), SilentProgress())
    return folder


def build_demo(folder: Path, changes: dict[str, dict[str, Any]], *arguments: str) -> Path:
    """A bundle of the demo pair with `changes` to JSON files of it, by role/name."""
    options = ["--target", "demo", *arguments, "-o", str(folder / "bundle")]
    for role in ("target", "draft"):
        shutil.copytree(data_folder("demo_pair") / role, folder / role)
        options += [f"--{role}-checkpoint", str(folder / role)]
    for file, changed in changes.items():
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(config | changed))
    assert main(["build", *options]) == 0
    return folder / "bundle"


def server_options(repository: Path, **options: Any) -> ServerOptions:
    """For a server on free ports."""
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return ServerOptions(repository=repository, **(ports | options))


def fetch(
    address: str, path: str, body: Any = None, method: str = "POST"
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Status, content and headers of what a host and port answer; a body of bytes goes as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    with connection.getresponse() as answer:
        return answer.status, answer.read(), answer.headers


@contextmanager
def starting(
    *arguments: object, run: tuple[str, ...] = ("dflash_trt",)
) -> Iterator[subprocess.Popen[str]]:
    """Runs `serve` with these arguments; it is killed at the end where it has not ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", *run, "serve", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_ready(process: subprocess.Popen[str], lines: int = 4) -> dict[str, str]:
    """The URLs that it prints, in so many lines, once it is ready."""
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("ready after "), (first, process.communicate())
    return dict(process.stdout.readline().split()[:2] for _ in range(lines))


@contextmanager
def serving(source: Path, bundle: Path, *arguments: str) -> Iterator[Served]:
    """`serve` on `source`, a bundle or a repository of it; SIGTERM must end it well."""
    with starting(source, *FREE_PORTS, *arguments) as process:
        urls = wait_ready(process)
        http, metrics = (urlsplit(urls[name]).netloc for name in ("HTTP", "metrics"))
        yield Served(process.pid, bundle, urls["gRPC"], http, metrics, urls["OpenAI"])
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


LLM = "tensorrt_llm"
CLASSIC = "ensemble"
Fields = dict[str, Any] | list[grpcclient.InferInput]
GOLDEN = Path(__file__).parent / "golden"


@cache
def datatypes(model: str) -> dict[str, str]:
    """Triton server's types of the inputs that the contract of `model` has."""
    text = (GOLDEN / f"{model}.config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    names = {one.name: model_config_pb2.DataType.Name(one.data_type) for one in config.input}
    types = {name: kind.removeprefix("TYPE_") for name, kind in names.items()}
    return {name: "BYTES" if kind == "STRING" else kind for name, kind in types.items()}


def make_inputs(model: str, fields: dict[str, Any]) -> list[grpcclient.InferInput]:
    """Tensors of the contract that `model` has: shape [n], or [1, n] for the classic one."""
    inputs: list[grpcclient.InferInput] = []
    for name, value in fields.items():
        datatype = datatypes(model)[name]
        values = value if isinstance(value, list) else [value]
        if datatype == "BYTES":
            values = [one.encode() if isinstance(one, str) else one for one in values]
        array = np.array(values, dtype=triton_to_np_dtype(datatype))
        array = array.reshape(1, -1) if model == CLASSIC else array
        tensor = grpcclient.InferInput(name, list(array.shape), datatype)
        inputs.append(tensor.set_data_from_numpy(array))
    return inputs


@dataclass
class Answer:
    """What came back for one request: the messages in order, and the error that ended it."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    error: InferenceServerException | None = None

    @property
    def texts(self) -> list[str]:
        return [message["text_output"] for message in self.messages if message]

    @property
    def last(self) -> dict[str, Any]:
        return self.messages[-1]

    @property
    def failure(self) -> str:
        assert self.error is not None, self.messages
        return str(self.error.message())


LISTS = {
    *("output_ids", "acceptance_histogram", "position_trials", "position_accepts"),
    *("logprob_ids", "logprobs", "logprob_ranks", "top_logprob_ids", "top_logprobs"),
    "output_log_probs",
}


def read_message(result: grpcclient.InferResult) -> dict[str, Any]:
    """A response's outputs: text as text, one number as a number, several as a list."""
    outputs: dict[str, Any] = {}
    for output in result.get_response().outputs:
        flat = result.as_numpy(output.name).reshape(-1)
        if output.datatype == "BYTES":
            outputs[output.name] = b"".join(flat.tolist()).decode()
        elif output.name in LISTS:
            outputs[output.name] = flat.tolist()
        else:
            outputs[output.name] = flat[0].item()
    return outputs


class StreamClient:
    """A gRPC connection with one stream, one request at a time unless told otherwise.

    A request is its fields in Python's types, or its tensors.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._client = grpcclient.InferenceServerClient(address)
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._results.put((result, error)))

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, *, cancel: bool = False) -> None:
        """Ends the stream; with `cancel` whatever is in flight on it is abandoned."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def send(self, model: str, fields: Fields, **options: Any) -> None:
        inputs = fields if isinstance(fields, list) else make_inputs(model, fields)
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)

    def receive(self, timeout_s: float = PATIENCE_S) -> Iterator[dict[str, Any]]:
        """Messages of the one request in flight up to its end; raises its error."""
        while True:
            result, error = self._results.get(timeout=timeout_s)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield read_message(result)
            if response.parameters["triton_final_response"].bool_param:
                return

    def ask(self, model: str, fields: Fields, **options: Any) -> Answer:
        """Sends a request and collects its answer."""
        self.send(model, fields, **options)
        answer = Answer()
        try:
            answer.messages.extend(self.receive())
        except InferenceServerException as error:
            answer.error = error
        return answer


def ask_grpc(address: str, model: str, fields: Fields, **options: Any) -> Answer:
    """One request over a connection of its own."""
    with StreamClient(address) as client:
        return client.ask(model, fields, **options)


def post(address: str, path: str, body: Any) -> tuple[int, Any]:
    """HTTP status and JSON of `generate`, or the list of events of `generate_stream`."""
    status, content, _ = fetch(address, f"/v2/models/{path}", body)
    if status != 200 or not path.endswith("generate_stream"):
        return status, json.loads(content)
    lines = [line for line in content.decode().splitlines() if line]
    return status, [json.loads(line.removeprefix("data:")) for line in lines]


def read_metrics(address: str) -> dict[str, float]:
    """This project's figures on /metrics, by name with labels but the model's."""
    _, content, _ = fetch(address, "/metrics", b"", "GET")
    lines = re.sub(r'{model="demo"}|(?<={)model="demo",', "", content.decode()).splitlines()
    figures = (line.rpartition(" ") for line in lines if line.startswith("dflash_"))
    return {name: float(value) for name, _, value in figures}


ENDLESS = {"ignore_eos": True}


def make_fields(
    model: str,
    prompt: str,
    sampling: SamplingParams = GREEDY,
    *,
    max_tokens: int = 48,
    stream: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """A request under the names of the model's contract; of the sampling what is not a default."""
    defaults = dataclasses.asdict(GREEDY)
    chosen = {
        name: one for name, one in dataclasses.asdict(sampling).items() if one != defaults[name]
    }
    prefix, streaming = ("sampling_param_", "streaming") if model == LLM else ("", "stream")
    named = {prefix + name: one for name, one in ({"max_tokens": max_tokens} | chosen).items()}
    return {"text_input": prompt, streaming: stream, **named, **more}


def long_fields(model: str, prompt: str, *, stream: bool = True) -> dict[str, Any]:
    """A request that runs to the end of the context: thousands of steps, where it is long."""
    return make_fields(model, prompt, max_tokens=2 * LONG_CONTEXT, stream=stream)


def make_stop(model: str) -> dict[str, Any]:
    """The request that stops another one of its id."""
    return {"text_input": "", "stop": True} | ({"max_tokens": 1} if model == CLASSIC else {})
