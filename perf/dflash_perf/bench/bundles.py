"""For benchmarks of a bundle: its prompts as requests, and a closed loop that decodes them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from dflash_trt.bundle.bundle import Bundle, load_tokenizer
from dflash_trt.errors import DflashError
from dflash_trt.runtime import Generator, Request, SamplingParams
from dflash_trt.text.prompts import read_prompts


def prompt_file(bundle: Bundle) -> Path:
    """The file of prompts in the bundle.

    Raises:
        DflashError: it has none.
    """
    if bundle.prompts is None:
        raise DflashError("came without prompts", where=bundle.folder, usage=True)
    return bundle.prompts


def requests_of(bundle: Bundle, max_tokens: int, temperature: float = 0.0) -> list[Request]:
    """A request for each of the bundle's prompts."""
    encode = load_tokenizer(bundle).encode
    return [
        Request(
            prompt_ids=tuple(encode(text)),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed, text in enumerate(read_prompts(prompt_file(bundle)))
    ]


def decode_all(generator: Generator, requests: Iterable[Request], concurrency: int) -> int:
    """Decodes `requests`, `concurrency` at a time; returns the number of output tokens."""
    waiting = iter(requests)
    tokens, free = 0, concurrency
    while True:
        for request in islice(waiting, free):
            generator.submit(request)
        if not generator.has_work:
            return tokens
        events = generator.step()
        tokens += sum(len(event.token_ids) for event in events)
        free = sum(event.result is not None for event in events)
