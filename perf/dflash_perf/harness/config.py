"""What a sweep measures: one YAML or the command line, read here; the only place with defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dflash_trt.core.validation import validate
from dflash_trt.core.yaml_files import read_yaml

Kind = Literal["llm-api", "completions", "chat"]
Dataset = Literal["prompts", "speed-bench"]
Count = Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Value = bool | int | float | str
Text = Annotated[str, Field(min_length=1, max_length=4096)]

MAX_CONCURRENCY = 4096
# Requests get seeds of their own from it, which must stay whole numbers that JSON readers keep.
MAX_SEED = 1 << 32


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Configuration(_Settings):
    """One served model, or one way to ask it.

    Args:
        name: what figures call it.
        kind: `llm-api` (a Triton server's LLM-API contract, over gRPC), `completions` or `chat`
            (OpenAI).
        url: host:port of gRPC, or where /v1 lies.
        model: the served model's name.
        inputs: further input tensors of every request (llm-api), by the model's own names.
        parameters: further request parameters (llm-api) or body fields (OpenAI) of every request.
        gpus: how many it runs on; throughput is per GPU where this is given, else per server.
        hardware: what it runs on, for the report.
        api_key_env: the environment variable with the endpoint's bearer token.
    """

    name: Annotated[str, Field(pattern=r"^[\w][\w .,+=()-]{0,59}$")]
    kind: Kind = "llm-api"
    url: Text
    model: Text = "tensorrt_llm"
    inputs: dict[Text, Value] = {}
    parameters: dict[Text, Value] = {}
    gpus: Count | None = None
    hardware: Text | None = None
    api_key_env: Text | None = None


def to_slug(name: str) -> str:
    """A configuration's name in a path: lower case, hyphens for what a path may not like."""
    return re.sub(r"[^\w.+=-]+", "-", name).casefold()


class Goodput(_Settings):
    """Limits, in milliseconds, that a good request meets, all of them."""

    ttft: Positive | None = None
    tpot: Positive | None = None
    e2e: Positive | None = None


class SweepConfig(_Settings):
    """A sweep: every configuration at every load, `repeats` times, with the same requests.

    Args:
        configurations: what is compared; figures are relative to `baseline`.
        baseline: a configuration's name; the first one's by default.
        input_file: prompts (JSON lines, each with a "prompt"), or a local SPEED-Bench copy.
        categories: of SPEED-Bench; all by default.
        tokenizer: a tokenizer.json, or a folder or bundle that has one.
        isl: input tokens of every prompt, cut from the prompts' text; their own by default.
        osl: most output tokens of a request, and exactly that many with `ignore_eos`.
        concurrency: closed loop: so many requests at any time.
        request_rate: open loop: requests per second, at Poisson arrivals, whatever completes.
        request_count: requests of a run; by default 10 × concurrency, and 100 of an open loop.
        duration_s: send for so long instead, then wait for what is under way.
        warmup: requests before a run that count for nothing; by default one per open stream.
        timeout_s: a request without a final response after that has failed.
    """

    configurations: Annotated[tuple[Configuration, ...], Field(min_length=1, max_length=64)]
    baseline: str | None = None
    input_file: Text
    dataset: Dataset = "prompts"
    categories: tuple[Text, ...] = ()
    tokenizer: Text | None = None
    isl: Count | None = None
    osl: Count = 128
    ignore_eos: bool = False
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED, strict=True)] = 0
    concurrency: tuple[Annotated[int, Field(ge=1, le=MAX_CONCURRENCY, strict=True)], ...] = ()
    request_rate: tuple[Positive, ...] = ()
    request_count: Count | None = None
    duration_s: Positive | None = None
    warmup: Annotated[int, Field(ge=0, le=1 << 20, strict=True)] | None = None
    repeats: Count = 3
    goodput: Goodput = Goodput()
    timeout_s: Positive = 600.0

    @model_validator(mode="before")
    @classmethod
    def _default_load(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and not raw.get("concurrency") and not raw.get("request_rate"):
            return {**raw, "concurrency": (1, 2, 4, 8, 16)}
        return raw

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [configuration.name for configuration in self.configurations]
        folders: set[str] = set()
        for name in names:
            if (slug := to_slug(name)) in folders:
                raise ValueError(f"{name!r} and another configuration are both {slug!r}")
            folders.add(slug)
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is no configuration's name")
        if len({configuration.gpus is None for configuration in self.configurations}) > 1:
            raise ValueError("give gpus for all configurations, or for none")
        for one in self.configurations:
            if one.inputs and one.kind != "llm-api":
                raise ValueError(f"{one.name}: inputs belong to kind llm-api; use parameters")
        if self.request_count is not None and self.duration_s is not None:
            raise ValueError("give request_count or duration_s, not both")
        if self.isl is not None and self.tokenizer is None:
            raise ValueError("isl needs a tokenizer to count with")
        if self.categories and self.dataset != "speed-bench":
            raise ValueError("categories belong to dataset speed-bench")
        return self

    @property
    def baseline_name(self) -> str:
        return self.baseline or self.configurations[0].name

    @property
    def loads(self) -> tuple[OfferedLoad, ...]:
        """Closed loops, then open ones, each once and from light to heavy."""
        return (
            *(OfferedLoad(concurrency=count) for count in sorted(set(self.concurrency))),
            *(OfferedLoad(request_rate=rate) for rate in sorted(set(self.request_rate))),
        )


class OfferedLoad(_Settings):
    """How hard a run presses: a closed loop's concurrency, or an open loop's requests/s."""

    concurrency: int | None = None
    request_rate: float | None = None

    @model_serializer(mode="wrap")
    def _leave_out(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None}

    @property
    def label(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return f"{self.request_rate:g} requests/s"

    @property
    def slug(self) -> str:
        """Its name in a path."""
        return f"c{self.concurrency}" if self.concurrency else f"rate-{self.request_rate:g}"

    @property
    def order(self) -> tuple[bool, float]:
        """Sorts closed loops before open ones, light before heavy."""
        return self.concurrency is None, self.concurrency or self.request_rate or 0.0


def read_sweep_config(path: Path | None, given: dict[str, Any]) -> SweepConfig:
    """The sweep in the YAML at `path`, with what the command line gave in place of its keys.

    Paths in the file are relative to it.

    Raises:
        DflashError: unreadable, an unknown key (with the nearest), a wrong value (usage).
    """
    raw: dict[str, Any] = {}
    if path is not None:
        raw = read_yaml(path)
        for key in ("input_file", "tokenizer"):
            if isinstance(raw.get(key), str):
                raw[key] = str(path.parent / raw[key])
    # One kind of load replaces the other: a list on the command line is the whole list.
    for either in ({"concurrency", "request_rate"}, {"request_count", "duration_s"}):
        if either & given.keys():
            raw = {key: raw[key] for key in raw if key not in either}
    return validate(SweepConfig, {**raw, **given}, path or "sweep", usage=True)
