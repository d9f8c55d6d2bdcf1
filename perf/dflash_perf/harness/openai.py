"""An OpenAI-compatible endpoint: server-sent events over HTTP."""

from __future__ import annotations

import json
import os
import time
from array import array
from typing import Any

import aiohttp

from dflash_perf.harness.records import ServerCounts, Trace
from dflash_perf.harness.sweep_config import DEFAULT_MODEL, Configuration, SweepConfig
from dflash_trt.errors import DflashError, one_line
from dflash_trt.serving.client.draft_counts import METRICS, read_answer_counts, read_metrics
from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.client.openai_chat import (
    MAX_BYTES,
    name_server,
    neutral_sampling,
    version_path,
)

_CONNECT_TIMEOUT_S = 10.0
_MAX_LINE = 1 << 24


class OpenAiEndpoint:
    """See `Endpoint`. Counts tokens by `token_ids` of the chunks if there are any, or `usage`."""

    def __init__(self, configuration: Configuration, config: SweepConfig) -> None:
        self._model = configuration.model
        self._root = configuration.url.rstrip("/").removesuffix("/v1") + "/v1"
        if "://" not in self._root:
            self._root = f"http://{self._root}"
        self._chat = configuration.kind == "chat"
        self._url = self._root + ("/chat/completions" if self._chat else "/completions")
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if configuration.api_key_env is not None:
            key = os.environ.get(configuration.api_key_env)
            if not key:
                what = f"the variable {configuration.api_key_env} is not set"
                raise DflashError(what, where=configuration.name, usage=True)
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            read_bufsize=_MAX_LINE,
        )
        self._body: dict[str, Any] = {
            "model": configuration.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": config.osl,
            "temperature": config.temperature,
            "top_p": config.top_p,
        }
        if config.top_k is not None:
            self._body["top_k"] = config.top_k
        if config.ignore_eos:
            self._body["ignore_eos"] = True
        self._body |= configuration.parameters

    async def describe(self) -> dict[str, Any]:
        try:
            async with self._session.get(f"{self._root}/models") as reply:
                body = await reply.json() if reply.ok else {}
                server, status = reply.headers.get("server", "unknown"), reply.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            what = f"no OpenAI-compatible server answers there ({one_line(error, 120)})"
            raise DflashError(what, where=self._root) from None
        if status in (401, 403):
            fix = "name the variable with its key as api_key_env, in a YAML for --config"
            raise DflashError(f"answers HTTP {status}", where=self._root, fix=fix)
        self._body = neutral_sampling(body.get("data")) | self._body
        models = [one for one in body.get("data", []) if isinstance(one, dict)]
        names = [one.get("id") for one in models]
        if len(names) == 1 and self._model == DEFAULT_MODEL:
            self._model = self._body["model"] = str(names[0])
        if names and self._model not in names:
            what = f"has no model {self._model!r}, but {', '.join(map(str, names))}"
            raise DflashError(what, where=self._root, usage=True)
        owner = str(models[0].get("owned_by") or "server") if models else server
        title = name_server(owner, await self._read_above(version_path(owner)))
        return {"server": title, "model": self._model, "parameters": {}}

    async def read_metrics(self) -> dict[str, float]:
        texts = [await self._read_above(path) for path in METRICS]
        return next(filter(None, map(read_metrics, texts)), {})

    async def _read_above(self, path: str) -> bytes:
        """What is above /v1, where not everyone has something; else nothing."""
        url, told = self._root.removesuffix("/v1") + path, bytearray()
        limit = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.get(url, timeout=limit) as reply:
                while reply.ok and (more := await reply.content.read(MAX_BYTES - len(told))):
                    told += more
                return bytes(told)
        except (aiohttp.ClientError, TimeoutError):
            return b""

    async def send(self, prompt: str, seed: int, trace: Trace, schema: str | None = None) -> None:
        asked: dict[str, Any] = {"prompt": prompt}
        if self._chat:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        if schema is not None:
            wrapped = {"name": "answer", "schema": json.loads(schema)}
            asked["response_format"] = {"type": "json_schema", "json_schema": wrapped}
        body = json.dumps({**self._body, **asked, "seed": seed}).encode()
        trace.start()
        try:
            try:
                ended = await self._stream(body, trace)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if trace.last_at is not None:
                    raise
                # llama-server closes connections that were to be kept: on a new one then.
                ended = await self._stream(body, trace)
        except (aiohttp.ClientConnectionError, ConnectionError) as error:
            raise ServedModelError(one_line(error), "unavailable", unreachable=True) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise ServedModelError(one_line(error, 200), "failed") from None
        if not ended:
            what = "the stream ended before its end"
            raise ServedModelError(what, "unavailable", unreachable=True)

    async def _stream(self, body: bytes, trace: Trace) -> bool:
        """Sends a request and reads its stream; whether that came to its end."""
        ended = False
        async with self._session.post(self._url, data=body) as reply:
            if reply.status != 200:
                text = (await reply.content.read(2000)).decode(errors="replace")
                raise ServedModelError(f"HTTP {reply.status}: {_reason(text)}", "failed")
            while line := await reply.content.readuntil(b"\n"):
                ended = self._take(line.strip(), time.perf_counter(), trace) or ended
        return ended

    async def is_alive(self) -> bool:
        try:
            await self.describe()
        except DflashError:
            return False
        return True

    async def close(self) -> None:
        await self._session.close()

    def _take(self, line: bytes, at: float, trace: Trace) -> bool:
        """Reads a line of the stream into `trace`; True if it ends the answer.

        Raises:
            ServedModelError: the line is an error.
            ValueError: it is not JSON.
        """
        data = line.removeprefix(b"data:").strip()
        if data == line:
            return False
        if data == b"[DONE]":
            return True
        chunk = json.loads(data)
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise ServedModelError(_reason(data.decode(errors="replace")), "failed")
        final = {key: chunk[key] for key in ("usage", "metrics", "timings") if chunk.get(key)}
        ended = False
        for choice in chunk.get("choices") or []:
            part = choice.get("delta") or {} if self._chat else choice
            thought = part.get("reasoning_content") or part.get("reasoning") or ""
            text = thought + (part.get("content" if self._chat else "text") or "")
            ids = choice.get("token_ids")
            reason = choice.get("finish_reason")
            final |= choice if reason else {}
            if text or ids or reason:
                packed = array("i", ids).tobytes() if ids else (b"" if trace.ids else None)
                trace.receive(at, text.encode(), packed, streaming="delta")
            if reason:
                trace.finish_reason, ended = str(reason), True
        if final:
            trace.told |= final
            trace.counts = _read_counts(trace.told)
        return ended


def _read_counts(final: dict[str, Any]) -> ServerCounts:
    """The counts in the ends of a stream: its usage, and what is told of drafts."""
    usage = usage if isinstance(usage := final.get("usage"), dict) else {}
    output = usage.get("completion_tokens")
    drafts = read_answer_counts(final, output if isinstance(output, int) else 0)
    counted = drafts if drafts is not None and drafts.drafted else None
    return ServerCounts(
        input_tokens=usage.get("prompt_tokens"),
        output_tokens=output,
        accepted_tokens=None if counted is None else int(counted.accepted),
        drafted_tokens=None if counted is None else int(counted.drafted or 0),
        verify_steps=None if drafts is None else int(drafts.steps),
    )


def _reason(text: str) -> str:
    """The message in an error body, or else the beginning of the body."""
    try:
        error = json.loads(text).get("error", text)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return one_line(text, 200)
