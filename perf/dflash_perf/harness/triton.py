"""A model on a Triton server by TensorRT-LLM's LLM-API contract: gRPC, one stream a request."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_perf.harness.config import Configuration, SweepConfig
from dflash_perf.harness.endpoint import Call, RequestFailedError
from dflash_perf.harness.trace import ServerCounts, Streaming, Trace
from dflash_trt.config import nearest
from dflash_trt.errors import DflashError, one_line

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput, InferRequestedOutput
    from tritonclient.grpc.aio import InferenceServerClient

STREAMS_PER_CONNECTION = 32
# An input of the model where it has one, else a parameter of the request.
_IGNORE_EOS = "ignore_eos"
_EOS_INPUTS = ("sampling_param_ignore_eos", _IGNORE_EOS)
_COUNTS = {
    "num_input_tokens": "input_tokens",
    "num_output_tokens": "output_tokens",
    "num_verify_steps": "verify_steps",
    "total_draft_tokens": "drafted_tokens",
    "total_accepted_draft_tokens": "accepted_tokens",
}
_LISTS = {
    "acceptance_histogram": "histogram",
    "position_trials": "position_trials",
    "position_accepts": "position_accepts",
}
# Ends a failed stream with the error's own status.
_HEADERS = {"triton_grpc_error": "true"}
_CONNECT_TIMEOUT_S = 10.0


class TritonEndpoint:
    """See `Endpoint`. Several connections: one carries STREAMS_PER_CONNECTION requests."""

    def __init__(
        self, configuration: Configuration, config: SweepConfig, *, counts_needed: bool
    ) -> None:
        most = max([*config.concurrency, *(256 for _ in config.request_rate)])
        connections = -(-most // STREAMS_PER_CONNECTION)
        self._configuration = configuration
        self._config = config
        self._counts_needed = counts_needed
        self._clients = [_connect(configuration.url) for _ in range(connections)]
        self._next = 0
        self._fixed: list[InferInput] = []
        self._outputs: list[InferRequestedOutput] = []
        self._parameters: dict[str, Any] = dict(configuration.parameters)
        self._sends_seed = False
        self._streaming: Streaming | None = None

    async def describe(self) -> dict[str, Any]:
        """Also learns which inputs and outputs the model has."""
        from tritonclient.grpc import InferRequestedOutput
        from tritonclient.utils import InferenceServerException

        name = self._configuration.model
        client = self._clients[0]
        timeout = {"client_timeout": _CONNECT_TIMEOUT_S}
        try:
            server = await client.get_server_metadata(as_json=True, **timeout)
            model = await client.get_model_metadata(name, as_json=True, **timeout)
            described = await client.get_model_config(name, as_json=True, **timeout)
        except InferenceServerException as error:
            raise self._explain(error) from None
        inputs = {one["name"]: one["datatype"] for one in model.get("inputs", [])}
        offered = {one["name"] for one in model.get("outputs", [])}
        if "text_input" not in inputs or "text_output" not in offered:
            raise DflashError(
                f"model {name!r} does not speak TensorRT-LLM's LLM-API contract: it has no "
                f"{'text_output' if 'text_input' in inputs else 'text_input'}",
                where=self._configuration.url,
                usage=True,
            )
        if self._counts_needed and not offered & {"output_ids", "num_output_tokens"}:
            raise DflashError(
                f"model {name!r} offers neither output_ids nor num_output_tokens",
                where=self._configuration.url,
                fix="pass --tokenizer to count its tokens",
                usage=True,
            )
        self._fixed = self._build_inputs(inputs)
        self._sends_seed = "sampling_param_seed" in inputs
        wanted = ["text_output", "output_ids", "finish_reason", *_COUNTS, *_LISTS]
        self._outputs = [InferRequestedOutput(one) for one in wanted if one in offered]
        parameters = {
            key: value.get("string_value", "")
            for key, value in described.get("config", {}).get("parameters", {}).items()
        }
        told = parameters.get("streaming_text")
        self._streaming = told if told in ("cumulative", "delta") else None
        return {
            "server": " ".join([server.get("name", ""), server.get("version", "")]).strip(),
            "model": name,
            "parameters": parameters,
        }

    async def send(self, call: Call, trace: Trace) -> None:
        """One bidirectional stream: the request, half-closed; responses until the server ends."""
        import grpc
        from tritonclient.utils import InferenceServerException

        inputs = [_to_input("text_input", "BYTES", call.prompt.encode()), *self._fixed]
        if self._sends_seed:
            inputs.append(_to_input("sampling_param_seed", "UINT64", call.seed))
        request = {
            "model_name": self._configuration.model,
            "inputs": inputs,
            "outputs": self._outputs,
            "parameters": self._parameters,
        }
        self._next = (self._next + 1) % len(self._clients)
        stream = self._clients[self._next].stream_infer(_once(request, trace), headers=_HEADERS)
        last: Mapping[str, bytes] = {}
        trace.start()  # again when it leaves; a request that never does has a time as well
        try:
            async for result, error in stream:
                at = time.perf_counter()
                if error is not None:
                    raise RequestFailedError(one_line(error.message()))
                outputs = _raw_outputs(result.get_response())
                if "text_output" in outputs:
                    last = outputs
                    text = _first_text(outputs["text_output"])
                    trace.receive(at, text, outputs.get("output_ids"), streaming=self._streaming)
        except grpc.aio.AioRpcError as error:
            raise _failure(error.code().name, error.details()) from None
        except InferenceServerException as error:
            raise _failure(error.status(), error.message()) from None
        finally:
            stream.cancel()
        if not last:
            raise RequestFailedError("the stream ended without a response")
        trace.finish_reason = _first_text(last.get("finish_reason", b"")).decode(errors="replace")
        trace.counts = _read_counts(last)
        if trace.finish_reason == "cancelled":
            raise RequestFailedError("was cancelled on the server")

    async def is_alive(self) -> bool:
        from tritonclient.utils import InferenceServerException

        try:
            return bool(
                await self._clients[0].is_model_ready(
                    self._configuration.model, client_timeout=_CONNECT_TIMEOUT_S
                )
            )
        except InferenceServerException:
            return False

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    def _build_inputs(self, known: Mapping[str, str]) -> list[InferInput]:
        """The inputs that all requests share; what the model does not have is refused or left."""
        config, where = self._config, self._configuration.url
        values: dict[str, Any] = {
            "streaming": True,
            "sampling_param_max_tokens": config.osl,
            "sampling_param_temperature": config.temperature,
            "sampling_param_top_p": config.top_p,
        }
        if config.top_k is not None:
            values["sampling_param_top_k"] = config.top_k
        for name in values:
            if name not in known:
                raise DflashError(
                    f"model {self._configuration.model!r} has no input {name!r}", where=where
                )
        for name in ("sampling_param_exclude_input_from_output", "return_finish_reason"):
            if name in known:
                values[name] = True
        if config.ignore_eos:
            values |= {name: True for name in _EOS_INPUTS if name in known}
            self._parameters.setdefault(_IGNORE_EOS, True)
        for name, value in self._configuration.inputs.items():
            if name not in known:
                raise DflashError(
                    f"model {self._configuration.model!r} has no input {name!r}"
                    f"{nearest(name, sorted(known))}",
                    where=self._configuration.name,
                    usage=True,
                )
            values[name] = value
        return [_to_input(name, known[name], value) for name, value in values.items()]

    def _explain(self, error: Any) -> DflashError:
        where = self._configuration.url
        failure = _failure(error.status(), error.message())
        if failure.unreachable:
            return DflashError(
                "no Triton server answers there",
                where=where,
                fix="start one with `dflash-trt serve`, and give its gRPC port",
            )
        return DflashError(str(failure), where=where)


def _connect(url: str) -> InferenceServerClient:
    from tritonclient.grpc.aio import InferenceServerClient

    # A pool of its own: gRPC would lay channels of one address on one connection.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return InferenceServerClient(url.removeprefix("grpc://"), channel_args=options)


def _to_input(name: str, datatype: str, value: object) -> InferInput:
    from tritonclient.grpc import InferInput
    from tritonclient.utils import triton_to_np_dtype

    if datatype == "BYTES" and isinstance(value, str):
        value = value.encode()
    try:
        array = np.array([value], dtype=triton_to_np_dtype(datatype))
    except (ValueError, TypeError, OverflowError) as error:
        raise DflashError(
            f"is {datatype}, which {one_line(repr(value), 40)} is not", where=name, usage=True
        ) from error
    return InferInput(name, [1], datatype).set_data_from_numpy(array)


async def _once(request: dict[str, Any], trace: Trace) -> AsyncIterator[dict[str, Any]]:
    """The stream's one request; gRPC asks for it when the stream is open: then it is sent."""
    trace.start()
    yield request


