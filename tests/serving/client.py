"""A client that someone else wrote: requests in Python's types, answers collected as they come.

It uses tritonclient directly, on purpose: the server must suit clients that know nothing of ours.
"""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.serving.served import LONG_CONTEXT
from tests.waiting import PATIENCE_S

LLM = "tensorrt_llm"
CLASSIC = "ensemble"

TYPES: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", np.object_),
    "streaming": ("BOOL", np.bool_),
    "stream": ("BOOL", np.bool_),
    "stop": ("BOOL", np.bool_),
    "sampling_param_stop": ("BYTES", np.object_),
    "stop_words": ("BYTES", np.object_),
    "bad_words": ("BYTES", np.object_),
    "image_url": ("BYTES", np.object_),
    "lora_name": ("BYTES", np.object_),
}
SUFFIXES: tuple[tuple[str, tuple[str, Any]], ...] = (
    ("temperature", ("FP32", np.float32)),
    ("top_p", ("FP32", np.float32)),
    ("penalty", ("FP32", np.float32)),
    ("seed", ("UINT64", np.uint64)),
    ("lora_id", ("UINT64", np.uint64)),
)


def tensor_type(name: str) -> tuple[str, Any]:
    """Triton server's and NumPy's type of the input `name`."""
    if name in TYPES:
        return TYPES[name]
    if name.startswith(("return_", "exclude_")) or "_return_" in name or "_exclude_" in name:
        return "BOOL", np.bool_
    return next((kind for suffix, kind in SUFFIXES if name.endswith(suffix)), ("INT32", np.int32))


def make_inputs(model: str, fields: dict[str, Any]) -> list[grpcclient.InferInput]:
    """Tensors of the contract that `model` has: shape [n], or [1, n] for the classic one."""
    inputs: list[grpcclient.InferInput] = []
    for name, value in fields.items():
        datatype, dtype = tensor_type(name)
        values = value if isinstance(value, list) else [value]
        if datatype == "BYTES":
            values = [one.encode() if isinstance(one, str) else one for one in values]
        array = np.array(values, dtype=dtype)
        array = array.reshape(1, -1) if model == CLASSIC else array
        tensor = grpcclient.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


@dataclass
class Answer:
    """What came back for one request: the messages in order, and the error that ended it."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    error: InferenceServerException | None = None
    ends: int = 0

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


LISTS = ("output_ids", "acceptance_histogram", "position_trials", "position_accepts")


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
    """A gRPC connection with one stream, one request at a time unless told otherwise."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._client = grpcclient.InferenceServerClient(address)
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._results.put((result, error)))

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, *, cancel: bool = False) -> None:
        """Ends the stream; with `cancel` whatever is in flight on it is abandoned."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def send(
        self,
        model: str,
        fields: dict[str, Any],
        *,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        timeout_us: int | None = None,
    ) -> None:
        self._client.async_stream_infer(
            model,
            make_inputs(model, fields),
            request_id=request_id,
            parameters=parameters,
            timeout=timeout_us,
            enable_empty_final_response=True,
        )

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

    def ask(self, model: str, fields: dict[str, Any], **options: Any) -> Answer:
        """Sends a request and collects its answer."""
        self.send(model, fields, **options)
        answer = Answer()
        try:
            answer.messages.extend(self.receive())
        except InferenceServerException as error:
            answer.error = error
        answer.ends += 1
        return answer


def ask_grpc(address: str, model: str, fields: dict[str, Any], **options: Any) -> Answer:
    """One request over a connection of its own."""
    with StreamClient(address) as client:
        return client.ask(model, fields, **options)


def post(address: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """HTTP status and JSON of `generate`, or the list of events of `generate_stream`."""
    request = urllib.request.Request(
        f"http://{address}/v2/models/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    if not path.endswith("generate_stream"):
        return 200, json.loads(text)
    lines = [line for line in text.splitlines() if line]
    return 200, [json.loads(line.removeprefix("data:")) for line in lines]


def read_metrics(address: str) -> dict[str, float]:
    """This project's figures on /metrics, by name with labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as response:
        lines = response.read().decode().splitlines()
    figures = (line.rpartition(" ") for line in lines if line.startswith("dflash_"))
    return {name: float(value) for name, _, value in figures}


ENDLESS = {"ignore_eos": True}


def long_fields(model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """A request that runs to the end of the context: thousands of steps, where it is long."""
    max_tokens = {"sampling_param_max_tokens" if model == LLM else "max_tokens": 2 * LONG_CONTEXT}
    streaming = {"streaming" if model == LLM else "stream": True}
    return {"text_input": prompt, **max_tokens, **streaming, **fields}


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 11},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 2**64 - 1},
]


def llm_fields(prompt: str, sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = {f"sampling_param_{name}": value for name, value in sampling.items()}
    return {"text_input": prompt, "sampling_param_max_tokens": 48, **named, **fields}


def classic_fields(prompt: str, sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"text_input": prompt, "max_tokens": 48, **sampling, **fields}
