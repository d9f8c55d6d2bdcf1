"""Prompts: text given or read from a file, whole or as JSON lines; and their token ids."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer

MAX_PROMPT_FILE_BYTES = 256 << 20


def read_prompts(path: Path) -> list[str]:
    """The prompts in `path`: of a `.jsonl` each line's "prompt", else the file as one prompt.

    A plain file loses one trailing newline, the one that editors add.

    Raises:
        DflashError: unreadable, not UTF-8, a line that is not an object with a "prompt" text,
            or no prompt at all.
    """
    try:
        size = path.stat().st_size
        if size > MAX_PROMPT_FILE_BYTES:
            raise DflashError(f"has {size:,} bytes, more than prompts can be", where=path)
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise DflashError(what, where=path, usage=True) from error
    except UnicodeDecodeError as error:
        raise DflashError(f"is not UTF-8 at byte {error.start}", where=path, usage=True) from error
    if path.suffix == ".jsonl":
        prompts = [
            _read_line(line, f"{path}:{number}")
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
    else:
        prompts = [text.removesuffix("\n")] if text else []
    if not prompts:
        raise DflashError("holds no prompt", where=path, usage=True)
    return prompts


def read_texts(
    prompt: str | None, prompt_file: Path | None, default_file: Path | None = None
) -> list[str]:
    """The prompts asked for, as text.

    Raises:
        DflashError: both or neither given, an empty prompt, a file that cannot be used.
    """
    if prompt is not None and prompt_file is not None:
        raise DflashError("give --prompt or --prompt-file, not both", usage=True)
    file = prompt_file or (default_file if prompt is None else None)
    if file is not None:
        texts = read_prompts(file)
    elif prompt is not None:
        texts = [prompt]
    else:
        raise DflashError("no prompt", fix="pass --prompt TEXT or --prompt-file FILE", usage=True)
    for number, text in enumerate(texts, start=1):
        problem = _find_problem(text)
        if problem is not None:
            where = f"{file}, prompt {number}" if file else "--prompt"
            raise DflashError(problem, where=where, usage=True)
    return texts


def encode_prompts(tokenizer: BundleTokenizer, texts: list[str], *, raw: bool) -> list[list[int]]:
    """Token ids of prompts, through the chat template where there is one and not `raw`."""
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
    return encode_prompts(BundleTokenizer(folder), read_texts(None, file), raw=False)


def _read_line(line: str, where: str) -> str:
    try:
        record = parse_json(line.encode(), where)
    except DflashError as error:
        raise DflashError(error.what, where=where, usage=True) from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise DflashError('must be an object with a text "prompt"', where=where, usage=True)
    return prompt


def _find_problem(text: str) -> str | None:
    if not text:
        return "the prompt is empty; give it some text"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # A lone surrogate: bytes on the command line that are not UTF-8, or JSON's \ud800.
        return f"is not Unicode text at character {error.start}"
    return None
