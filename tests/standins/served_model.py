"""A served model of known timing: `python -m tests.standins.served_model LOG` until stdin closes.

gRPC by the LLM-API contract, and OpenAI's completions over plain HTTP. What a model does is in
its name's `Behaviour`. LOG gets a JSON line per answered request: when it came in, when its first
and last output went out (the machine-wide monotonic clock), and its tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc


@dataclass(frozen=True)
class Behaviour:
    """Seconds until the first token, then one verify step each `step_s`.

    `pattern` is how many tokens the steps emit, in turn; the first token comes alone. Of each
    time a request takes (1 ± jitter) ×, by its seed.
    """

    ttft_s: float = 0.004
    step_s: float = 0.002
    pattern: tuple[int, ...] = (4, 2, 8, 1)
    block: int = 8
    jitter: float = 0.0
    drafts: bool = True
    ids: bool = True
    counts: bool = True
    streaming_text: str | None = "cumulative"  # what its configuration says, if anything
    pieces: bool = False  # a message holds what is new, else all so far
    lies: int = 0  # added to num_output_tokens
    fails_each: int = 0  # every so manieth request gets an error
    dies_at: int = 0  # the process ends at its so manieth request
    hangs: bool = False
    eos_at: int = 0  # the output ends there, unless the request's parameter says ignore_eos
    heeds: bool = True  # …and whether it heeds that
    is_chat: bool = False  # it has a chat template, without which the output ends after a token


MODELS = {
    "tensorrt_llm": Behaviour(),
    "delta": Behaviour(streaming_text="delta", pieces=True),
    "unsaid": Behaviour(streaming_text=None),
    "unsaid_delta": Behaviour(streaming_text=None, pieces=True, pattern=(3, 1)),
    "counts_only": Behaviour(ids=False),
    "text_only": Behaviour(ids=False, counts=False, drafts=False),
    "autoregressive": Behaviour(pattern=(1,), drafts=False),
    "steady": Behaviour(ttft_s=0.6, step_s=0.12),
    "timed_many": Behaviour(ttft_s=2.0, step_s=0.2, jitter=0.2),
    "liar": Behaviour(lies=1),
    "failing": Behaviour(fails_each=3),
    "broken": Behaviour(fails_each=1),
    "mortal": Behaviour(dies_at=12),
    "stopping": Behaviour(eos_at=9, heeds=False),
    "parameters": Behaviour(eos_at=9),
    "chatting": Behaviour(is_chat=True),
    "hanging": Behaviour(hangs=True),
}
_INPUTS = {
    "text_input": "BYTES",
    "streaming": "BOOL",
    "sampling_param_max_tokens": "INT32",
    "sampling_param_temperature": "FP32",
    "sampling_param_top_p": "FP32",
    "sampling_param_top_k": "INT32",
    "sampling_param_seed": "UINT64",
    "sampling_param_exclude_input_from_output": "BOOL",
    "return_finish_reason": "BOOL",
}
_COUNTS = "num_input_tokens num_output_tokens num_verify_steps total_draft_tokens".split()
_LISTS = ["total_accepted_draft_tokens", "acceptance_histogram"]


@dataclass
class Answer:
    """One request's schedule: cumulative tokens and the moment of each message."""

    behaviour: Behaviour
    moments: list[float]
    tokens: list[int]

    @staticmethod
    def plan(behaviour: Behaviour, seed: int, wanted: int, came_at: float) -> Answer:
        chance = random.Random(seed)
        scale = 1 + behaviour.jitter * chance.uniform(-1, 1)
        at, count = came_at + behaviour.ttft_s * scale, 1
        moments, tokens = [at], [1]
        for emitted in itertools.cycle(behaviour.pattern):
            if count >= wanted:
                break
            at, count = at + behaviour.step_s * scale, min(count + emitted, wanted)
            moments.append(at)
            tokens.append(count)
        return Answer(behaviour, moments, tokens)

    @property
    def histogram(self) -> list[int]:
        steps = [after - before for before, after in itertools.pairwise(self.tokens)]
        return [steps.count(size) for size in range(1, self.behaviour.block + 1)]

    async def play(self) -> AsyncIterator[tuple[int, int, bool]]:
        """At the moment of each message: tokens before and after it, and whether it is the last."""
        for moment, before, count in zip(
            self.moments, [0, *self.tokens[:-1]], self.tokens, strict=True
        ):
            await asyncio.sleep(max(moment - time.perf_counter(), 0))
            yield before, count, count == self.tokens[-1]


