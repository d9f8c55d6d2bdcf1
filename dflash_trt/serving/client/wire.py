"""A model on a Triton server as its clients reach it: gRPC, one stream per request.

A request that nobody waits for ends by cancelling its call; one that fails is read to its end.
Why, and why no call has the header `triton_grpc_error`: docs/serving.md.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_trt.errors import DflashError, install_extra, one_line
from dflash_trt.serving.client.errors import ServedModelError, explain

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput, InferRequestedOutput
    from tritonclient.grpc.aio import InferenceServerClient

MODEL = "tensorrt_llm"
FIGURES = {
    "num_input_tokens": "prompt_tokens",
    "num_output_tokens": "output_tokens",
    "num_verify_steps": "steps",
    "acceptance_histogram": "acceptance_histogram",
    "position_trials": "position_trials",
    "position_accepts": "position_accepts",
    "total_draft_tokens": "drafted_tokens",
    "total_accepted_draft_tokens": "accepted_tokens",
    "cached_prompt_tokens": "cached_prompt_tokens",
    "preemptions": "preemptions",
    "forced_tokens": "forced_tokens",
}
"""Outputs of the last response, and the fields of RequestStatistics that they have."""
FLOW = "flow"
"""Parameter of requests that take turns with others as one."""
_INTEGERS = {"INT32": "<i4", "INT64": "<i8", "UINT32": "<u4", "UINT64": "<u8"}
# Of the questions about the model; requests have no limit here.
_TIMEOUT_S = 10.0
_LIVE_S = 2.0
_MAX_MESSAGE = 64 << 20  # an answer of a million tokens, said anew at each of them, has less


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What `server`, by name and version, says about a model.

    `inputs` are Triton server's data types by name; `parameters` the configuration's.
    """

    server: str
    inputs: dict[str, str]
    outputs: frozenset[str]
    parameters: dict[str, str]


class Response:
    """One message of the model; `at` is when it came (`perf_counter`).

    It reads raw bytes, which costs half of what an `InferResult`'s arrays do.
    """

    __slots__ = ("_outputs", "at", "raw")

    def __init__(self, message: Any) -> None:
        self.at = time.perf_counter()
        self._outputs = message.outputs
        contents = message.raw_output_contents
        if len(contents) != len(self._outputs):
            raise _malformed()
        self.raw: dict[str, bytes] = {
            output.name: contents[index] for index, output in enumerate(self._outputs)
        }

    def texts(self, name: str) -> list[bytes]:
        """The elements of a BYTES output: each is four bytes of length, then the text."""
        content, texts, start = self.raw.get(name, b""), [], 0
        while start < len(content):
            end = start + 4 + int.from_bytes(content[start : start + 4], "little")
            if end > len(content):
                raise _malformed()
            texts.append(content[start + 4 : end])
            start = end
        return texts

    def text(self, name: str) -> bytes:
        """The first element of a BYTES output; empty where there is none."""
        return next(iter(self.texts(name)), b"")

    def numbers(self, name: str) -> tuple[int, ...]:
        """The elements of an integer output; none where there is no such output."""
        if name not in self.raw:
            return ()
        datatype = next(output.datatype for output in self._outputs if output.name == name)
        try:
            if datatype == "BYTES":  # TensorRT-LLM's own model sends its figures as text
                return tuple(map(int, self.texts(name)))
            return tuple(np.frombuffer(self.raw[name], _INTEGERS[datatype]).tolist())
        except (KeyError, ValueError):
            raise _malformed() from None

    def reals(self, name: str) -> tuple[float, ...]:
        """The elements of an FP64 output; none where there is no such output."""
        try:
            return tuple(np.frombuffer(self.raw.get(name, b""), "<f8").tolist())
        except ValueError:
            raise _malformed() from None


