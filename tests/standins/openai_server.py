"""An OpenAI-compatible server of invented answers that speaks as vLLM, SGLang and others do.

Streams come a chunk a verify step, metrics have the names of the sources that
`dflash_trt.serving.client.draft_counts` gives. What is wrong with it a test says.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEPS = (3, 1, 4, 2)
"""Tokens of the verify steps, over and over; τ is 2.5."""
WORDS = [f" w{number}" for number in range(50)]
DRAFTS = 3
BROKEN = ("early", "silent", "endless", "wordless")


@dataclass
class InventedServer:
    """Answers follow from the prompt and the settings.

    Args:
        owner: whose names it has: vllm, sglang, llamacpp or tensorrt_llm.
        changed: the position of another token, by prompt; its log-probability is `gap` lower.
        own_noise: how far log-probabilities are off every second time that a prompt comes.
        forgetful: every second time it has another token at its tenth place.
        tells: False: no metrics, and no counts in answers. `logprobs`, `ids`: whether it has them.
        strict: refuses fields that OpenAI does not have, as TensorRT-LLM does.
        counts: False: a SGLang without its counter. whole: streams come in one piece.
        seeded: answers follow from the seed too. thinks: they are reasoning, told twice.
        strange: top_logprobs are no lists, and texts end with half a character.
        trouble: html, failing, empty, early, silent, endless or wordless.
        chat_steps: tokens of the steps of chats.
    """

    owner: str = "vllm"
    changed: dict[str, int] = field(default_factory=dict)
    gap: float = 2.0
    own_noise: float = 0.0
    forgetful: bool = False
    tells: bool = True
    logprobs: bool = True
    ids: bool = True
    strict: bool = False
    counts: bool = True
    whole: bool = False
    seeded: bool = False
    thinks: bool = False
    strange: bool = False
    trouble: str = ""
    chat_steps: tuple[int, ...] = STEPS
    model: str = "Qwen/Qwen3-8B"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    steps: int = 0
    accepted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def metrics(self) -> str:
        names = {"vllm": "vllm:", "llamacpp": "llamacpp:", "tensorrt_llm": "trtllm_"}
        if self.owner == "sglang":
            calls = f'sglang:spec_verify_calls_total{{tp_rank="0"}} {self.steps}\n' * self.counts
            return 'sglang:spec_accept_length{tp_rank="0"} 2.5\n' + calls
        lead = names[self.owner] + "spec_decode_num"
        lines = [f"# TYPE {lead}_drafts counter", f'{lead}_drafts_total{{e="0"}} {self.steps}']
        lines += [f'{lead}_draft_tokens_total{{e="0"}} {DRAFTS * self.steps}.0']
        lines += [f'{lead}_accepted_tokens_total{{e="0"}} {self.accepted}']
        at = [1.0, 0.75, 0.5]  # of a step of three tokens two drafts are accepted, and so on
        lead += "_accepted_tokens_per_pos_total"
        lines += [f'{lead}{{position="{i}"}} {self.steps * one}' for i, one in enumerate(at)]
        return "\n".join(lines) + "\n"

    def answer(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer."""
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else str(body["prompt"])
        with self.lock:
            odd = self.asked.count(prompt) % 2 == 1
            self.bodies.append(body)
            self.asked.append(prompt)
        key = f"{prompt} {body['seed']}" if self.seeded else prompt
        ids = [random.Random(f"{key} {at}").randrange(40) for at in range(body["max_tokens"])]
        rivals = [one + 5 for one in ids]
        lows = [self.own_noise * odd] * len(ids)
        place = self.changed.get(prompt, 10 if self.forgetful and odd else None)
        if place is not None:
            ids[place], rivals[place] = rivals[place], ids[place]
        at, steps, sizes = 0, 0, [1, *(self.chat_steps if is_chat else STEPS) * 200]
        for size in [len(ids)] if self.whole else sizes:
            new = range(at, min(at + size, len(ids)))
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            text = "".join(WORDS[ids[one]] for one in new)
            text += "\ud83d" * (self.strange and new.stop == len(ids))
            names = ("reasoning", "reasoning_content") if self.thinks else ("content",)
            choice |= {"delta": dict.fromkeys(names, text)} if is_chat else {"text": text}
            if self.logprobs and body.get("logprobs"):
                told = new[: 1 if self.owner == "llamacpp" else None]  # none of accepted drafts
                pairs = [(ids[one], -0.1 - lows[one], rivals[one]) for one in told]
                choice["logprobs"] = {
                    "content": [
                        {
                            "token": WORDS[token],
                            "logprob": value,
                            "top_logprobs": 7
                            if self.strange
                            else [
                                {"token": WORDS[token], "logprob": value},
                                {"token": WORDS[other], "logprob": value - self.gap},
                            ],
                        }
                        for token, value, other in pairs
                    ]
                }
            if self.ids and body.get("return_token_ids"):
                choice["token_ids"] = [ids[one] for one in new]
            at, steps = at + len(new), steps + 1
            yield {"choices": [choice]}
            if at == len(ids):
                break
        steps = 1 + len(ids) * 2 // 5 if self.whole else steps
        steps, accepted = steps - 1, len(ids) - 1 - (steps - 1)
        with self.lock:
            self.steps, self.accepted = self.steps + steps, self.accepted + accepted
        last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": "length"}
        event: dict[str, Any] = {"choices": [last]}
        if self.owner == "llamacpp" and self.tells:
            event["timings"] = {"draft_n": DRAFTS * steps, "draft_n_accepted": accepted}
        yield event
        prompt_tokens = len(body.get("prompt", prompt.split()))
        yield {
            "choices": [],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)},
        }


@contextmanager
def invented(server: InventedServer) -> Iterator[str]:
    """Serves it at the URL, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, text: str, kind: str = "application/json", status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            models = {"data": [{"id": server.model, "owned_by": server.owner}]}
            known = {"/v1/models": json.dumps(models), "/version": '{"version": "9.9"}'}
            known["/server_info"] = '{"version": "0.5.19"}'
            if server.tells:
                known["/metrics"] = server.metrics()
            self.reply(known.get(self.path, "{}"), status=200 if self.path in known else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if (server.strict or server.owner == "sglang") and "return_token_ids" in body:
                return self.reply('{"error": "extra inputs are not permitted"}', status=400)
            if server.trouble in ("html", "failing"):
                status = 200 if server.trouble == "html" else 500
                return self.reply("<html>busy</html>", "text/html", status)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            events = [{"choices": []}] if server.trouble == "empty" else server.answer(body)
            try:
                for number, event in enumerate(events):
                    if server.trouble in BROKEN and number == 2:
                        break
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                while server.trouble in ("silent", "endless"):
                    self.wfile.write(b": still here\n" if server.trouble == "endless" else b"")
                    self.wfile.flush()
                    time.sleep(0.02)
                if server.trouble != "early":
                    self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                pass  # the client has left

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/v1"
        finally:
            server.trouble = ""
            http.shutdown()
            thread.join()
