"""Renders a chat template. Run by foreign_worker.py, in its limits.

Imports nothing of the project: it starts quickly, and a template has little to find here.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def answer(job: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """{"text": …} of the job's conversation; the helpers are what published templates call."""
    try:
        pieces: list[str] = []
        room: int = job["max_characters"]
        for piece in _compile(job["template"]).generate(**job["variables"]):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                return {"error": f"renders more than {job['max_characters']:,} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": f"needs more than {job['max_bytes'] >> 20} MiB"}
    except Exception as error:
        if type(error) is TemplateError:
            return {"error": str(error)}  # raise_exception's own words
        return {"error": f"{type(error).__name__}: {error}"}


@lru_cache(maxsize=1)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(message: object) -> NoReturn:
    raise TemplateError(f"refuses the conversation: {message}")
