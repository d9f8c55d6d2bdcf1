"""The bundle's tokenizer: text to ids, and chat messages to text where it has a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.bundle.chat import render_chat
from dflash_trt.checkpoints.strict_json import read_json_object
from dflash_trt.errors import DflashError, one_line

MAX_TEMPLATE_BYTES = 1 << 20


class BundleTokenizer:
    """A `tokenizers.Tokenizer` with what the checkpoint says about special tokens and chat.

    Attributes:
        core: the tokenizer itself, for the runtime's detokenisation.
        chat_template: Jinja source, None for a base model.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self.core = Tokenizer.from_file(str(path))
        except Exception as error:
            raise DflashError(
                f"is not a readable tokenizer: {one_line(error)}", where=path
            ) from error
        config_path = folder / "tokenizer_config.json"
        self._config = read_json_object(config_path) if config_path.is_file() else {}
        self.chat_template = _read_template(folder, self._config)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds by itself."""
        return list(self.core.encode(text).ids)

    def encode_chat(self, message: str) -> list[int]:
        """Token ids of a conversation of one user message, up to where the answer begins.

        Raises:
            DflashError: there is no template, or it fails.
        """
        if self.chat_template is None:
            raise DflashError("the tokenizer has no chat template", usage=True)
        text = render_chat(
            self.chat_template,
            [{"role": "user", "content": message}],
            {key: _token_text(self._config.get(key)) for key in ("bos_token", "eos_token")},
        )
        # The template writes the special tokens itself.
        return list(self.core.encode(text, add_special_tokens=False).ids)


def load_tokenizer(bundle: Bundle) -> BundleTokenizer:
    """The bundle's tokenizer; DflashError when it was built without one."""
    folder = bundle.tokenizer_folder
    if folder is None:
        raise DflashError(
            "has no tokenizer: its target checkpoint has no tokenizer.json",
            where=bundle.folder,
            fix="add one to the checkpoint and build again",
        )
    return BundleTokenizer(folder)


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise DflashError("is larger than 1 MiB", where=path)
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str:
    """A special token as transformers writes it: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
