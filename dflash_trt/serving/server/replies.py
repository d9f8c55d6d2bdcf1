"""What a client gets: messages merged while one is under way, each sent by a thread of a pool.

A message takes about a millisecond, which the generator's thread cannot spare.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding import RequestResult, TokenEvent, TokenLogprob
from dflash_trt.decoding.jobs import Failure, Outcome
from dflash_trt.decoding.request import ORIGINS, TokenOrigin
from dflash_trt.errors import DflashError, one_line
from dflash_trt.serving.client.wire import FIGURES
from dflash_trt.serving.server.generation import SUM, TIMED, Generation
from dflash_trt.serving.server.inputs import as_strings
from dflash_trt.text.sandbox import SandboxLostError

Outputs = dict[str, npt.NDArray[Any]]

# Nanoseconds since the epoch.
TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")

# TritonError's codes. It has none for a deadline, for which Triton server says UNAVAILABLE.
ERROR_CODES = {
    Outcome.REFUSED: "INVALID_ARG",
    Outcome.OVERFLOW: "UNAVAILABLE",
    Outcome.TIMED_OUT: "UNAVAILABLE",
    Outcome.CANCELLED: "CANCELLED",
    Outcome.FAILED: "INTERNAL",
}


def as_failure(error: Exception) -> Failure:
    """How a request ends of an error: a DflashError is its own fault, unless a sandbox was lost."""
    if not isinstance(error, DflashError):
        return Failure(Outcome.FAILED, DflashError(one_line(repr(error))))
    is_lost = isinstance(error, SandboxLostError)
    return Failure(Outcome.FAILED if is_lost else Outcome.REFUSED, error)


class Channel:
    """The way back of an InferenceRequest through Triton server; any thread may use it.

    The server frees what `is_cancelled` reads when the last message is sent, and crashes when it
    is asked later: the two exclude each other. `utils` is `triton_python_backend_utils`, which only
    exists inside a server.
    """

    def __init__(self, utils: Any, request: Any) -> None:
        self._utils = utils
        self._sender = request.get_response_sender()
        self._requested = frozenset(request.requested_output_names())
        self._lock = threading.Lock()
        self._ended = False
        self.parameters: dict[str, Any] = json.loads(request.parameters() or "{}")
        wants_output = self.parameters.get("errors_as_output") in (True, "true")
        self._fails_as_output = wants_output and "error" in self._requested

    def is_cancelled(self) -> bool:
        """Whether the client has gone or closed its stream; asks the server, while it can."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def send(self, outputs: Outputs, *, final: bool) -> None:
        """Sends those of `outputs` that the client asked for."""
        tensors = [
            self._utils.Tensor(name, values)
            for name, values in outputs.items()
            if name in self._requested
        ]
        response = self._utils.InferenceResponse(tensors)
        if final:
            self.end(response)
        else:
            self._sender.send(response)

    def fail(self, failure: Failure) -> None:
        """Ends the request with an error; as an output where who asked is another Python model.

        An error on its way from one to the other is lost by Triton server 2.51 after another
        response; as the first it may take a third request along, and the server with it
        (docs/serving.md).
        """
        code, message = ERROR_CODES[failure.outcome], failure.error.message
        if self._fails_as_output:
            error = as_strings([code, failure.outcome, message])
            self.send({"text_output": as_strings([""]), "error": error}, final=True)
        else:
            self.fail_with(code, message)

    def fail_with(self, code: str, message: str) -> None:
        """Ends the request with an error of TritonError's `code`."""
        self.pass_on(self._utils.TritonError(message, getattr(self._utils.TritonError, code)))

    def pass_on(self, error: Any) -> None:
        """Ends the request with a TritonError."""
        self.end(self._utils.InferenceResponse(error=error))

    def end(self, *response: Any) -> None:
        """Ends the request, with a last message if there is one."""
        with self._lock:
            if not self._ended:
                self._ended = True
                final = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                self._sender.send(*response, flags=final)


