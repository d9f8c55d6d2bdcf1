"""Benchmarks of a bundle: its prompts, and requests of them."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.bundle.bundle import Bundle, load_tokenizer
from dflash_trt.errors import DflashError
from dflash_trt.runtime import Request, SamplingParams
from dflash_trt.text.prompts import read_prompts


def prompt_file(bundle: Bundle) -> Path:
    """The prompts that came with the bundle.

    Raises:
        DflashError: none did.
    """
    if bundle.prompts is None:
        raise DflashError("came without prompts", where=bundle.folder, usage=True)
    return bundle.prompts


def requests_of(
    bundle: Bundle, max_tokens: int, temperature: float = 0.0, prompts: Path | None = None
) -> list[Request]:
    """A request for each of the `prompts`, or of the bundle's own."""
    encode = load_tokenizer(bundle).encode
    return [
        Request(
            prompt_ids=tuple(encode(text)),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed, text in enumerate(read_prompts(prompts or prompt_file(bundle)))
    ]
