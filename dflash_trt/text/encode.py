"""Prompts and calibration texts to token ids."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.errors import DflashError
from dflash_trt.text.prompts import read_texts
from dflash_trt.text.tokenizer import BundleTokenizer


def encode_prompts(
    tokenizer: BundleTokenizer,
    prompt: str | None,
    prompt_file: Path | None,
    default_file: Path | None,
    *,
    raw: bool,
) -> list[list[int]]:
    """Token ids of the prompts asked for, through the chat template where there is one.

    Raises:
        DflashError: both or neither given, an empty prompt, a file that cannot be used.
    """
    texts = read_texts(prompt, prompt_file, default_file)
    if tokenizer.chat_template is not None and not raw:
        return tokenizer.encode_chats(texts)
    return [tokenizer.encode(text) for text in texts]


def encode_calibration(folder: Path, file: Path) -> list[list[int]]:
    """Token ids of the texts in `file`, as the tokenizer of the checkpoint in `folder` reads them.

    Raises:
        DflashError: the checkpoint has no tokenizer, or a file that cannot be used.
    """
    if not (folder / "tokenizer.json").is_file():
        raise DflashError(
            "has no tokenizer.json, which calibration texts need",
            where=folder,
            fix="download the checkpoint's tokenizer",
        )
    return encode_prompts(BundleTokenizer(folder), None, file, None, raw=False)