class Reply:
    """One request's messages; `take` is its job's listener.

    Only one thread sends for a request at a time. What the generator adds meanwhile goes out in one
    message, so a server that is slow to take them delays nobody and is sent fewer. `arrived_ns` is
    since the epoch; `on_sent` is called once, after the last message, with the last event.
    """

    def __init__(
        self,
        channel: Channel,
        generation: Generation,
        pool: Executor,
        arrived_ns: int,
        on_sent: Callable[[TokenEvent | Failure], None],
    ) -> None:
        self._channel, self._generation, self._pool = channel, generation, pool
        self._arrived_ns, self._on_sent = arrived_ns, on_sent
        self._lock, self._scheduled = threading.Lock(), False
        self._pending: list[TokenEvent | Failure] = []
        self._text = generation.lead
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._origins: list[TokenOrigin] = []
        self._of_prompt: tuple[TokenLogprob, ...] | None = None
        self._sum = 0.0

    def take(self, event: TokenEvent | Failure) -> None:
        """Keeps the event and lets the pool send, if there is something to send yet."""
        with self._lock:
            self._pending.append(event)
            self._schedule()

    def send_pending(self) -> None:
        """Sends what has come so far as one message; on a thread of the pool."""
        with self._lock:
            events, self._pending = self._pending, []
        last = events[-1]
        try:
            self._send(events)
        except Exception as error:  # a client that has gone is no reason to stop serving others
            last = Failure(Outcome.FAILED, DflashError(f"the reply failed: {error}"))
        if _is_end(events[-1]):
            self._on_sent(last)
            return
        with self._lock:
            self._scheduled = False
            self._schedule()

    def _schedule(self) -> None:
        """Lets the pool send what can go out: a request that does not stream waits for its end."""
        if self._scheduled or not self._pending:
            return
        if _is_end(self._pending[-1]) or "streaming" in self._generation.wanted:
            self._scheduled = True
            self._pool.submit(self.send_pending)

    def _send(self, events: list[TokenEvent | Failure]) -> None:
        last = events[-1]
        if isinstance(last, Failure):
            self._channel.fail(last)
            return
        for event in events:
            if isinstance(event, TokenEvent):
                self._text += event.text
                self._token_ids += event.token_ids
                self._logprobs += event.logprobs
                self._origins += event.origins
                self._sum += sum(one.logprob for one in event.logprobs)
                if event.prompt_logprobs is not None:
                    self._of_prompt = event.prompt_logprobs
        if last.result is None and not self._text:
            return  # half a character, or what may become a stop string
        outputs: Outputs = {
            "text_output": as_strings([self._text]),
            "output_ids": np.array(self._token_ids, dtype=np.int32),
        }
        if self._generation.request.logprobs is not None:
            outputs |= _describe_logprobs(self._logprobs)
        if self._generation.request.origins:
            places = [ORIGINS.index(one.origin) for one in self._origins]
            outputs["origin_ids"] = np.array([one.token_id for one in self._origins], np.int32)
            outputs["origins"] = np.array(places, np.int32)
        if self._of_prompt is not None:
            # Of the first token, which nothing comes before, there is an id alone.
            columns = _describe_logprobs(self._of_prompt)
            outputs |= {f"prompt_{name}": values for name, values in columns.items()}
            first = np.array(self._generation.request.prompt_ids[:1], np.int32)
            outputs["prompt_logprob_ids"] = np.append(first, columns["logprob_ids"])
            self._of_prompt = None
        if SUM in self._generation.wanted:
            outputs["cumulative_logprob"] = np.array([self._sum], dtype=np.float32)
        if self._generation.streaming_text == "delta":
            self._text, self._token_ids, self._logprobs, self._origins = "", [], [], []
        if last.result is not None:
            outputs |= self._describe(last.result)
        self._channel.send(outputs, final=last.result is not None)

    def _describe(self, result: RequestResult) -> Outputs:
        """What only the last message has."""
        statistics, wanted = result.statistics, self._generation.wanted
        figures = {name: getattr(statistics, field) for name, field in FIGURES.items()}
        if statistics.grammar_s is not None:
            figures["grammar_us"] = round(statistics.grammar_s * 1e6)
        outputs: Outputs = {
            name: np.atleast_1d(np.array(value, dtype=np.int32))
            for name, value in figures.items()
            if value is not None
        }
        if statistics.acceptance_rate is not None:
            outputs["acceptance_rate"] = np.array([statistics.acceptance_rate], dtype=np.float32)
        if "return_finish_reason" in wanted:
            outputs["finish_reason"] = as_strings([result.finish_reason])
        if "return_stop_reason" in wanted:
            reason = "" if result.stop_reason is None else str(result.stop_reason)
            outputs["stop_reason"] = as_strings([reason])
        if TIMED in wanted:
            moments = (0.0, statistics.queue_s, statistics.time_to_first_token_s)
            for name, seconds in zip(TIMES, (*moments, statistics.end_to_end_s), strict=True):
                if seconds is not None:
                    moment = self._arrived_ns + round(seconds * 1e9)
                    outputs[name] = np.array([moment], dtype=np.int64)
        return outputs


