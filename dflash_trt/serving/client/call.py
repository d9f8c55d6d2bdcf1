"""One request on the wire: its tensors, its responses, and how it is stopped."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput, InferResult
    from tritonclient.grpc.aio import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    Received = tuple[InferResult | None, InferenceServerException | None]

MODEL = "tensorrt_llm"
# How long a server may take to stop a request, and how often it is told.
_STOP_S = 10.0
_STOP_PERIOD_S = 0.05


class ModelCall:
    """One request on the wire.

    A request that nobody waits for any more is stopped by a second one that says so, as the
    contract has it. Cancelling its call would do as well, but for Triton server 2.51, which
    crashes at times when a call is cancelled (triton-inference-server/server#7368 and #8034).
    The same goes for its header `triton_grpc_error`, which makes it cancel a call that fails.

    Args:
        inputs: the tensors.
        parameters: the request's parameters.

    `ended` says that `receive` has given all there was.
    """

    def __init__(
        self,
        client: InferenceServerClient,
        inputs: list[InferInput],
        parameters: dict[str, Any],
    ) -> None:
        self._client = client
        self._id = secrets.token_hex(16)
        self._answers = client.stream_infer(self._once(inputs, parameters))
        self._reading: asyncio.Task[Received | None] | None = None
        self.ended = False

    async def receive(self) -> Received | None:
        """The next response and its error, of which one is None; None at the end.

        Who is cancelled while waiting here leaves the call as it is.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading})
        read, self._reading = self._reading, None
        try:
            received = read.result()
        except BaseException:
            self.ended = True
            raise
        self.ended = received is None
        return received

    def cancel(self) -> None:
        """Ends the call without a word to the server."""
        self._answers.cancel()

    async def stop(self) -> None:
        """Ends the request on the server, and then the call."""
        draining = asyncio.create_task(self._drain())
        deadline = time.monotonic() + _STOP_S
        # Again and again: the first may overtake the request that it is about.
        while not draining.done() and time.monotonic() < deadline:
            await asyncio.gather(self._say_stop(), return_exceptions=True)
            await asyncio.wait({draining}, timeout=_STOP_PERIOD_S)
        self.cancel()
        await asyncio.gather(draining, return_exceptions=True)

    async def _read(self) -> Received | None:
        try:
            received: Received = await anext(self._answers)
        except StopAsyncIteration:
            return None
        return received

    async def _drain(self) -> None:
        while await self.receive() is not None:
            pass

    async def _say_stop(self) -> None:
        inputs = [make_input("text_input", "BYTES", [b""]), make_input("stop", "BOOL", [True])]
        answers = self._client.stream_infer(self._once(inputs, {}), stream_timeout=_STOP_S)
        async for _ in answers:
            pass

    async def _once(
        self, inputs: list[InferInput], parameters: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": MODEL,
            "request_id": self._id,
            "inputs": inputs,
            "parameters": parameters,
        }


def make_input(name: str, kind: str, items: list[Any]) -> InferInput:
    """A tensor of shape [n] and of Triton server's type `kind`: the model has max_batch_size 0."""
    from tritonclient.grpc import InferInput
    from tritonclient.utils import triton_to_np_dtype

    array = np.array(items, dtype=triton_to_np_dtype(kind))
    return InferInput(name, list(array.shape), kind).set_data_from_numpy(array)
