"""The interface of a served model to a sweep, with two implementations: gRPC and HTTP."""

from __future__ import annotations

from typing import Any, Protocol

from dflash_perf.extra import require
from dflash_perf.harness.sweep_config import Configuration, SweepConfig
from dflash_perf.harness.trace import Trace


class Endpoint(Protocol):
    """A served model; use it only in the event loop that created it."""

    async def describe(self) -> dict[str, Any]:
        """Checks that the server can run the sweep; returns its server, model and parameters.

        Raises:
            DflashError: no server, no such model, or an input that the model does not have.
        """

    async def send(self, prompt: str, seed: int, trace: Trace, schema: str | None = None) -> None:
        """Sends a request and writes what arrives into `trace`, until the final response.

        Args:
            seed: the request's sampling seed.
            schema: the JSON schema that the answer follows, as text.

        Raises:
            ServedModelError: no final response came.
        """

    async def is_alive(self) -> bool:
        """Whether the server answers now."""

    async def close(self) -> None:
        """Closes the connections."""


def open_endpoint(
    configuration: Configuration, config: SweepConfig, *, counts_needed: bool
) -> Endpoint:
    """Connects to a configuration's server.

    Args:
        counts_needed: the server must report token counts, as there is no tokenizer.

    Raises:
        DflashError: the client library is missing, or the API key's variable is not set.
    """
    if configuration.kind == "llm-api":
        require("a sweep over gRPC", "tritonclient", "grpc")
        from dflash_perf.harness.triton import TritonEndpoint

        return TritonEndpoint(configuration, config, counts_needed=counts_needed)
    require("a sweep over HTTP", "aiohttp")
    from dflash_perf.harness.openai import OpenAiEndpoint

    return OpenAiEndpoint(configuration, config)
