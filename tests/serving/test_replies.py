"""Messages: merged while one is under way, in order, ended once, and never asked about later."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_trt.decoding import Generator, Request, TokenEvent
from dflash_trt.decoding.jobs import Failure, Job, Outcome
from dflash_trt.errors import DflashError
from dflash_trt.serving.server.generation import Generation, StreamingText
from dflash_trt.serving.server.llm_model import CompilingQueue
from dflash_trt.serving.server.replies import CancellationWatch, Channel, Outputs, Reply
from dflash_trt.text.grammar import Follower, Grammar
from dflash_trt.text.sandbox import SandboxLostError
from tests.standins.executor import FakeExecutor
from tests.waiting import PATIENCE_S, wait_until

FINAL = 1
UTILS = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    Tensor=lambda name, values: (name, values),
    InferenceResponse=lambda tensors=(), error=None: dict(tensors) if error is None else error,
    TritonError=SimpleNamespace(),
)


class Sender:
    """Triton server's end of a channel: crashes, as it does, when asked after the end."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []
        self.cancelled = False
        self.questions = 0
        self.gate = threading.Event()
        self.gate.set()

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.gate.wait()
        self._check()
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        self._check()
        self.questions += 1
        return self.cancelled

    def _check(self) -> None:
        assert not self.sent or self.sent[-1][1] != FINAL, "used after its end"


def make_channel(sender: Sender) -> Channel:
    names = ("text_output", "output_ids", "num_verify_steps")
    request = SimpleNamespace(
        get_response_sender=lambda: sender,
        requested_output_names=lambda: names,
        parameters=lambda: "",
    )
    return Channel(UTILS, request)


def make_events() -> list[TokenEvent]:
    engine = Generator(FakeExecutor())
    engine.submit(Request(prompt_ids=(1, 2), max_tokens=20))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert len(events) > 4
    return events


def make_reply(
    sender: Sender, pool: ThreadPoolExecutor, mode: StreamingText, streaming: bool
) -> tuple[Reply, threading.Event]:
    """A reply, and whether its last message has been sent, which must be once."""
    generation = Generation(
        request=Request(prompt_ids=(1,)),
        grammar=None,
        streaming_text=mode,
        lead="> ",
        wanted=frozenset(["streaming"] if streaming else []),
    )
    sent = threading.Event()

    def on_sent(last: TokenEvent | Failure) -> None:
        assert not sent.is_set()
        sent.set()

    return Reply(make_channel(sender), generation, pool, 0, on_sent), sent


def ids(outputs: Outputs) -> list[int]:
    return list(np.asarray(outputs["output_ids"]).tolist())


@pytest.mark.parametrize("mode", ["cumulative", "delta"])
@pytest.mark.parametrize("streaming", [True, False])
def test_messages_add_up_and_are_merged(mode: StreamingText, streaming: bool) -> None:
    events, sender, pool = make_events(), Sender(), ThreadPoolExecutor(2)
    reply, sent = make_reply(sender, pool, mode, streaming)
    sender.gate.clear()
    for event in events:
        reply.take(event)
    sender.gate.set()
    assert sent.wait(PATIENCE_S)
    pool.shutdown()
    assert [flags for _, flags in sender.sent] == [0] * (len(sender.sent) - 1) + [FINAL]
    assert len(sender.sent) <= 2  # one was under way while the others came
    everything = [one for event in events for one in event.token_ids]
    if mode == "delta":
        assert [one for outputs, _ in sender.sent for one in ids(outputs)] == everything
    else:
        assert ids(sender.sent[-1][0]) == everything
    assert sender.sent[0][0]["text_output"].tolist()[0].startswith(b"> ")
    assert "num_verify_steps" in sender.sent[-1][0]


def test_a_channel_is_not_asked_after_its_end() -> None:
    watch = CancellationWatch()
    senders = [Sender() for _ in range(10)]
    channels = [make_channel(sender) for sender in senders]
    gone: list[int] = []
    for number, channel in enumerate(channels):
        watch.add(channel, lambda number=number: gone.append(number))  # type: ignore[misc]
    senders[3].cancelled = True
    wait_until(lambda: bool(gone) and all(sender.questions for sender in senders))
    for channel in channels:
        channel.end()
        channel.end()
        assert not channel.is_cancelled()
    time.sleep(0.02)  # the watch goes on asking, of channels that know better
    watch.close()
    assert gone == [3] and all(len(sender.sent) == 1 for sender in senders)


class _Compiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = self.compiled = 0

    def find(self, grammar: Grammar) -> Follower | None:
        return None

    def compile(self, grammar: Grammar) -> Follower:
        self.asked += 1
        assert self.go.wait(PATIENCE_S)
        self.compiled += 1
        if grammar.text == "lost":
            raise SandboxLostError("it was killed, twice")
        raise DflashError("is none", where="grammar", usage=True)


def test_what_waits_for_its_grammar() -> None:
    """No more than may wait; who has gone or is late is not compiled for; the end ends all."""
    heard: list[tuple[str, TokenEvent | Failure]] = []
    ran: list[Job] = []

    def job(name: str, **more: Any) -> Job:
        def hear(event: TokenEvent | Failure) -> None:
            heard.append((name, event))

        return Job(request=Request(prompt_ids=(1,)), listener=hear, **more)

    compiler, usable = _Compiler(), list[bool]()
    worker: Any = SimpleNamespace(submit=ran.append, check=lambda one: None)
    metrics: Any = SimpleNamespace(record_grammar=usable.append)
    queue = CompilingQueue(compiler, 4, worker, metrics)  # type: ignore[arg-type]
    gone, late = job("gone"), job("late", deadline=0.0)
    queue.submit(job("first"), Grammar("regex", "a"))
    wait_until(lambda: compiler.asked == 1)
    for one, text in ((gone, "b"), (late, "c"), (job("lost"), "lost"), (job("last"), "d")):
        queue.submit(one, Grammar("regex", text))
    queue.submit(job("more"), Grammar("regex", "e"))
    gone.cancelled = True
    compiler.go.set()
    wait_until(lambda: len(heard) == 4)
    assert ran == [gone, late] and compiler.compiled == 3
    outcomes = {name: one.outcome for name, one in heard if isinstance(one, Failure)}
    assert outcomes == {
        "more": Outcome.OVERFLOW,
        "first": Outcome.REFUSED,
        "lost": Outcome.FAILED,
        "last": Outcome.REFUSED,
    }
    assert usable == [False, False, False]
    queue.close()
