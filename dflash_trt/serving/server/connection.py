"""The connection to one server's model, which requests may still use when that server has gone."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dflash_trt.serving.client.client import GenerationRequest, ServedModel, TextDelta
from dflash_trt.serving.client.errors import ServedModelError


class Connection:
    """A served model, and how many requests are being answered through it.

    Closing a channel of gRPC cancels the calls that it carries, which their tasks would take for
    their own cancellation. So it is closed when it carries none.
    """

    def __init__(self, address: str) -> None:
        self._model = ServedModel(address)
        self.requests = 0
        self.is_closed = False

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """As `ServedModel.stream`.

        Raises:
            ServedModelError: also when the connection was closed before the first part was asked.
        """
        if self.is_closed:
            raise ServedModelError("the model server has failed", "unavailable")
        self.requests += 1
        try:
            async with aclosing(self._model.stream(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.requests -= 1

    async def close_if_idle(self) -> bool:
        """Closes it unless a request is being answered; whether it is closed."""
        if not self.requests:
            await self.close()
        return self.is_closed

    async def close(self) -> None:
        """Closes it, whoever waits."""
        if not self.is_closed:
            self.is_closed = True
            await self._model.close()
