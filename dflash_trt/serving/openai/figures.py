"""Figures of the front itself for Prometheus, which it tells while there is no server too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

READY = "dflash_ready"
FAILURES = "dflash_server_failures_total"
ANSWERS = "dflash_http_requests_total"
FRONT_KINDS = {READY: "gauge", FAILURES: "counter", ANSWERS: "counter"}
_TEXTS = {
    READY: "1 while a request would be answered, as at /health.",
    FAILURES: "Times that the Triton server has failed.",
    ANSWERS: "Requests to the OpenAI port by path and status, none where the client left before.",
}
_PATHS = (
    *("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"),
    *("/v1/responses", "/tokenize", "/detokenize"),
)
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@dataclass(frozen=True, slots=True)
class FrontFigures:
    """Counts answers of `model`, and adds the server's own figures and how often it has failed."""

    read_server: Callable[[], bytes] = bytes
    count_failures: Callable[[], int] = lambda: 0
    model: str = ""
    _answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)

    @property
    def load(self) -> int:
        """How many requests for text are in flight."""
        return sum(self._running[path] for path in _GENERATING)

    def begin(self, path: str) -> None:
        """Counts a request that `count` follows."""
        self._running[_known(path)] += 1

    def count(self, path: str, status: int | None) -> None:
        """Counts a request that has ended."""
        known = _known(path)
        self._running[known] -= 1
        self._answers[known, "none" if status is None else str(status)] += 1

    def text(self, *, ready: bool) -> bytes:
        """All figures in Prometheus's text format, the server's after ours."""
        lines, model = [], f"model={json.dumps(self.model, ensure_ascii=False)}"
        for name, kind in FRONT_KINDS.items():
            lines += [f"# HELP {name} {_TEXTS[name]}", f"# TYPE {name} {kind}"]
            if name != ANSWERS:
                value = int(ready) if name == READY else self.count_failures()
                lines.append(f"{name}{{{model}}} {value}")
        for (path, code), count in sorted(self._answers.items()):
            lines.append(f'{ANSWERS}{{{model},path="{path}",code="{code}"}} {count}')
        return "\n".join([*lines, ""]).encode() + self.read_server()


def _known(path: str) -> str:
    return path if path in _PATHS else "other"  # clients choose paths, and no labels
