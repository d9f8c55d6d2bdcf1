"""From requests to tokens: slots, scheduler, the speculative step, sampling, statistics."""

from __future__ import annotations

from dflash_trt.decoding.generator import Generator
from dflash_trt.decoding.generator_options import GeneratorOptions
from dflash_trt.decoding.logprobs import TokenLogprob
from dflash_trt.decoding.request import (
    FinishReason,
    Request,
    RequestFailedError,
    RequestResult,
    TokenEvent,
)
from dflash_trt.decoding.statistics import RequestStatistics, TotalStatistics, total
from dflash_trt.sampling.choice import choose_tokens
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.sampling.penalties import Penalties

__all__ = [
    "FinishReason",
    "Generator",
    "GeneratorOptions",
    "Penalties",
    "Request",
    "RequestFailedError",
    "RequestResult",
    "RequestStatistics",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprob",
    "TotalStatistics",
    "choose_tokens",
    "total",
]
