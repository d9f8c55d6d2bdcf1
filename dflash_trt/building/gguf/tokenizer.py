"""tokenizer.json and what belongs to it, from the keys of a GGUF file: BPE of two kinds.

Of a byte-level one a GGUF file states no pattern by which text is cut before merging: its name
stands for one that a reader must know. Each is that of the model's own tokenizer.json, where it
differs from llama.cpp's (Qwen normalises to NFC). The other kind is SentencePiece's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.building.gguf import sentencepiece
from dflash_trt.building.gguf.config import FROM_HF
from dflash_trt.building.gguf.gguf_file import AGAIN, GgufFile
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, nearest
from dflash_trt.models.target import MAX_VOCAB
from dflash_trt.text.tokenizer import MAX_TEMPLATE_CHARACTERS
from dflash_trt.text.tokenizer_calls import LLAMA3, QWEN2, open_tokenizer

_PREFIX, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
# Kinds of tokens: llama.cpp's LLAMA_TOKEN_TYPE_*.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_KINDS = (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, 6)

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
    """A BPE vocabulary of `size` ids.

    `ids` has the tokens that are in use. `added` ids are found whole in a text, and are special
    where that is true. `special` are the ids that the file names, `ends` those of a text, a turn
    and a message. `prefix` and `suffix` are put around every text. A space comes before each where
    `has_space` is true, in a vocabulary of SentencePiece alone.
    """

    size: int
    ids: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    added: Mapping[int, bool]
    special: Mapping[str, int]
    prefix: int | None
    suffix: int | None
    pre_name: str
    template: str | None
    has_space: bool

    @property
    def texts(self) -> dict[int | None, str]:
        """Tokens in use, by id."""
        return {index: text for text, index in self.ids.items()}

    @property
    def ends(self) -> tuple[int, ...]:
        named = (self.special.get(one) for one in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(one for one in named if one is not None))

    def special_ids(self) -> dict[str, int | list[int] | None]:
        """The keys of config.json that name ids: for an absent one transformers takes its own."""
        ends = self.ends
        return {
            "bos_token_id": self.special.get("bos"),
            "eos_token_id": (list(ends) if len(ends) > 1 else ends[0]) if ends else None,
            "pad_token_id": self.special.get("padding"),
        }


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Reads the vocabulary of `file`.

    Raises:
        DflashError: it is BPE of neither kind, its pre-tokenizer is not known, or tokens, merges,
            scores and ids do not fit together.
    """
    model, pre_name = file.single(f"{_PREFIX}model"), file.single(f"{_PREFIX}pre", "default")
    is_scored = model == "llama"
    if model != "gpt2" and not is_scored:
        what = f"its tokenizer is {quoted(model)}; only byte-level BPE (gpt2) is imported, and"
        raise file.error(f"{what} SentencePiece's (llama)", FROM_HF)
    if is_scored:
        pre_name = sentencepiece.NAME
    elif not isinstance(pre_name, str) or pre_name not in _STEPS:
        hint = nearest(str(pre_name), sorted(_STEPS))
        what = f"pre-tokenizer {quoted(pre_name)} is not known{hint}"
        raise file.error(what, f"convert the model again with a newer llama.cpp, or {FROM_HF}")
    tokens = _texts(file, "tokens")
    kinds = file.fields.get(f"{_PREFIX}token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or not set(kinds) <= set(_KINDS):
        what = f"{_PREFIX}token_type must have one of {_KINDS} for each of {len(tokens)} tokens"
        raise file.error(what, AGAIN)
    used = [index for index, kind in enumerate(kinds) if kind != _UNUSED]
    ids = {tokens[index]: index for index in used}
    if len(ids) < len(used):
        twice = next(tokens[index] for index in used if ids[tokens[index]] != index)
        raise file.error(f"token {quoted(twice)} is given twice", FROM_HF)
    if is_scored:
        pieces = {text: index for text, index in ids.items() if kinds[index] == _NORMAL}
        unused = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _UNUSED]
        scores = sentencepiece.read_scores(file, len(tokens))
        merges = sentencepiece.merges_by_score(file, pieces, scores, unused)
    else:
        merges = _read_merges(file, ids)
    special: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        default = sentencepiece.DEFAULT_IDS.get(name) if is_scored else None
        value = file.single(key := f"{_PREFIX}{name}_token_id", default)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < len(tokens):
            raise file.error(f"{key} is {quoted(value)}, not one of {len(tokens)} tokens", AGAIN)
        special[name] = value
    template = file.single(_TEMPLATE)
    if template is not None and (
        not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARACTERS
    ):
        raise file.error(f"{_TEMPLATE} must be text of at most 1 MiB", AGAIN)
    if is_scored and template is not None:
        ends = (ids[one] for one in sentencepiece.TURN_ENDS if one in ids and one in template)
        special.setdefault("eot", next(ends, special["eos"]))
    whole = (_CONTROL, _USER_DEFINED, *([_UNKNOWN] if is_scored else []))
    return Vocabulary(
        size=len(tokens),
        ids=ids,
        merges=merges,
        added={i: kinds[i] != _USER_DEFINED for i in used if kinds[i] in whole},
        special=special,
        prefix=_around(file, "bos", special, default=is_scored or pre_name in _LLAMA),
        suffix=_around(file, "eos", special, default=False),
        pre_name=pre_name,
        template=template,
        has_space=is_scored and _flag(file, "add_space_prefix", default=True),
    )