class Model(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The parts of KServe's service that a client of LLMs asks for.

    `running` counts requests that have come and not been answered to their end.
    """

    def __init__(self, log: TextIO) -> None:
        self.running = 0
        self._log = log
        self._seen: dict[str, int] = {}

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerMetadataResponse(name="stub", version="1.0")

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name in MODELS)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        behaviour = await self._find(request.name, context)
        reply = service_pb2.ModelMetadataResponse(name=request.name)
        for name, datatype in _INPUTS.items():
            reply.inputs.add(name=name, datatype=datatype, shape=[1])
        outputs = {"text_output": "BYTES", "finish_reason": "BYTES"}
        outputs |= {"output_ids": "INT32"} if behaviour.ids else {}
        outputs |= dict.fromkeys([*_COUNTS, *_LISTS], "INT32") if behaviour.counts else {}
        for name, datatype in outputs.items():
            reply.outputs.add(name=name, datatype=datatype, shape=[-1])
        return reply

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        behaviour = await self._find(request.name, context)
        config = model_config_pb2.ModelConfig(name=request.name)
        if behaviour.streaming_text is not None:
            config.parameters["streaming_text"].string_value = behaviour.streaming_text
        if behaviour.is_chat:
            config.parameters["chat_template"].string_value = "true"
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        # Triton server 2.51 crashes at times when a call with this header fails.
        assert "triton_grpc_error" not in dict(context.invocation_metadata())
        async for request in requests:
            came_at = time.perf_counter()
            behaviour = await self._find(request.model_name, context)
            number = self._seen[request.model_name] = self._seen.get(request.model_name, 0) + 1
            if behaviour.dies_at and number >= behaviour.dies_at:
                os._exit(1)  # nothing that would be a goodbye
            if behaviour.fails_each and number % behaviour.fails_each == 0:
                message = "the engine lost its block table"
                yield service_pb2.ModelStreamInferResponse(error_message=message)
                continue
            self.running += 1
            if behaviour.hangs:
                await asyncio.sleep(3600)
            inputs = _read_inputs(request)
            wanted = inputs["max_tokens"]
            ignores = request.parameters["ignore_eos"].bool_param and behaviour.heeds
            if behaviour.eos_at and not ignores:
                wanted = min(wanted, behaviour.eos_at)
            if behaviour.is_chat and not request.parameters["apply_chat_template"].bool_param:
                wanted = 1
            answer = Answer.plan(behaviour, inputs["seed"], wanted, came_at)
            sent: list[float] = []
            async for before, count, final in answer.play():
                sent.append(time.perf_counter())
                start = before if behaviour.pieces else 0
                yield _to_response(request, answer, start, count, final)
            self._write(request.model_name, inputs["seed"], came_at, sent, answer.tokens[-1])
            self.running -= 1

    async def _find(self, name: str, context: Any) -> Behaviour:
        if name not in MODELS:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model: '{name}'")
        return MODELS[name]

    def _write(self, model: str, seed: int, came_at: float, sent: list[float], tokens: int) -> None:
        line = {"model": model, "seed": seed, "came_at": came_at, "first_at": sent[0]}
        self._log.write(json.dumps({**line, "last_at": sent[-1], "tokens": tokens}) + "\n")
        self._log.flush()


def _make_text(start: int, count: int) -> str:
    return " ".join("ab"[i % 2] for i in range(start, count)) + " "


def _read_inputs(request: Any) -> dict[str, int]:
    raw = dict(zip((one.name for one in request.inputs), request.raw_input_contents, strict=True))
    assert all(tuple(one.shape) == (1,) for one in request.inputs)
    return {
        "seed": int.from_bytes(raw["sampling_param_seed"], "little"),
        "max_tokens": int.from_bytes(raw["sampling_param_max_tokens"], "little"),
    }


def _to_response(request: Any, answer: Answer, start: int, count: int, final: bool) -> Any:
    behaviour = answer.behaviour
    numbers: dict[str, list[int]] = {}
    if behaviour.ids:
        numbers["output_ids"] = [7 * index % 50 for index in range(start, count)]
    if behaviour.counts and final:
        steps = len(answer.tokens) - 1
        drafts = behaviour.drafts * steps * (behaviour.block - 1)
        accepted = behaviour.drafts * (count - 1 - steps)
        numbers |= {
            "num_input_tokens": [9],
            "num_output_tokens": [count + behaviour.lies],
            "num_verify_steps": [steps],
            "total_draft_tokens": [drafts],
            "total_accepted_draft_tokens": [accepted],
            "acceptance_histogram": answer.histogram,
        }
    reason = ("stop" if behaviour.is_chat and count == 1 else "length") if final else ""
    texts = {"text_output": _make_text(start, count), "finish_reason": reason}
    response = service_pb2.ModelInferResponse(model_name=request.model_name)
    for name, text in texts.items():
        data = text.encode()
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
    for name, values in numbers.items():
        response.outputs.add(name=name, datatype="INT32", shape=[len(values)])
        response.raw_output_contents.append(np.array(values, dtype="<i4").tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=response)


async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """OpenAI's /v1/models and /v1/completions, just enough of them, one request a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    _, _, length = head.lower().partition("content-length:")
    raw = await reader.readexactly(int((length or "0").split()[0]))
    opening = b"HTTP/1.1 200 OK\r\nServer: stub\r\nConnection: close\r\nContent-Type: "
    if head.startswith("GET"):
        body = json.dumps({"data": [{"id": name} for name in MODELS]}).encode()
        writer.write(opening + b"application/json\r\n\r\n" + body)
    else:
        await _stream_http(json.loads(raw), "chat" in head.split()[1], opening, writer)
    await writer.drain()
    writer.close()


async def _stream_http(
    body: dict[str, Any], chat: bool, opening: bytes, writer: asyncio.StreamWriter
) -> None:
    behaviour = MODELS[body["model"]]
    if behaviour.fails_each:
        refusal = json.dumps({"error": {"message": "too many requests"}}).encode()
        writer.write(b"HTTP/1.1 429 No\r\nConnection: close\r\n\r\n" + refusal)
        return
    writer.write(opening + b"text/event-stream\r\n\r\n")
    answer = Answer.plan(behaviour, body["seed"], body["max_tokens"], time.perf_counter())
    kind = "chat.completion.chunk" if chat else "text_completion"

    def write(choices: list[dict[str, Any]], **more: Any) -> None:
        event = {"object": kind, "choices": choices, **more}
        writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    if chat:
        write([{"delta": {"role": "assistant", "content": ""}}])
    async for before, count, final in answer.play():
        text = _make_text(before, count)
        choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        if behaviour.ids and body.get("return_token_ids"):
            choice["token_ids"] = list(range(before, count))
        write([{**choice, "finish_reason": "length" if final else None}])
    if behaviour.counts:
        drafts = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 5}
        usage = {"prompt_tokens": 9, "completion_tokens": answer.tokens[-1]}
        write([], usage={**usage, "completion_tokens_details": {**drafts, "num_verify_steps": 4}})
    writer.write(b"data: [DONE]\n\n")


async def serve(log: Path) -> None:
    """Prints both ports as JSON and serves until stdin ends."""
    with log.open("w") as file:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Model(file), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        http = await asyncio.start_server(answer_http, "127.0.0.1", 0)
        ports = {"grpc": port, "http": http.sockets[0].getsockname()[1]}
        print(json.dumps(ports), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        http.close()
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
