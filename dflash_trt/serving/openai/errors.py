"""Errors in the form that OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

from dflash_trt.core.limits import TOO_LONG
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.errors import Problem, ServedModelError
from dflash_trt.text.sandbox import SandboxLostError

_UNAVAILABLE = (503, "unavailable")
# Status and code by whose fault an error of the served model is.
_ANSWERS: dict[Problem, tuple[int, str | None]] = {
    "refused": (400, None),
    "unavailable": _UNAVAILABLE,
    "overdue": (504, "timeout"),
}
_FAILED = (500, "failed")
TOO_LONG_CODE = "context_length_exceeded"
RETRY_AFTER_S = 1


class ApiError(DflashError):
    """An error as an answer of HTTP `status`: `param` is at fault, `code` OpenAI's name of it."""

    def __init__(
        self, what: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(what, where=param)
        self.status, self.param = status, param
        self.code = "invalid_value" if code is None and param and status == 400 else code

    @property
    def headers(self) -> dict[str, str]:
        """When to come back, where coming back helps; what to show, where a key is missing."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status == 504:  # else OpenAI's clients ask twice more, for as long each time
            return {"x-should-retry": "false"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    def to_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def to_response(self) -> dict[str, Any]:
        """The arguments of its JSONResponse."""
        return {"content": self.to_json(), "status_code": self.status, "headers": self.headers}


def as_api_error(error: Exception) -> ApiError:
    """Any error as an answer, without the server's address."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SandboxLostError):
        status, code = _UNAVAILABLE
        return ApiError(error.what, status=status, code=code)
    if isinstance(error, ServedModelError):
        status, told = _ANSWERS.get(error.problem, _FAILED)
        if error.problem == "refused" and TOO_LONG in error.what:
            told = TOO_LONG_CODE
        return ApiError(error.what, status=status, code=told)
    if not isinstance(error, DflashError):
        return ApiError("internal error", status=500)
    # Its `fix` speaks to who runs the server.
    return ApiError(error.what if error.where is None else f"{error.where}: {error.what}")
