"""tokenizer.json, tokenizer_config.json and chat_template.jinja of a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, first_few
from dflash_trt.importing.header import GgufFile
from dflash_trt.importing.vocabulary import FOREIGN_FIX, Vocabulary
from dflash_trt.text.tokenizer_calls import open_tokenizer

_NAMES_SHOWN = 3
_BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


def tokenizer_files(file: GgufFile, vocabulary: Vocabulary, max_positions: int) -> dict[str, str]:
    """Texts by file name.

    Raises:
        DflashError: the tokenizers library refuses them, or gives a token another id.
    """
    files = {
        "tokenizer.json": _tokenizer_json(file, vocabulary),
        "tokenizer_config.json": _settings(vocabulary, max_positions),
    }
    if vocabulary.template is not None:
        files["chat_template.jinja"] = vocabulary.template
    return files


def special_ids(vocabulary: Vocabulary) -> dict[str, int | list[int] | None]:
    """The keys of config.json that name ids: null says that there is none.

    For a key that is absent transformers takes an id of its own choice.
    """
    ends = vocabulary.special.ends
    return {
        "bos_token_id": vocabulary.special.bos,
        "eos_token_id": (list(ends) if len(ends) > 1 else ends[0]) if ends else None,
        "pad_token_id": vocabulary.special.padding,
    }


def _settings(vocabulary: Vocabulary, max_positions: int) -> str:
    texts, special = _texts(vocabulary), vocabulary.special
    named = {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "unk_token": special.unknown,
        "pad_token": special.padding,
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        **{key: texts[index] for key, index in named.items() if index in texts},
    }
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _tokenizer_json(file: GgufFile, vocabulary: Vocabulary) -> str:
    """tokenizer.json as the library writes what it has read."""
    texts, pre = _texts(vocabulary), vocabulary.pre
    steps = list(pre.steps)
    added = [
        _added_token(index, texts[index], is_special=is_special)
        for ids, is_special in ((vocabulary.control, True), (vocabulary.user_defined, False))
        for index in ids
    ]
    core = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(vocabulary, texts),
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary.ids,
            "merges": vocabulary.merges,
        },
    }
    try:
        tokenizer = open_tokenizer(json.dumps(core).encode(), file.path)
    except DflashError as error:
        what = f"its tokenizer cannot be made: {error.what}"
        raise file.error(what, FOREIGN_FIX) from error
    moved = [text for text, index in vocabulary.ids.items() if tokenizer.token_to_id(text) != index]
    if moved:
        shown = first_few([quoted(text) for text in moved], _NAMES_SHOWN)
        raise file.error(f"tokens would get other ids: {shown}", FOREIGN_FIX)
    return str(tokenizer.to_str(pretty=False))


def _texts(vocabulary: Vocabulary) -> Mapping[int | None, str]:
    """Tokens in use, by id."""
    return {index: text for text, index in vocabulary.ids.items()}


def _added_token(index: int, text: str, *, is_special: bool) -> dict[str, Any]:
    """A token that is found in a text before anything is cut."""
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, **off, "special": is_special}


def _post_processor(vocabulary: Vocabulary, texts: Mapping[int | None, str]) -> dict[str, Any]:
    """Puts the vocabulary's prefix before a text and its suffix behind it."""
    around = {texts[one]: one for one in (vocabulary.prefix, vocabulary.suffix) if one in texts}

    def special(index: int | None, type_id: int) -> list[Any]:
        token = {"SpecialToken": {"id": texts.get(index), "type_id": type_id}}
        return [token] if index in texts else []

    def template(*sequences: str) -> list[Any]:
        return [
            piece
            for type_id, sequence in enumerate(sequences)
            for piece in (
                *special(vocabulary.prefix, type_id),
                {"Sequence": {"id": sequence, "type_id": type_id}},
                *special(vocabulary.suffix, type_id),
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
