"""Chat templates, run as the untrusted code they are: sandboxed, in a process with limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_trt.errors import DflashError, one_line

MAX_RENDERED_CHARACTERS = 4 << 20
MAX_WORKER_BYTES = 512 << 20
MAX_WORKER_SECONDS = 10

Message = Mapping[str, str]


def render_chats(
    template: str, conversations: Sequence[Sequence[Message]], special_tokens: Mapping[str, str]
) -> list[str]:
    """Renders each conversation (messages of role and content) with a Jinja template.

    jinja2's sandbox keeps a template from reaching Python objects, but not from looping or
    allocating without end; so it runs in a worker with bounded memory, time and output.

    Raises:
        DflashError: the template fails, exceeds a limit, or refuses a conversation.
    """
    job = {
        "template": template,
        "conversations": conversations,
        # Defined and empty, as transformers does it.
        "variables": {
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **special_tokens,
        },
        "max_characters": MAX_RENDERED_CHARACTERS,
        "max_bytes": MAX_WORKER_BYTES,
        "max_seconds": MAX_WORKER_SECONDS,
    }
    worker = Path(__file__).with_name("chat_worker.py")
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(worker)],
            input=json.dumps(job).encode(),
            capture_output=True,
            # The worker bounds its processor time itself; this is for a machine that is busy.
            timeout=6 * MAX_WORKER_SECONDS,
            check=False,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        answer = {}
    except ValueError as error:
        raise _failed("its worker gave no answer") from error
    if "texts" in answer:
        texts: list[str] = answer["texts"]
        return texts
    raise _failed(
        answer.get("error")
        or f"takes more than {MAX_WORKER_SECONDS} s or {MAX_WORKER_BYTES >> 20} MiB"
    )


def _failed(what: str) -> DflashError:
    return DflashError(
        one_line(what), where="chat template", fix="--raw sends the prompt without it"
    )
