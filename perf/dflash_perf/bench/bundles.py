"""For benchmarks of a bundle: its prompts as requests, and a closed loop that decodes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.errors import DflashError
from dflash_trt.runtime import Generator, Request, SamplingParams
from dflash_trt.text.prompts import encode_prompts, read_prompts


def open_dflash(bundle: Path, others: str) -> Bundle:
    """Opens a bundle whose draft is DFlash; DflashError (usage) for one whose `others`."""
    opened = open_bundle(bundle)
    kind = opened.manifest.draft.kind
    if kind != "DFlash":
        what = f"has a {kind} draft, whose {others}"
        raise DflashError(what, where=bundle, fix="take a DFlash draft", usage=True)
    return opened


def prompt_file(bundle: Bundle) -> Path:
    """The file of prompts in the bundle.

    Raises:
        DflashError: it has none.
    """
    if bundle.prompts is None:
        raise DflashError("came without prompts", where=bundle.folder, usage=True)
    return bundle.prompts


def rendered_prompts(bundle: Bundle, folder: Path) -> Path:
    """The bundle's prompts as a Triton server takes them, which reads a text as it is: rendered
    into a file in `folder` where the bundle has a chat template."""
    file = prompt_file(bundle).resolve()
    tokenizer = load_tokenizer(bundle)
    if tokenizer.chat_template is None:
        return file
    rendered = folder / "prompts.jsonl"
    sent = tokenizer.render_chats(read_prompts(file))
    lines = (json.dumps({"prompt": text}) + "\n" for text in sent)
    rendered.write_text("".join(lines), encoding="utf-8")
    return rendered


def requests_of(bundle: Bundle, max_tokens: int, temperature: float = 0.0) -> list[Request]:
    """A request for each of the bundle's prompts, through its chat template where it has one."""
    texts = read_prompts(prompt_file(bundle))
    return [
        Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed, ids in enumerate(encode_prompts(load_tokenizer(bundle), texts, raw=False))
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
