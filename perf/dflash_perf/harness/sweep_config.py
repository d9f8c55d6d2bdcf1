"""The settings of a sweep, from a YAML file or the command line, with all their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash_trt.core.validation import validate
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.errors import DflashError
from dflash_trt.text.hub_prompts import is_hub_address
from dflash_trt.text.task_sets import check_set_name

Kind = Literal["llm-api", "completions", "chat"]
Count = Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Value = bool | int | float | str
Text = Annotated[str, Field(min_length=1, max_length=4096)]

DEFAULT_MODEL = "tensorrt_llm"
MAX_CONCURRENCY = 4096
# A request's seed is (seed << 20) + index, which must stay an integer that JSON readers keep.
MAX_SEED = 1 << 32

REQUESTS_PER_STREAM = 10


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Configuration(_Settings):
    """One served model with one set of request parameters.

    Args:
        name: its name in results and reports.
        kind: `llm-api` (a Triton server's LLM-API contract, over gRPC), `completions` or `chat`
            (OpenAI).
        url: host:port of gRPC, or the base URL of /v1.
        model: the served model's name; an OpenAI endpoint that lists one model needs none.
        inputs: more input tensors of every request (llm-api), by the model's names.
        parameters: more request parameters (llm-api) or body fields (OpenAI) of every request.
        gpus: how many it runs on; if given, throughput is per GPU, else per server.
        hardware: what it runs on, for the report.
        api_key_env: the environment variable with the endpoint's bearer token.
    """

    name: Annotated[str, Field(pattern=r"^[\w][\w .:,+=()-]{0,59}$")]
    kind: Kind = "llm-api"
    url: Text
    model: Text = DEFAULT_MODEL
    inputs: dict[Text, Value] = {}
    parameters: dict[Text, Value | dict[Text, Value]] = {}
    gpus: Count | None = None
    hardware: Text | None = None
    api_key_env: Text | None = None

    @model_validator(mode="after")
    def _flat_parameters(self) -> Self:
        nested = [name for name, value in self.parameters.items() if isinstance(value, dict)]
        if self.kind == "llm-api" and nested:
            raise ValueError(f"parameters: {nested[0]} is nested, which gRPC does not take")
        return self


def to_slug(name: str) -> str:
    """A configuration's name as a folder's: lower case, with hyphens for unsafe characters."""
    return re.sub(r"[^\w.+=-]+", "-", name).casefold()


class Goodput(_Settings):
    """Limits in milliseconds; a good request meets all that are given."""

    ttft: Positive | None = None
    tpot: Positive | None = None
    e2e: Positive | None = None


class SweepConfig(_Settings):
    """A sweep: every configuration at every load, `repeats` times, with the same requests.

    Args:
        configurations: what is compared; figures are relative to `baseline`.
        baseline: a configuration's name; by default the first.
        input_file: prompts, as JSON lines, each with a "prompt".
        prompts: instead, named sets of prompts: files or hub addresses by name.
        limit_prompts: only the first so many prompts, of each set.
        tokenizer: a tokenizer.json, or a folder or bundle that has one.
        isl: input tokens of every prompt, cut from the prompts' text; by default prompts are whole.
        osl: most output tokens of a request, and exactly that many with `ignore_eos`.
        concurrency: closed loop: requests in flight at any time.
        request_rate: open loop: requests per second with Poisson arrivals, answered or not.
        request_count: requests of a run; by default 10 × concurrency, 100 in an open loop.
        duration_s: send for that long instead, then wait for the requests in flight.
        warmup: unrecorded requests before a run; by default the concurrency, 4 in an open loop.
        timeout_s: a request without a final response by then has failed.
    """

    configurations: Annotated[tuple[Configuration, ...], Field(min_length=1, max_length=64)]
    baseline: str | None = None
    input_file: Text | None = None
    prompts: dict[Text, Text] = {}
    limit_prompts: Count | None = None
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
        if (self.input_file is None) != bool(self.prompts):
            raise ValueError("give prompts: an input_file or named sets, not both")
        for name in self.prompts:
            check_set_name(name, "prompts")
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
    """The load of a run: a closed loop's concurrency, or an open loop's requests/s."""

    concurrency: int | None = None
    request_rate: float | None = None

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
    """The settings in the YAML file at `path`; `given` by the command line replaces its keys.

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
        if isinstance(raw.get("prompts"), dict):
            raw["prompts"] = {
                name: _beside(path, source) for name, source in raw["prompts"].items()
            }
    # Loads of the command line replace the file's of either kind; so do request count and duration,
    # and prompts.
    for either in (
        {"concurrency", "request_rate"},
        {"request_count", "duration_s"},
        {"input_file", "prompts"},
    ):
        if either & given.keys():
            raw = {key: raw[key] for key in raw if key not in either}
    if not raw.get("configurations") and "configurations" not in given:
        what = "has no configuration" if path else "give a --config, or the --url of a server"
        raise DflashError(what, where=path or "sweep", usage=True)
    return validate(SweepConfig, {**raw, **given}, path or "sweep", usage=True)


def _beside(path: Path, source: Any) -> Any:
    """A source of prompts, relative to the file at `path`."""
    if not isinstance(source, str) or is_hub_address(source):
        return source
    return str(path.parent / source)
