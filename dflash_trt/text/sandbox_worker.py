"""The process of a sandbox: does jobs of one kind within the limits of each.

Reads jobs from stdin, a line of JSON each and the bytes that it announces, and writes a line with
the answer. Imports nothing of the project: it starts quickly, and foreign code has little to find.
"""

from __future__ import annotations

import json
import math
import resource
import runpy
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

Json = dict[str, Any]


class SandboxJob(NamedTuple):
    """A kind of job: `answer(job, payload, held)`; `load(job, payload)` makes what is held."""

    answer: Callable[[Json, bytes, Any], Json]
    load: Callable[[Json, bytes], Any] | None = None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    held: list[Any] = []
    try:
        work = _KINDS[sys.argv[1]]()
    except ImportError as error:
        _say({"error": f"its process lacks a package: {error}"})
        return
    for line in iter(sys.stdin.buffer.readline, b""):
        job = json.loads(line)
        payload = sys.stdin.buffer.read(job["payload_bytes"])
        resource.setrlimit(resource.RLIMIT_AS, (job["max_bytes"], job["max_bytes"]))
        seconds = math.ceil(time.process_time()) + job["max_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            _say(_do(work, job, payload, held))
        except MemoryError:
            _say({"error": f"needs more than {job['max_bytes'] >> 20} MiB"})
        except BaseException as error:
            # A panic in Rust is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            _say({"error": str(error)})


def _do(work: SandboxJob, job: Json, payload: bytes, held: list[Any]) -> Json:
    """{"absent": true} where nothing is held: the process that held it has ended."""
    if work.load is None:
        return work.answer(job, payload, None)
    if job["loads"]:
        held[:] = [work.load(job, payload)]
        return {}
    return work.answer(job, payload, held[0]) if held else {"absent": True}


def _say(answer: Json) -> None:
    print(json.dumps(answer), flush=True)


def _template_work() -> SandboxJob:
    """{"text": …} of a conversation; the helpers are what published templates call."""
    from jinja2 import Template, TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: object) -> NoReturn:
        raise TemplateError(f"refuses the conversation: {message}")

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    @lru_cache(maxsize=1)
    def compile_template(source: str) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(source)

    def answer(job: Json, payload: bytes, held: Any) -> Json:
        pieces: list[str] = []
        room: int = job["max_characters"]
        try:
            for piece in compile_template(job["template"]).generate(**job["variables"]):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    return {"error": f"renders more than {job['max_characters']:,} characters"}
        except MemoryError:
            raise
        except Exception as error:
            if type(error) is TemplateError:  # raise_exception's own words
                raise
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return {"text": "".join(pieces)}

    return SandboxJob(answer)


def _encoding_work() -> SandboxJob:
    from tokenizers import Tokenizer

    def load(job: Json, payload: bytes) -> Any:
        tokenizer = Tokenizer.from_buffer(payload)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def answer(job: Json, payload: bytes, held: Any) -> Json:
        text = payload.decode("utf-8", "surrogatepass")
        return {"ids": list(held.encode(text, add_special_tokens=job["special"]).ids)}

    return SandboxJob(answer, load)


def _script_work(name: str) -> SandboxJob:
    names = runpy.run_path(str(Path(__file__).with_name(name)))
    return SandboxJob(names["answer"], names.get("load"))


_KINDS: dict[str, Callable[[], SandboxJob]] = {
    "template": _template_work,
    "encoding": _encoding_work,
    "tokenizer": lambda: _script_work("sandbox_tokenizer.py"),
    "grammar": lambda: _script_work("sandbox_grammar.py"),
}

if __name__ == "__main__":
    main()
