"""What a GGUF file says of its tokenizer: tokens, merges, special ids, chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.target import MAX_VOCAB
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import nearest
from dflash_trt.importing.header import GgufFile
from dflash_trt.importing.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from dflash_trt.text.tokenizer import MAX_TEMPLATE_CHARACTERS

FOREIGN_FIX = "build the model from its Hugging Face checkpoint"
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_AGAIN = "download the file again"

# Kinds of tokens: llama.cpp's LLAMA_TOKEN_TYPE_*.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_KINDS = (_NORMAL, 2, _CONTROL, _USER_DEFINED, _UNUSED, 6)


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids that the file names; `ends` are those of a text, a turn and a message, without twins."""

    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level BPE vocabulary of `size` ids.

    `ids` has the tokens that are in use. `control` ids are special tokens, `user_defined` ones
    are found whole in a text too. `prefix` and `suffix` are put around every text. `templates`
    names the chat templates beside the default one.
    """

    size: int
    ids: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    control: Sequence[int]
    user_defined: Sequence[int]
    special: SpecialIds
    prefix: int | None
    suffix: int | None
    pre_name: str
    pre: PreTokenizer
    template: str | None
    templates: tuple[str, ...]


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """The vocabulary of `file`.

    Raises:
        DflashError: it is of another kind than byte-level BPE, its pre-tokenizer is not known, or
            tokens, merges and ids do not fit together.
    """
    model = file.single(f"{_PREFIX}model")
    if model != "gpt2":
        what = "has no tokenizer" if model is None else f"has a {quoted(model)} tokenizer"
        raise file.error(f"{what}; only byte-level BPE (gpt2) is imported", FOREIGN_FIX)
    pre_name, pre = _pre_tokenizer(file)
    tokens = _texts(file, "tokens")
    kinds = _kinds(file, len(tokens))
    used = [index for index, kind in enumerate(kinds) if kind != _UNUSED]
    ids = {tokens[index]: index for index in used}
    if len(ids) < len(used):
        twice = next(tokens[index] for index in used if ids[tokens[index]] != index)
        raise file.error(f"token {quoted(twice)} is given twice", FOREIGN_FIX)
    special = _special_ids(file, len(tokens))
    return Vocabulary(
        size=len(tokens),
        ids=ids,
        merges=_merges(file, ids),
        control=[index for index in used if kinds[index] == _CONTROL],
        user_defined=[index for index in used if kinds[index] == _USER_DEFINED],
        special=special,
        prefix=_added(file, "bos", special.bos, pre.adds_bos),
        suffix=_added(file, "eos", special.eos, False),
        pre_name=pre_name,
        pre=pre,
        template=_template(file),
        templates=tuple(
            sorted(
                key.removeprefix(f"{_TEMPLATE}.")
                for key in file.fields
                if key.startswith(f"{_TEMPLATE}.")
            )
        ),
    )


def _pre_tokenizer(file: GgufFile) -> tuple[str, PreTokenizer]:
    name = file.single(f"{_PREFIX}pre", "default")
    if name == "default":
        raise file.error(
            "does not say how its tokenizer cuts text (tokenizer.ggml.pre), as old files do not",
            "convert the model again with a llama.cpp of June 2024 or later",
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        hint = nearest(str(name), sorted(PRE_TOKENIZERS))
        raise file.error(f"pre-tokenizer {quoted(name)} is not known{hint}", FOREIGN_FIX)
    return name, PRE_TOKENIZERS[name]


def _texts(file: GgufFile, key: str) -> list[str]:
    value = file.fields.get(_PREFIX + key)
    if not isinstance(value, list) or not value:
        raise file.error(f"{_PREFIX}{key} must be a list of texts", _AGAIN)
    if len(value) > MAX_VOCAB:
        raise file.error(f"{_PREFIX}{key} has {len(value)} items, over {MAX_VOCAB}")
    return value


def _kinds(file: GgufFile, count: int) -> list[int]:
    """The kind of each token; all are normal where the file does not say."""
    value = file.fields.get(f"{_PREFIX}token_type")
    if value is None:
        return [_NORMAL] * count
    kinds: npt.NDArray[Any] = value if isinstance(value, np.ndarray) else np.zeros(0)
    if kinds.shape != (count,) or not np.isin(kinds, _KINDS).all():
        what = f"{_PREFIX}token_type must have one of {_KINDS} for each of {count} tokens"
        raise file.error(what, _AGAIN)
    return [int(kind) for kind in kinds]


def _merges(file: GgufFile, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number, text in enumerate(_texts(file, "merges")):
        # A space inside a token is written as another character: the only one parts the two.
        left, _, right = text.partition(" ")
        if left not in ids or right not in ids:
            raise file.error(f"merge {number} is {quoted(text)}, not two tokens", _AGAIN)
        if left + right not in ids:
            raise file.error(f"merge {number}, {quoted(text)}, makes no token", _AGAIN)
        merges.append((left, right))
    return merges


def _special_ids(file: GgufFile, count: int) -> SpecialIds:
    def read(name: str) -> int | None:
        key = f"{_PREFIX}{name}_token_id"
        value = file.single(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise file.error(f"{key} is {quoted(value)}, not one of {count} tokens", _AGAIN)
        return value

    eos = read("eos")
    ends = [one for one in (eos, read("eot"), read("eom")) if one is not None]
    unique = tuple(dict.fromkeys(ends))
    return SpecialIds(read("bos"), eos, read("unknown"), read("padding"), unique)


def _added(file: GgufFile, name: str, token: int | None, default: bool) -> int | None:
    """The token that is put before or behind every text; None where none is."""
    key = f"{_PREFIX}add_{name}_token"
    is_added = file.single(key, default)
    if not isinstance(is_added, bool):
        raise file.error(f"{key} is {quoted(is_added)}, not true or false", _AGAIN)
    if is_added and token is None:
        raise file.error(f"{key} is true, and no {name} token is given", FOREIGN_FIX)
    return token if is_added else None


def _template(file: GgufFile) -> str | None:
    template = file.single(_TEMPLATE)
    if template is None:
        return None
    if not isinstance(template, str):
        raise file.error(f"{_TEMPLATE} must be text", _AGAIN)
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise file.error("its chat template is longer than 1 MiB")
    return template
