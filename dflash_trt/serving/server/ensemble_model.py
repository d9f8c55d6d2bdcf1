"""The Triton server model `ensemble`: the classic contract, forwarded to `tensorrt_llm`."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import PositiveInt

from dflash_trt.decoding.jobs import Failure, Outcome
from dflash_trt.errors import DflashError, one_line
from dflash_trt.serving.server.generation import StreamingText
from dflash_trt.serving.server.inputs import (
    CLASSIC_NAMES,
    CLASSIC_PARAMETERS,
    GUIDE,
    GUIDE_TYPE,
    RENAMED,
    STOP_IDS,
    ModelSettings,
    Tensors,
    as_strings,
    check_inputs,
    check_parameters,
    read_scalar,
    read_texts,
    refuse,
)
from dflash_trt.serving.server.replies import (
    TIMES,
    CancellationWatch,
    Channel,
    Lingering,
    Outputs,
    as_failure,
)

SEED_NAMES = ("seed", "random_seed")

# Inputs that would change the output: the values that ask for nothing. A length penalty ranks
# beams, of which there is one.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "min_tokens": (0, 1),
    "length_penalty": (0.0, 1.0),
    "embedding_bias_words": ("",),
    "embedding_bias_weights": (0.0,),
    "prompt_embedding_table": (),
    "prompt_table_extra_id": (),
    "prompt_vocab_size": (0,),
    "lora_task_id": (),
    "lora_weights": (),
    "lora_config": (),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
}

ALWAYS = (
    "text_output",
    "num_verify_steps",
    "acceptance_rate",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
)

# Outputs of both contracts: the classic one's name and shape, [batch, beams, …] of one each.
_LOG_PROBS = {
    "cumulative_logprob": ("cum_log_probs", (1, 1)),
    "logprobs": ("output_log_probs", (1, 1, -1)),
}


@dataclass(frozen=True, slots=True)
class Forward:
    """A request as `tensorrt_llm` takes it; `output_names` are what its client wants of it."""

    tensors: Tensors
    parameters: Mapping[str, Any]
    output_names: tuple[str, ...]
    timeout_us: int


def read_forward(tensors: Tensors, parameters: Mapping[str, Any], timeout_us: int) -> Forward:
    """Raises DflashError (usage) naming the first input that cannot be forwarded."""
    check_inputs(tensors, UNIMPLEMENTED)
    check_parameters(parameters, CLASSIC_PARAMETERS, CLASSIC_NAMES)
    forwarded = {
        RENAMED[name]: tensor.reshape(-1) for name, tensor in tensors.items() if name in RENAMED
    }
    seeds = {read_scalar(tensors, name, int) for name in SEED_NAMES} - {None}
    if len(seeds) > 1:
        raise refuse(" and ".join(SEED_NAMES), "differ; send one of them")
    if seeds:
        forwarded["sampling_param_seed"] = np.array(list(seeds), dtype=np.uint64)
    repetition = read_scalar(tensors, "repetition_penalty", float)
    words = [word for word in read_texts(tensors, "bad_words") if word]
    # Inputs here, parameters there.
    sent = {
        "end_id": read_scalar(tensors, "end_id", int),
        "repetition_penalty": None if repetition is None else repr(repetition),
        "bad_words": json.dumps(words) if words else None,
        **{name: "".join(read_texts(tensors, name)) or None for name in (GUIDE_TYPE, GUIDE)},
    }
    parameters = {**parameters, **{name: one for name, one in sent.items() if one is not None}}
    names: tuple[str, ...] = ALWAYS
    for name in ("num_input_tokens", "num_output_tokens"):
        if read_scalar(tensors, f"return_{name}", bool):
            names += (name,)
    if read_scalar(tensors, "return_perf_metrics", bool):
        names += TIMES
    if read_scalar(tensors, "return_log_probs", bool):
        forwarded["return_cumulative_logprob"] = np.array([True])
        names += tuple(_LOG_PROBS)
    return Forward(forwarded, parameters, names, timeout_us)


def to_classic(outputs: Outputs, forward: Forward) -> Outputs:
    """Outputs with the batch dimension that classic clients expect."""
    classic = {
        name: values.reshape(1, -1)
        for name, values in outputs.items()
        if name in forward.output_names
    }
    for name, (theirs, shape) in _LOG_PROBS.items():
        if name in classic:
            classic[theirs] = classic.pop(name).astype(np.float32).reshape(shape)
    return classic | {"sequence_index": np.zeros((1, 1), dtype=np.int32)}


_LLM_MODEL = "tensorrt_llm"
_FINAL_MARK = "num_verify_steps"  # an output that only a last response has
_STOP_AGAIN_S = 0.05
_CLOSE_S = 5.0


class _Forwarding:
    """A request on its way through the other model, under an id of its own."""

    def __init__(self, request_id: str, channel: Channel, forward: Forward) -> None:
        self.request_id = request_id
        self.channel = channel
        self.forward = forward
        self.inner_id = f"ensemble-{uuid.uuid4().hex}"
        self.is_cancelled = self.is_done = False


class TritonPythonModel:
    """Triton server's interface: `initialize`, `execute` for each request, `finalize`.

    Should the other model's process die, the threads that wait in the server for its answers cannot
    be woken: `dflash-trt serve` ends the server, and with it this process.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as utils

        self._utils = utils
        settings = ModelSettings(args)
        self._streaming_text = settings.read("streaming_text", StreamingText)
        self._max_requests = settings.read("max_requests", PositiveInt)
        self._pool = ThreadPoolExecutor(self._max_requests, "forward")
        self._lock = threading.Lock()
        self._live: set[_Forwarding] = set()
        self._calls = Lingering()
        self._watch = CancellationWatch()
        self._closing = threading.Event()
        threading.Thread(target=self._stop_cancelled, name="stop", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Takes requests; their replies come from other threads."""
        for request in requests:
            channel = Channel(self._utils, request)
            try:
                self._take(request, channel)
            except Exception as error:
                channel.fail(as_failure(error))

    def finalize(self) -> None:
        """Cancels what is still forwarded, and waits for it."""
        deadline = time.monotonic() + _CLOSE_S
        for one in self._list_live():
            one.is_cancelled = True
        while self._list_live() and time.monotonic() < deadline:
            time.sleep(_STOP_AGAIN_S)
        self._closing.set()
        self._pool.shutdown(wait=not self._list_live())
        self._watch.close()

    def _take(self, request: Any, channel: Channel) -> None:
        tensors: Tensors = {one.name(): one.as_numpy() for one in request.inputs()}
        request_id = request.request_id()
        if read_scalar(tensors, "stop", bool):
            for one in self._list_live():
                one.is_cancelled |= bool(request_id) and one.request_id == request_id
            channel.end()
            return
        parameters = {"streaming_text": self._streaming_text, **channel.parameters}
        forward = read_forward(tensors, parameters, request.timeout())
        forwarding = _Forwarding(request_id, channel, forward)
        with self._lock:
            is_full = len(self._live) >= self._max_requests
            if not is_full:
                self._live.add(forwarding)
        if is_full:
            full = DflashError(f"the queue is full: {self._max_requests} requests are in flight")
            channel.fail(Failure(Outcome.OVERFLOW, full))
            return
        self._watch.add(channel, lambda: setattr(forwarding, "is_cancelled", True))
        self._pool.submit(self._forward, forwarding)

    def _forward(self, forwarding: _Forwarding) -> None:
        """Passes responses on as they come, until the last.

        The place is free before the client hears of the end, and may send its next request.
        """
        channel, call = forwarding.channel, None
        try:
            call = self._call(forwarding)
            for response in call:
                if response.has_error():
                    self._release(forwarding)
                    channel.pass_on(response.error())
                    continue
                outputs: Outputs = {one.name(): one.as_numpy() for one in response.output_tensors()}
                if "error" in outputs:
                    self._release(forwarding)
                    code, *_, message = read_texts(outputs, "error")
                    channel.fail_with(code, message)
                elif outputs:
                    last = _FINAL_MARK in outputs
                    if last:
                        self._release(forwarding)
                    channel.send(to_classic(outputs, forwarding.forward), final=last)
            if not forwarding.is_done:
                channel.fail_with("INTERNAL", f"{_LLM_MODEL} sent no end")
        except Exception as error:
            channel.fail_with("INTERNAL", one_line(error) or repr(error))
        finally:
            self._release(forwarding)
            self._calls.keep(call)

    def _release(self, forwarding: _Forwarding) -> None:
        """Its place is free again; the second time nothing happens."""
        self._watch.remove(forwarding.channel)
        with self._lock:
            forwarding.is_done = True
            self._live.discard(forwarding)

    def _list_live(self) -> list[_Forwarding]:
        with self._lock:
            return list(self._live)

    def _call(self, forwarding: _Forwarding) -> Any:
        forward = forwarding.forward
        return self._utils.InferenceRequest(
            request_id=forwarding.inner_id,
            model_name=_LLM_MODEL,
            inputs=[self._utils.Tensor(name, one) for name, one in forward.tensors.items()],
            requested_output_names=[*forward.output_names, "error"],
            parameters={
                **forward.parameters,
                "timeout_us": forward.timeout_us,
                "errors_as_output": True,
                # A call without a response yet holds one of the Python backend's threads, of which
                # there are 32: with none left, Triton server hands this model nothing, stops and
                # requests to refuse included.
                "acknowledge": True,
            },
        ).exec(decoupled=True)

    def _stop_cancelled(self) -> None:
        """Names all that are cancelled to the other model, until each of them has ended.

        Once is not enough, since a request may arrive there after its stop. One call serves all:
        many at once are what Triton server 2.51 bears least.
        """
        while not self._closing.wait(_STOP_AGAIN_S):
            if inner_ids := [one.inner_id for one in self._list_live() if one.is_cancelled]:
                with suppress(Exception):  # it is sent again, while there is a request to stop
                    self._send_stop(inner_ids)

    def _send_stop(self, inner_ids: list[str]) -> None:
        inputs = {"text_input": as_strings([""]), "stop": np.array([True])}
        stop = self._utils.InferenceRequest(
            model_name=_LLM_MODEL,
            inputs=[self._utils.Tensor(name, one) for name, one in inputs.items()],
            requested_output_names=["text_output"],
            parameters={STOP_IDS: " ".join(inner_ids)},
        )
        for _ in stop.exec(decoupled=True):
            pass
