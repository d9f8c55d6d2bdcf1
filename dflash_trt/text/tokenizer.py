"""The bundle's tokenizer: text to ids, and chat messages to text where it has a template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.core.files import FileKind, exists, read_bytes, read_text
from dflash_trt.core.strict_json import quoted, read_json_object
from dflash_trt.errors import DflashError
from dflash_trt.text.chat import ChatRenderer
from dflash_trt.text.tokenizer_calls import (
    BoundedEncoder,
    check_tokenizer,
    encode,
    load_tokenizer,
)

MAX_TEMPLATE_CHARACTERS = 1 << 20
_DEFAULT, _TOOL_USE = "default", "tool_use"
TEMPLATE_FILES = {
    "chat_template.jinja": _DEFAULT,
    f"additional_chat_templates/{_DEFAULT}.jinja": _DEFAULT,
    f"additional_chat_templates/{_TOOL_USE}.jinja": _TOOL_USE,
}
"""Files of chat templates, by the names that choose one; a later file replaces an earlier one."""
CONFIG_NAME = "tokenizer_config.json"
OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_NAMED = (*SPECIAL_TOKENS, "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "special")


class BundleTokenizer:
    """A `tokenizers.Tokenizer` with what the checkpoint says about special tokens and chat.

    Attributes:
        core: the tokenizer itself, for the runtime's detokenisation.
        config: tokenizer_config.json, with what older files had beside it.
        chat_template: Jinja source, None for a base model.
        tool_template: Jinja source of conversations with tools, where they have their own.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        config_path = folder / CONFIG_NAME
        self.config = _read_config(folder)
        data = read_bytes(path, FileKind.TOKENIZER)
        is_known = check_tokenizer(data, path)
        self.core = load_tokenizer(data, path)
        stated = _stated_tokens(self.core, self.config, config_path)
        if stated:
            root = json.loads(data)
            own = {one["content"]: one for one in root.get("added_tokens") or ()}
            root["added_tokens"] = [*(own | {one["content"]: one for one in stated}).values()]
            data = json.dumps(root, ensure_ascii=False).encode("utf-8", "surrogatepass")
            is_known = check_tokenizer(data, path)
            self.core = load_tokenizer(data, path)
            _check_ids(self.core, stated, config_path)
        self._encoder = self.core if is_known else BoundedEncoder(data)
        templates = _read_templates(folder, self.config)
        self.chat_template, self.tool_template = map(templates.get, (_DEFAULT, _TOOL_USE))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds by itself.

        `special` False leaves those out: for text of a chat template, which writes its own.
        """
        return encode(self._encoder, text, special=special)

    def render_chats(
        self,
        messages: Sequence[str],
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """For each message, the text of a conversation that begins with it, up to the answer.

        A `system` message stands before each; `variables` are the template's own.

        Raises:
            DflashError: there is no template, or it fails.
        """
        renderer = self.open_renderer()
        if renderer is None:
            raise DflashError("the tokenizer has no chat template", usage=True)
        first = [] if system is None else [{"role": "system", "content": system}]
        with closing(renderer):
            return [
                renderer.render([*first, {"role": "user", "content": text}], variables)
                for text in messages
            ]

    def encode_chats(
        self,
        messages: Sequence[str],
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Token ids of `render_chats`; the template writes the special tokens itself."""
        texts = self.render_chats(messages, system, variables)
        return [self.encode(text, special=False) for text in texts]

    def open_renderer(self) -> ChatRenderer | None:
        """A renderer of conversations, up to the answer; None without a template."""
        if self.chat_template is None and self.tool_template is None:
            return None
        return ChatRenderer(self.chat_template, self.special_texts, self.tool_template)

    def end_ids(self, named: Sequence[int]) -> tuple[int, ...]:
        """The ids that end a text: those `named` by the model's config, then the tokenizer's own.

        A model tuned for chats may state the base model's end alone, and end its turns with the
        tokenizer's `eos_token`.
        """
        own = self.core.token_to_id(self.special_texts["eos_token"])
        return tuple(named) if own is None or own in named else (*named, own)

    @property
    def special_texts(self) -> dict[str, str]:
        """The special tokens that the config names, by its keys; empty texts for others."""
        return {key: _token_text(self.config.get(key)) for key in SPECIAL_TOKENS}


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, and where transformers reads them, the files that were before it.

    Those are special_tokens_map.json and added_tokens.json, unless it has `added_tokens_decoder`.
    """
    stated = folder / CONFIG_NAME
    config = read_json_object(stated) if exists(stated) else {}
    if "added_tokens_decoder" in config:
        return config
    older, added = (folder / name for name in OLDER_FILES)
    config |= read_json_object(older) if exists(older) else {}
    tokens = read_json_object(added) if exists(added) else {}
    # A text has no flags: tokenizer.json's own stand.
    return {**config, "added_tokens_decoder": {str(at): text for text, at in tokens.items()}}


def _stated_tokens(core: Tokenizer, config: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Added tokens that tokenizer.json lacks, or gives other flags, as it would write them.

    transformers adds them in the order of their ids, and takes the flags of `config`.
    """
    stated = config.get("added_tokens_decoder", {})
    extra = config.get("extra_special_tokens")
    named = [*map(config.get, _NAMED), *(extra if isinstance(extra, list) else ())]
    special = {*map(_token_text, named)}
    tokens: list[dict[str, Any]] = []
    known = {one.content: (at, one) for at, one in core.get_added_tokens_decoder().items()}
    for key, one in stated.items() if isinstance(stated, dict) else ():
        content = _token_text(one)
        if not content or not key.isascii() or not key.isdigit() or len(key) > 9:
            what = f"added_tokens_decoder has no token's id and content at {quoted(key)}"
            raise DflashError(what, where=path, fix="download the file again")
        given = one if isinstance(one, dict) else {}
        flags = {name: given.get(name) is True for name in _TOKEN_FLAGS}
        flags["special"] |= content in special
        flags["normalized"] = given.get("normalized", not flags["special"]) is True
        token_id, own = known.get(content, (int(key), None))
        is_same = all(getattr(own, name, None) is flag for name, flag in flags.items())
        if own is None or (given and not is_same):
            tokens.append({"id": token_id, "content": content, **flags})
    return sorted(tokens, key=itemgetter("id"))