class WireClient:
    """The model `model` of the server at `address` ([grpc://]host:port).

    Belongs to the event loop it was made in. Requests take its `connections` in turn.
    """

    def __init__(self, address: str, model: str = MODEL, *, connections: int = 1) -> None:
        self.address = address
        self.model = model
        self._clients = [_connect(address) for _ in range(connections)]
        self._turns = cycle(self._clients)

    async def close(self) -> None:
        """Ends the connections."""
        for client in self._clients:
            await client.close()

    async def is_ready(self) -> bool:
        """Whether the model would take a request now."""
        from tritonclient.utils import InferenceServerException

        try:
            ready = await self._clients[0].is_model_ready(self.model, client_timeout=_TIMEOUT_S)
        except InferenceServerException:
            return False
        return bool(ready)

    async def read_parameters(self) -> dict[str, str]:
        """The parameters of the model's configuration."""
        answer = await self._ask("get_model_config", self.model)
        parameters = answer.get("config", {}).get("parameters", {})
        return {name: value.get("string_value", "") for name, value in parameters.items()}

    async def describe(self) -> ModelDescription:
        """What the server says about the model."""
        server = await self._ask("get_server_metadata")
        model = await self._ask("get_model_metadata", self.model)
        return ModelDescription(
            server=" ".join([server.get("name", ""), server.get("version", "")]).strip(),
            inputs={one["name"]: one["datatype"] for one in model.get("inputs", [])},
            outputs=frozenset(one["name"] for one in model.get("outputs", [])),
            parameters=await self.read_parameters(),
        )

    async def infer(
        self,
        inputs: Sequence[InferInput],
        parameters: dict[str, Any],
        *,
        outputs: Sequence[InferRequestedOutput] | None = None,
        on_send: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Response, None]:
        """Sends a request and yields its responses as they come.

        Closing the generator (`contextlib.aclosing`), or cancelling the task that waits in it,
        cancels the request on the server. `on_send` is called when the request leaves.
        """
        import grpc
        from tritonclient.utils import InferenceServerException

        async def once() -> AsyncIterator[dict[str, Any]]:
            on_send()
            yield {
                "model_name": self.model,
                "inputs": inputs,
                "outputs": outputs,
                "parameters": parameters,
            }

        answers = next(self._turns).stream_infer(once())
        failed: str | None = None
        try:
            async for result, error in answers:
                if error is None:
                    yield Response(result.get_response())
                else:  # the last message; cancelling a call that failed is bad for the server
                    failed = error.message()
        except grpc.aio.AioRpcError as error:
            raise await self._explain(error.code().name, error.details()) from None
        except InferenceServerException as error:
            raise await self._explain(error.status(), error.message()) from None
        finally:
            answers.cancel()
        if failed is not None:
            # Models of ours end a request with an output. This is the server's own word: the model
            # is not there, or its process has died.
            raise ServedModelError(one_line(failed), "unavailable", where=self.address)

    async def _ask(self, question: str, *details: str) -> dict[str, Any]:
        from tritonclient.utils import InferenceServerException

        ask = getattr(self._clients[0], question)
        try:
            answer: dict[str, Any] = await ask(*details, as_json=True, client_timeout=_TIMEOUT_S)
        except InferenceServerException as error:
            raise await self._explain(error.status(), error.message()) from None
        return answer

    async def _explain(self, status: str | None, message: str | None) -> ServedModelError:
        """The error for a call's status, which `StatusCode.` may lead.

        A full queue and a server that is not there have the same one: so the server is asked.
        """
        from tritonclient.utils import InferenceServerException

        code = (status or "").removeprefix("StatusCode.")
        is_lost = code == "DEADLINE_EXCEEDED"
        if code == "UNAVAILABLE":
            try:
                is_lost = not await self._clients[0].is_server_live(client_timeout=_LIVE_S)
            except InferenceServerException:
                is_lost = True
        if not is_lost:
            return explain(code, message, self.address)
        what, fix = "no server answers there (any more)", "start one with `dflash-trt serve`"
        return ServedModelError(what, "unavailable", unreachable=True, where=self.address, fix=fix)


def _malformed() -> ServedModelError:
    return ServedModelError("sends what is no answer of such a model", "failed")


def make_input(name: str, datatype: str, items: Sequence[object]) -> InferInput:
    """A tensor of shape [n] and of Triton server's type: the model has max_batch_size 0."""
    from tritonclient.grpc import InferInput
    from tritonclient.utils import triton_to_np_dtype

    if datatype == "BYTES":
        items = [item.encode() if isinstance(item, str) else item for item in items]
    try:
        array = np.array(items, dtype=triton_to_np_dtype(datatype))
    except (ValueError, TypeError, OverflowError) as error:
        shown = one_line(repr(items[0]), 40)
        raise DflashError(f"is {datatype}, which {shown} is not", where=name, usage=True) from error
    return InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)


def _connect(address: str) -> InferenceServerClient:
    try:
        from tritonclient.grpc.aio import InferenceServerClient
    except ImportError as error:
        what = f"a client needs tritonclient ({one_line(error)})"
        fix = install_extra("serve")
        raise DflashError(what, fix=fix) from error
    # A pool of its own: gRPC would lay channels of one address on one connection.
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ]
    return InferenceServerClient(address.removeprefix("grpc://"), channel_args=options)