def _is_end(event: TokenEvent | Failure) -> bool:
    return isinstance(event, Failure) or event.result is not None


def _describe_logprobs(logprobs: Sequence[TokenLogprob]) -> Outputs:
    """Columns; those of the alternatives are flat, as many for each token."""
    columns: Outputs = {
        "logprob_ids": np.array([one.token_id for one in logprobs], dtype=np.int32),
        "logprobs": np.array([one.logprob for one in logprobs], dtype=np.float64),
        "logprob_ranks": np.array([one.rank for one in logprobs], dtype=np.int32),
    }
    top_ids = [token_id for one in logprobs for token_id in one.top_ids]
    if top_ids:
        top = [value for one in logprobs for value in one.top_logprobs]
        columns["top_logprob_ids"] = np.array(top_ids, dtype=np.int32)
        columns["top_logprobs"] = np.array(top, dtype=np.float64)
    return columns


# A question takes the server about 0.15 ms, and two about one request must not come close together
# (docs/serving.md).
_ROUND_S = 0.05
_QUESTIONS = 16
_KEEP_S = 5.0


class CancellationWatch:
    """Asks for every watched channel in turn, and calls back, once, for one that was cancelled.

    With n requests, each is asked about every ceil(n / 16) rounds of 50 milliseconds and more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[Channel, Callable[[], None]] = {}
        self._closing = threading.Event()
        self._asked = Lingering()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def add(self, channel: Channel, on_cancelled: Callable[[], None]) -> None:
        with self._lock:
            self._watched[channel] = on_cancelled

    def remove(self, channel: Channel) -> None:
        """No further question is asked about `channel`; one may be under way."""
        with self._lock:
            self._watched.pop(channel, None)
        self._asked.keep(channel)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_ROUND_S):
            with self._lock:
                asked = list(islice(self._watched, _QUESTIONS))
            for channel in asked:
                self._ask(channel)

    def _ask(self, channel: Channel) -> None:
        try:
            cancelled = channel.is_cancelled()
        except Exception:  # its last message has been sent meanwhile
            cancelled = False
        with self._lock:
            on_cancelled = self._watched.pop(channel, None)
            if on_cancelled is not None and not cancelled:
                self._watched[channel] = on_cancelled  # to the end of the line
        if on_cancelled is not None and cancelled:
            on_cancelled()


class Lingering:
    """Holds objects of the Python backend for some seconds after their use has ended.

    Server and model share memory, and in Triton server 2.51 the model's side frees it while a
    thread of the server, or of the stub, may still be at it: docs/serving.md.
    What ended last is held until something else ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, object]] = deque()

    def keep(self, ended: object) -> None:
        """Holds `ended` for a while; lets go of those whose time is over."""
        now = time.monotonic()
        with self._lock:
            self._kept.append((now, ended))
            while now - self._kept[0][0] > _KEEP_S:
                self._kept.popleft()