def _raw_outputs(response: Any) -> dict[str, bytes]:
    """Outputs by name, as bytes: half of what NumPy arrays would cost the client."""
    contents = response.raw_output_contents
    return {output.name: contents[index] for index, output in enumerate(response.outputs)}


def _first_text(content: bytes) -> bytes:
    """The first element of a BYTES tensor: four bytes of length, then the text."""
    return content[4 : 4 + int.from_bytes(content[:4], "little")]


def _read_counts(outputs: Mapping[str, bytes]) -> ServerCounts:
    found: dict[str, Any] = {}
    for name, key in (*_COUNTS.items(), *_LISTS.items()):
        values = tuple(np.frombuffer(outputs.get(name, b""), dtype="<i4").tolist())
        if values:
            found[key] = values[0] if name in _COUNTS else values
    return ServerCounts(**found)


def _failure(status: str | None, message: str | None) -> RequestFailedError:
    name = (status or "").removeprefix("StatusCode.")
    what = one_line(message or name or "no reason given", 200)
    lost = ("failed to connect", "socket closed", "connection re", "goaway", "recvmsg", "deadline")
    unreachable = name in ("UNAVAILABLE", "DEADLINE_EXCEEDED") and any(
        sign in what.lower() for sign in lost
    )
    return RequestFailedError(what, unreachable=unreachable)
