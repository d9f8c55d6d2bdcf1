"""Chat templates, run as the untrusted code they are: sandboxed, in a process with limits."""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_trt.errors import DflashError, one_line

MAX_RENDERED_CHARACTERS = 4 << 20
MAX_WORKER_BYTES = 512 << 20
MAX_WORKER_SECONDS = 10

Message = Mapping[str, str]


class ChatRenderer:
    """Renders conversations (messages of role and content) with a Jinja template.

    jinja2's sandbox does not keep a template from looping or allocating without end, so it runs in
    a worker with limits, which is kept until it ends. For one thread at a time.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = special_tokens
        self._worker: subprocess.Popen[bytes] | None = None

    def knows(self, variable: str) -> bool:
        """Whether the template uses the variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self._template) is not None

    def render(
        self, conversation: Sequence[Message], variables: Mapping[str, bool | str] | None = None
    ) -> str:
        """The conversation's text; `variables` are the template's, beside the usual ones.

        Raises:
            DflashError: the template fails, exceeds a limit, or refuses the conversation.
        """
        given = {**self._special_tokens, **(variables or {})}
        output = self._ask(_describe_job(self._template, conversation, given))
        if not output.endswith(b"\n"):
            self.close()
        return _read_answer(output)

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _ask(self, job: bytes) -> bytes:
        """The worker's line about a job; incomplete if the worker ended or hangs."""
        if self._worker is None or self._worker.poll() is not None:
            self.close()
            self._worker = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._worker.stdin is not None and self._worker.stdout is not None
        try:
            self._worker.stdin.write(job)
            self._worker.stdin.flush()
        except BrokenPipeError:
            return b""
        # It writes when it has rendered: once something is there, the rest follows. It bounds its
        # processor time itself; this timeout is for a machine that is busy.
        ready, _, _ = select.select([self._worker.stdout], [], [], 6 * MAX_WORKER_SECONDS)
        return self._worker.stdout.readline() if ready else b""


def _describe_job(
    template: str, conversation: Sequence[Message], variables: Mapping[str, bool | str]
) -> bytes:
    """A line of the worker's stdin."""
    # Defined and empty, as transformers does it.
    usual = {"add_generation_prompt": True, "tools": None, "documents": None}
    job = {
        "template": template,
        "variables": {"messages": conversation, **usual, **variables},
        "max_characters": MAX_RENDERED_CHARACTERS,
        "max_bytes": MAX_WORKER_BYTES,
        "max_seconds": MAX_WORKER_SECONDS,
    }
    return json.dumps(job).encode() + b"\n"


def _read_answer(output: bytes) -> str:
    """The text in it; DflashError when there is none."""
    try:
        answer = json.loads(output) if output else {}
    except ValueError as error:
        raise _failed("its worker gave no answer") from error
    if "text" in answer:
        text: str = answer["text"]
        return text
    limits = f"{MAX_WORKER_SECONDS} s or {MAX_WORKER_BYTES >> 20} MiB"
    raise _failed(answer.get("error") or f"takes more than {limits}")


def _failed(what: str) -> DflashError:
    return DflashError(
        one_line(what), where="chat template", fix="--raw sends the prompt without it"
    )
