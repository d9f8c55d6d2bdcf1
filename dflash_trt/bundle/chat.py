"""Chat templates, run as the untrusted code they are."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_trt.errors import DflashError, one_line

MAX_RENDERED_CHARACTERS = 4 << 20


def render_chat(
    template: str, messages: list[dict[str, str]], special_tokens: dict[str, str]
) -> str:
    """Renders `messages` (role, content) with a checkpoint's Jinja template.

    The environment is sandboxed and immutable; output beyond MAX_RENDERED_CHARACTERS is
    refused as it is produced. The helpers are the ones that published templates call.

    Raises:
        DflashError: the template fails, or refuses the messages.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        pieces: list[str] = []
        size = 0
        for piece in environment.from_string(template).generate(
            messages=messages, add_generation_prompt=True, **special_tokens
        ):
            size += len(piece)
            if size > MAX_RENDERED_CHARACTERS:
                raise DflashError(f"renders more than {MAX_RENDERED_CHARACTERS:,} characters")
            pieces.append(piece)
        return "".join(pieces)
    except DflashError as error:
        raise DflashError(error.what, where="chat template") from error
    except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise DflashError(one_line(error), where="chat template") from error


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(message: str) -> NoReturn:
    raise DflashError(f"refuses the conversation: {one_line(message)}")
