"""Renders a chat template in a process of its own, which chat.py starts and bounds.

Reads one JSON job from stdin, writes {"texts": […]} or {"error": "…"} to stdout. Imports
nothing of the project: it starts quickly, and a template has little to find here.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(job: dict[str, Any]) -> dict[str, Any]:
    """The job's conversations as texts; the helpers are the ones published templates call."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        template = environment.from_string(job["template"])
        texts: list[str] = []
        for messages in job["conversations"]:
            pieces: list[str] = []
            room: int = job["max_characters"]
            for piece in template.generate(messages=messages, **job["variables"]):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    return {"error": f"renders more than {job['max_characters']:,} characters"}
            texts.append("".join(pieces))
        return {"texts": texts}
    except MemoryError:
        return {"error": f"needs more than {job['max_bytes'] >> 20} MiB"}
    except Exception as error:
        if isinstance(error, TemplateError) and type(error) is TemplateError:
            return {"error": str(error)}  # raise_exception's own words
        return {"error": f"{type(error).__name__}: {error}"}


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(message: object) -> NoReturn:
    raise TemplateError(f"refuses the conversation: {message}")


def main() -> None:
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (job["max_bytes"], job["max_bytes"]))
    resource.setrlimit(resource.RLIMIT_CPU, (job["max_seconds"], job["max_seconds"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    json.dump(render(job), sys.stdout)


if __name__ == "__main__":
    main()
