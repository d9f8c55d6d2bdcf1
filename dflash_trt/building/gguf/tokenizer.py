"""tokenizer.json and what belongs to it, from the keys of a GGUF file: byte-level BPE.

A GGUF file states no pattern by which text is cut before merging: its name stands for one that a
reader must know. Each is that of the model's own tokenizer.json, where it differs from llama.cpp's
(Qwen normalises to NFC).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.building.gguf.gguf_file import GgufFile
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, first_few, nearest
from dflash_trt.models.target import MAX_VOCAB
from dflash_trt.text.tokenizer import MAX_TEMPLATE_CHARACTERS
from dflash_trt.text.tokenizer_calls import LLAMA3, QWEN2, open_tokenizer

_PREFIX, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_FROM_HF = "build the model from its Hugging Face checkpoint"
_AGAIN = "download the file again"
# Kinds of tokens: llama.cpp's LLAMA_TOKEN_TYPE_*.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_KINDS = (_NORMAL, 2, _CONTROL, _USER_DEFINED, _UNUSED, 6)

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}
_DECODER = {**_GPT2, "add_prefix_space": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    rule = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [{"type": "Split", **rule}, _BYTES]


_LLAMA = ("llama-bpe", "llama3", "llama-v3")
"""These take a piece that is a token as it is, and begin every text with bos unless told."""
_STEPS: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2],
    "smollm": [_DIGITS, _GPT2],
    "qwen2": _split(QWEN2),
    **dict.fromkeys(_LLAMA, _split(LLAMA3)),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level BPE vocabulary of `size` ids.

    `ids` has the tokens that are in use. `control` ids are special tokens, `user_defined` ones
    are found whole in a text too. `special` are the ids that the file names, `ends` those of a
    text, a turn and a message. `prefix` and `suffix` are put around every text. `templates` names
    the chat templates beside the default one.
    """

    size: int
    ids: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    control: Sequence[int]
    user_defined: Sequence[int]
    special: Mapping[str, int]
    ends: tuple[int, ...]
    prefix: int | None
    suffix: int | None
    pre_name: str
    template: str | None
    templates: tuple[str, ...]

    @property
    def texts(self) -> dict[int | None, str]:
        """Tokens in use, by id."""
        return {index: text for text, index in self.ids.items()}


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Reads the vocabulary of `file`.

    Raises:
        DflashError: it is of another kind than byte-level BPE, its pre-tokenizer is not known, or
            tokens, merges and ids do not fit together.
    """
    model = file.single(f"{_PREFIX}model")
    if model != "gpt2":
        what = "has no tokenizer" if model is None else f"has a {quoted(model)} tokenizer"
        raise file.error(f"{what}; only byte-level BPE (gpt2) is imported", _FROM_HF)
    pre_name = _pre_tokenizer(file)
    tokens = _texts(file, "tokens")
    kinds = _kinds(file, len(tokens))
    used = [index for index, kind in enumerate(kinds) if kind != _UNUSED]
    ids = {tokens[index]: index for index in used}
    if len(ids) < len(used):
        twice = next(tokens[index] for index in used if ids[tokens[index]] != index)
        raise file.error(f"token {quoted(twice)} is given twice", _FROM_HF)
    special = _special_ids(file, len(tokens))
    template = file.single(_TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise file.error(f"{_TEMPLATE} must be text", _AGAIN)
    if template is not None and len(template) > MAX_TEMPLATE_CHARACTERS:
        raise file.error("its chat template is longer than 1 MiB")
    named = [key.removeprefix(f"{_TEMPLATE}.") for key in file.fields]
    return Vocabulary(
        size=len(tokens),
        ids=ids,
        merges=_merges(file, ids),
        control=[index for index in used if kinds[index] == _CONTROL],
        user_defined=[index for index in used if kinds[index] == _USER_DEFINED],
        special=special,
        ends=tuple(dict.fromkeys(special[one] for one in ("eos", "eot", "eom") if one in special)),
        prefix=_added(file, "bos", special, default=pre_name in _LLAMA),
        suffix=_added(file, "eos", special, default=False),
        pre_name=pre_name,
        template=template,
        templates=tuple(sorted(set(named) - set(file.fields))),
    )


def tokenizer_files(file: GgufFile, vocabulary: Vocabulary, max_positions: int) -> dict[str, str]:
    """Makes the texts of a tokenizer, by file name.

    Raises:
        DflashError: the tokenizers library refuses them, or gives a token another id.
    """
    texts, special = vocabulary.texts, vocabulary.special
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        **{key: texts[special[one]] for key, one in named.items() if special.get(one) in texts},
    }
    files = {
        "tokenizer.json": _tokenizer_json(file, vocabulary),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
    if vocabulary.template is not None:
        files["chat_template.jinja"] = vocabulary.template
    return files


def special_ids(vocabulary: Vocabulary) -> dict[str, int | list[int] | None]:
    """Returns the keys of config.json that name ids: null says that there is none.

    For a key that is absent transformers takes an id of its own choice.
    """
    ends, special = vocabulary.ends, vocabulary.special
    return {
        "bos_token_id": special.get("bos"),
        "eos_token_id": (list(ends) if len(ends) > 1 else ends[0]) if ends else None,
        "pad_token_id": special.get("padding"),
    }


def _pre_tokenizer(file: GgufFile) -> str:
    name = file.single(f"{_PREFIX}pre", "default")
    if name == "default":
        raise file.error(
            "does not say how its tokenizer cuts text (tokenizer.ggml.pre), as old files do not",
            "convert the model again with a llama.cpp of June 2024 or later",
        )
    if not isinstance(name, str) or name not in _STEPS:
        hint = nearest(str(name), sorted(_STEPS))
        raise file.error(f"pre-tokenizer {quoted(name)} is not known{hint}", _FROM_HF)
    return name


def _texts(file: GgufFile, key: str) -> list[str]:
    value = file.fields.get(_PREFIX + key)
    if not isinstance(value, list) or not value:
        raise file.error(f"{_PREFIX}{key} must be a list of texts", _AGAIN)
    if len(value) > MAX_VOCAB:
        raise file.error(f"{_PREFIX}{key} has {len(value)} items, over {MAX_VOCAB}")
    return value


def _kinds(file: GgufFile, count: int) -> list[int]:
    """The kind of each token; all are normal where the file does not say."""
    value = file.fields.get(f"{_PREFIX}token_type", np.full(count, _NORMAL))
    kinds = value if isinstance(value, np.ndarray) else np.zeros(0)
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


def _special_ids(file: GgufFile, count: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        key = f"{_PREFIX}{name}_token_id"
        value = file.single(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise file.error(f"{key} is {quoted(value)}, not one of {count} tokens", _AGAIN)
        found[name] = value
    return found


def _added(file: GgufFile, name: str, special: Mapping[str, int], *, default: bool) -> int | None:
    """The token that is put before or behind every text; None where none is."""
    key = f"{_PREFIX}add_{name}_token"
    is_added = file.single(key, default)
    if not isinstance(is_added, bool):
        raise file.error(f"{key} is {quoted(is_added)}, not true or false", _AGAIN)
    if is_added and name not in special:
        raise file.error(f"{key} is true, and no {name} token is given", _FROM_HF)
    return special[name] if is_added else None


def _tokenizer_json(file: GgufFile, vocabulary: Vocabulary) -> str:
    """tokenizer.json as the library writes what it has read."""
    texts, name = vocabulary.texts, vocabulary.pre_name
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    control = set(vocabulary.control)
    core = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": texts[index], **off, "special": index in control}
            for index in sorted([*control, *vocabulary.user_defined])
        ],
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _STEPS[name]},
        "post_processor": _post_processor(vocabulary, texts),
        "decoder": _DECODER,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name in _LLAMA,
            "vocab": vocabulary.ids,
            "merges": vocabulary.merges,
        },
    }
    try:
        tokenizer = open_tokenizer(json.dumps(core).encode(), file.path)
    except DflashError as error:
        raise file.error(f"its tokenizer cannot be made: {error.what}", _FROM_HF) from error
    moved = [text for text, index in vocabulary.ids.items() if tokenizer.token_to_id(text) != index]
    if moved:
        shown = first_few([quoted(text) for text in moved], 3)
        raise file.error(f"tokens would get other ids: {shown}", _FROM_HF)
    return str(tokenizer.to_str(pretty=False))


def _post_processor(vocabulary: Vocabulary, texts: Mapping[int | None, str]) -> dict[str, Any]:
    """Puts the vocabulary's prefix before a text and its suffix behind it."""
    around = {texts[one]: one for one in (vocabulary.prefix, vocabulary.suffix) if one in texts}

    def token(index: int | None, type_id: int) -> list[Any]:
        return (
            [{"SpecialToken": {"id": texts[index], "type_id": type_id}}] if index in texts else []
        )

    def template(*sequences: str) -> list[Any]:
        return [
            piece
            for type_id, sequence in enumerate(sequences)
            for piece in (
                *token(vocabulary.prefix, type_id),
                {"Sequence": {"id": sequence, "type_id": type_id}},
                *token(vocabulary.suffix, type_id),
            )
        ]

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            text: {"id": text, "ids": [index], "tokens": [text]} for text, index in around.items()
        },
    }