def _read_merges(file: GgufFile, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number, text in enumerate(_texts(file, "merges")):
        # A space inside a token is written as another character: the only one parts the two.
        left, _, right = text.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            what = f"merge {number}, {quoted(text)}, does not make one token of two"
            raise file.error(what, AGAIN)
        merges.append((left, right))
    return merges


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
    try:
        core = json.dumps(_tokenizer_json(vocabulary)).encode()
        tokenizer = open_tokenizer(core, file.path)
    except DflashError as error:
        raise file.error(f"its tokenizer cannot be made: {error.what}", FROM_HF) from error
    for text, index in vocabulary.ids.items():
        if tokenizer.token_to_id(text) != index:
            raise file.error(f"token {quoted(text)} would get another id", FROM_HF)
    files = {
        "tokenizer.json": str(tokenizer.to_str(pretty=False)),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
    if vocabulary.template is not None:
        files["chat_template.jinja"] = vocabulary.template
    return files


def _texts(file: GgufFile, key: str) -> list[str]:
    value = file.fields.get(_PREFIX + key)
    texts = [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
    if not 0 < len(texts) <= MAX_VOCAB or texts != value:
        raise file.error(f"{_PREFIX}{key} must be a list of 1 to {MAX_VOCAB} texts", AGAIN)
    return texts


def _around(file: GgufFile, name: str, special: Mapping[str, int], *, default: bool) -> int | None:
    """The token that is put before or behind every text; None where none is."""
    is_added = _flag(file, key := f"add_{name}_token", default=default)
    if is_added and name not in special:
        raise file.error(f"{_PREFIX}{key} is true, and {name} is null", FROM_HF)
    return special[name] if is_added else None


def _flag(file: GgufFile, key: str, *, default: bool) -> bool:
    value = file.single(_PREFIX + key, default)
    if not isinstance(value, bool):
        raise file.error(f"{_PREFIX}{key} is {quoted(value)}, neither true nor false", FROM_HF)
    return value


def _tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    texts = vocabulary.texts
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    steps = _steps(vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": texts[index], **off, "special": bool(is_special)}
            for index, is_special in sorted(vocabulary.added.items())
        ],
        "normalizer": steps["normalizer"],
        "pre_tokenizer": steps["pre_tokenizer"],
        "post_processor": _post_processor(vocabulary, texts),
        "decoder": steps["decoder"],
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            **steps["model"],
            "vocab": vocabulary.ids,
            "merges": vocabulary.merges,
        },
    }


def _steps(vocabulary: Vocabulary) -> dict[str, Any]:
    """What a tokenizer.json says of how a text becomes tokens, and tokens a text."""
    name = vocabulary.pre_name
    if name == sentencepiece.NAME:
        unknown = vocabulary.texts.get(vocabulary.special["unknown"])
        return sentencepiece.steps(unknown, has_prefix=vocabulary.has_space)
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _STEPS[name]},
        "decoder": _DECODER,
        "model": {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name in _LLAMA,
        },
    }


def _post_processor(vocabulary: Vocabulary, texts: Mapping[int | None, str]) -> dict[str, Any]:
    """Puts the vocabulary's prefix before a text and its suffix behind it."""
    before, behind = texts.get(vocabulary.prefix), texts.get(vocabulary.suffix)

    def template(*sequences: str) -> list[Any]:
        return [
            {kind: {"id": text, "type_id": type_id}}
            for type_id, sequence in enumerate(sequences)
            for kind, text in (
                ("SpecialToken", before),
                ("Sequence", sequence),
                ("SpecialToken", behind),
            )
            if text is not None
        ]

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]}
            for text in (before, behind)
            if text is not None
        },
    }
