"""A model on a Triton server that has TensorRT-LLM's LLM-API contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, cast, get_args

from tritonclient.grpc import InferInput, InferRequestedOutput

from dflash_perf.harness.records import ServerCounts, Streaming, Trace
from dflash_perf.harness.sweep_config import Configuration, SweepConfig
from dflash_trt.errors import DflashError, nearest
from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.client.wire import Response, WireClient, make_input
from dflash_trt.serving.server.inputs import APPLY_TEMPLATE

STREAMS_PER_CONNECTION = 32
# An input of the model where it has one, else a parameter of the request.
_IGNORE_EOS = "ignore_eos"
_EOS_INPUTS = ("sampling_param_ignore_eos", _IGNORE_EOS)
_CHAT_TEMPLATE = "chat_template"
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


class TritonEndpoint:
    """See `Endpoint`. Opens one connection per STREAMS_PER_CONNECTION requests in flight."""

    def __init__(
        self, configuration: Configuration, config: SweepConfig, *, counts_needed: bool
    ) -> None:
        most = max([*config.concurrency, *(256 for _ in config.request_rate)])
        connections = -(-most // STREAMS_PER_CONNECTION)
        self._configuration = configuration
        self._config = config
        self._counts_needed = counts_needed
        self._wire = WireClient(configuration.url, configuration.model, connections=connections)
        self._fixed: list[InferInput] = []
        self._outputs: list[InferRequestedOutput] = []
        self._parameters: dict[str, Any] = dict(configuration.parameters)
        self._sends_seed = False
        self._streaming: Streaming | None = None

    async def describe(self) -> dict[str, Any]:
        """See `Endpoint`; also finds the model's inputs and outputs, which `send` needs."""
        name = self._configuration.model
        try:
            model = await self._wire.describe()
        except ServedModelError as error:
            if not error.unreachable:
                raise
            raise DflashError(
                "no Triton server answers there",
                where=self._configuration.url,
                fix="start one with `dflash-trt serve`, and give its gRPC port",
            ) from None
        inputs, offered = model.inputs, model.outputs
        if "text_input" not in inputs or "text_output" not in offered:
            what = f"model {name!r} does not speak TensorRT-LLM's LLM-API contract"
            raise DflashError(what, where=self._configuration.url, usage=True)
        if self._counts_needed and not offered & {"output_ids", "num_output_tokens"}:
            raise DflashError(
                f"model {name!r} offers neither output_ids nor num_output_tokens",
                where=self._configuration.url,
                fix="name a `tokenizer` to count its tokens in the --config",
                usage=True,
            )
        self._fixed = self._build_inputs(inputs)
        self._sends_seed = "sampling_param_seed" in inputs
        wanted = ["text_output", "output_ids", "finish_reason", *_COUNTS, *_LISTS]
        self._outputs = [InferRequestedOutput(one) for one in wanted if one in offered]
        if model.parameters.get(_CHAT_TEMPLATE) == "true":  # our own model's word
            self._parameters.setdefault(APPLY_TEMPLATE, True)
        told = model.parameters.get("streaming_text")
        self._streaming = cast(Streaming, told) if told in get_args(Streaming) else None
        return {"server": model.server, "model": name, "parameters": model.parameters}

    async def send(self, prompt: str, seed: int, trace: Trace, schema: str | None = None) -> None:
        parameters = self._parameters
        if schema is not None:  # as our own models take it
            grammar = json.dumps({"kind": "json_schema", "text": schema})
            parameters = {**parameters, "grammar": grammar}
        inputs = [make_input("text_input", "BYTES", [prompt]), *self._fixed]
        if self._sends_seed:
            inputs.append(make_input("sampling_param_seed", "UINT64", [seed]))
        last: Response | None = None
        trace.start()  # and again on sending; a request that is never sent needs a time too
        stream = self._wire.infer(inputs, parameters, outputs=self._outputs, on_send=trace.start)
        async with aclosing(stream) as responses:
            async for response in responses:
                if "text_output" in response.raw:
                    last = response
                    trace.receive(
                        response.at,
                        response.text("text_output"),
                        response.raw.get("output_ids"),
                        streaming=self._streaming,
                    )
        if last is None:
            raise ServedModelError("the stream ended without a response", "failed")
        trace.finish_reason = last.text("finish_reason").decode(errors="replace")
        trace.counts = _read_counts(last)
        if trace.finish_reason == "cancelled":
            raise ServedModelError("was cancelled on the server", "cancelled")

    async def read_metrics(self) -> dict[str, float]:
        return {}  # its answers have all

    async def is_alive(self) -> bool:
        return await self._wire.is_ready()

    async def close(self) -> None:
        await self._wire.close()

    def _build_inputs(self, known: Mapping[str, str]) -> list[InferInput]:
        """The inputs that all requests share. Optional ones that the model lacks are left out.

        Raises:
            DflashError: the model lacks an input that the sweep or its configuration needs.
        """
        config = self._config
        values: dict[str, Any] = {
            "streaming": True,
            "sampling_param_max_tokens": config.osl,
            "sampling_param_temperature": config.temperature,
            "sampling_param_top_p": config.top_p,
        }
        if config.top_k is not None:
            values["sampling_param_top_k"] = config.top_k
        for name in ("sampling_param_exclude_input_from_output", "return_finish_reason"):
            if name in known:
                values[name] = True
        if config.ignore_eos:
            values |= {name: True for name in _EOS_INPUTS if name in known}
            self._parameters.setdefault(_IGNORE_EOS, True)
        values |= self._configuration.inputs
        for name in values:
            if name not in known:
                what = f"model {self._configuration.model!r} has no input {name!r}"
                hint = nearest(name, sorted(known))
                raise DflashError(what + hint, where=self._configuration.name, usage=True)
        return [make_input(name, known[name], [value]) for name, value in values.items()]


def _read_counts(response: Response) -> ServerCounts:
    found: dict[str, Any] = {}
    for name, key in (*_COUNTS.items(), *_LISTS.items()):
        if values := response.numbers(name):
            found[key] = values[0] if name in _COUNTS else values
    return ServerCounts(**found)