def _check_ids(core: Tokenizer, tokens: list[dict[str, Any]], path: Path) -> None:
    for one in tokens:
        found = core.token_to_id(one["content"])
        if found != one["id"]:
            what = f"gives {quoted(one['content'])} the id {one['id']}, tokenizer.json {found}"
            fix = "they belong to different tokenizers: download both files again"
            raise DflashError(what, where=path, fix=fix)


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by their names, as transformers has them: the config's without any file."""
    paths = {folder / file: name for file, name in TEMPLATE_FILES.items()}
    given: Any = {
        name: read_text(path, FileKind.TEMPLATE) for path, name in paths.items() if exists(path)
    }
    given = given or config.get("chat_template")
    if isinstance(given, list):  # several, by name
        named = [one for one in given if isinstance(one, dict)]
        given = {
            one["name"]: one.get("template")
            for one in named
            if one.get("name") in (_DEFAULT, _TOOL_USE)
        }
    elif not isinstance(given, dict):
        given = {_DEFAULT: given}
    found = {name: one for name, one in given.items() if isinstance(one, str)}
    if any(len(one) > MAX_TEMPLATE_CHARACTERS for one in found.values()):
        raise DflashError("its chat template is longer than 1 MiB", where=folder)
    return found


def _token_text(token: Any) -> str:
    """A special token as transformers writes it: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: those that print are themselves."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    characters = {chr(byte): byte for byte in printed}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


_KNOWN_TOKENS = 1 << 16  # a reply with log-probabilities names the same ones again and again


class TokenBytes:
    """Looks tokens of `tokenizer` up, special ones included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            id_: one.content for id_, one in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = tokenizer.decoder
        kinds = json.dumps(json.loads(decoder.__getstate__())) if decoder is not None else ""
        self._byte_level = _byte_characters() if '"ByteLevel"' in kinds else None
        self._fallback = '"ByteFallback"' in kinds
        self._known = lru_cache(_KNOWN_TOKENS)(self._find)

    def __getitem__(self, token_id: int) -> bytes:
        """Its bytes; none of an id that is no token's."""
        return self._known(token_id)

    def _find(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        text: str = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level is not None:
            known = self._byte_level
            return b"".join(
                bytes([known[char]]) if char in known else char.encode() for char in text
            )
        found = _BYTE_TOKEN.fullmatch(text) if self._fallback else None
        return text.replace("▁", " ").encode() if found is None else bytes.fromhex(found[1])
