"""What a sweep asks of a served model, and the two ways to reach one."""

from __future__ import annotations

from typing import Any, Protocol

from dflash_perf.extra import require
from dflash_perf.harness.config import Configuration, SweepConfig
from dflash_perf.harness.trace import Trace


class Endpoint(Protocol):
    """A served model; belongs to the event loop that it was made in."""

    async def describe(self) -> dict[str, Any]:
        """What the server says about itself, after a check that it can do what is wanted.

        Raises:
            DflashError: nobody there, no such model, an input that it does not have.
        """

    async def send(self, prompt: str, seed: int, trace: Trace) -> None:
        """Sends a request and writes what arrives into `trace`, until the final response.

        Args:
            seed: of its sampling.

        Raises:
            ServedModelError: there was none.
        """

    async def is_alive(self) -> bool:
        """Whether somebody answers there now."""

    async def close(self) -> None:
        """Ends the connections."""


def open_endpoint(
    configuration: Configuration, config: SweepConfig, *, counts_needed: bool
) -> Endpoint:
    """Connects to a configuration's server.

    Args:
        counts_needed: there is no tokenizer, so the server must tell token counts.

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
