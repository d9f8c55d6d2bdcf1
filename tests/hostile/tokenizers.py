"""Tokenizers, which are programs: steps, patterns, vocabularies and merges that do harm."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile.case import BUILD, PROMPT, HostileCase
from tests.hostile.values import NUMBERS, TEXTS, changed, encode, odd_value, spoil, spoil_json

COUNT = 180
_ATOMS = (
    "a",
    "\\w",
    "\\s",
    ".",
    "[^x]",
    "\\p{L}",
    "(?:a|a)",
    "(?:a|ab)",
    "\\d?",
    "🙂",
    "(.)",
    "(?=a)",
)
_REPEATS = ("+", "*", "{2,}", "{1,40}", "+?", "*+", "{0,100000}", "{,5}")
_ENDS = ("$", "!", "\\d{9}Z", "(?!\\S)", "\\1", "(?<=a)b", "", "\\Z")
_BROKEN = ("(", "[", "\\", "(?<n>a)\\k<m>", "a{99999999}", "(?R)", "\\g<0>", "(?i", "[[:x:]]", "\0")
_ASKED = (
    "cab",
    "a" * 2000 + "!",
    "aaaa 🙂 \u00e9\ud7ff\n\n" * 100,
    " " * 3000 + "x",
    "1" * 2000 + "Z",
)
_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TOKEN = {"content": "<x>", "lstrip": False, "special": True, "normalized": False}
_CONFIG = {"eos_token": "<end>", "bos_token": _TOKEN, "add_bos_token": True, "model_max_length": 9}


def make(random: Random, number: int) -> HostileCase:
    """tokenizer.json, or a file beside it, in ten ways; then a text that provokes is asked."""
    way = random.randrange(10)
    asked = ("--prompt", random.choice(_ASKED), "--max-tokens", "2", "--threads", "1")
    commands = (BUILD, ("generate", "out/b", *random.choice((PROMPT, asked))))

    def damage(folder: Path) -> None:
        target = folder / "pair/target"
        if way == 9:
            data = encode(changed(random, _CONFIG, ("chat_template", "tokenizer_class")))
            data = spoil_json(random, data) if random.random() < 0.4 else data
            (target / random.choice(_FILES)).write_bytes(data)
            return
        path = target / "tokenizer.json"
        path.write_bytes(_damaged(random, path.read_bytes(), way))

    about = "a file beside the tokenizer" if way == 9 else f"a tokenizer, way {way}"
    return HostileCase(about, ("pair",), damage, commands)


def _damaged(random: Random, data: bytes, way: int) -> bytes:
    document = json.loads(data)
    model = document["model"]
    if way == 0:
        return spoil_json(random, data)
    if way == 1:
        return spoil(random, data)
    if way == 2:
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if random.random() < 0.6:
                document[part] = _step(random, part, 3)
    elif way == 3:
        split = {"type": "Split", "pattern": {"Regex": _pattern(random)}, "invert": False}
        document["pre_tokenizer"] = {**split, "behavior": random.choice(("Isolated", "Removed"))}
    elif way == 4:
        for token in random.sample(sorted(model["vocab"]), random.choice((1, 3, 200))):
            model["vocab"][token] = random.choice((-1, 2**31, 2**32 - 1, 2**40, 1.5, 0, "1", None))
    elif way == 5:
        model["merges"] = random.choice(
            (["a b"], ["a  b"], [["a", "b"]], [["a"]], "x", ["a b"] * 50_000, odd_value(random))
        )
    elif way == 6:
        content = random.choice((*TEXTS, " ", "a", "c"))
        added = {**_TOKEN, "id": random.choice(NUMBERS), "content": content}
        flags = {key: random.random() < 0.5 for key in ("lstrip", "rstrip", "single_word")}
        document["added_tokens"] += [{**added, **flags}] * random.choice((1, 1, 5000))
    elif way == 7:
        document["truncation"] = {"max_length": random.choice(NUMBERS), "stride": 2**31}
        document["padding"] = {"strategy": {"Fixed": random.choice((10**9, 2**63, 4))}}
        document["post_processor"] = _processor(random)
    else:
        parts = ("normalizer", "decoder", "dropout", "unk_token", "byte_fallback", "version")
        return encode(changed(random, document, parts))
    return encode(document)


def _pattern(random: Random) -> str:
    """A regular expression; many of them backtrack, some do not compile."""
    if random.random() < 0.15:
        return random.choice(_BROKEN)
    text = ""
    for _ in range(random.choice((1, 2, 3))):
        text += random.choice(_ATOMS) + random.choice(_REPEATS)
        if random.random() < 0.5:
            text = f"({text}){random.choice(_REPEATS)}"
    return text + random.choice(_ENDS)


def _step(random: Random, part: str, depth: int) -> Any:
    """A step of any kind, right or wrong in that place, with odd arguments."""
    way = random.randrange(9 if depth else 8)
    if way == 0:
        pattern = {random.choice(("Regex", "String")): random.choice(("", "a", _pattern(random)))}
        content = random.choice(("", "aa", "a" * 900, "\0", "🙂"))
        return {"type": "Replace", "pattern": pattern, "content": content}
    if way == 1:
        length = random.choice((0, 4, 8, 2**31, 2**32 - 1))
        table = struct.pack("<I", length) + random.randbytes(random.choice((0, 4, 8, 1024)))
        return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    if way == 2:
        return {"type": random.choice(("FixedLength", "Prepend")), "length": 0, "prepend": "a" * 50}
    if way == 3:
        stop = random.choice(NUMBERS)
        return {"type": "Strip", "content": "a", "start": random.choice(NUMBERS), "stop": stop}
    if way == 4:
        return {"type": "Metaspace", "replacement": random.choice(("", "ab", "\u2581")), "split": 1}
    if way == 5:
        kind = random.choice(("WordPiece", "CTC", "BPEDecoder", "Digits", "Punctuation", "Unknown"))
        return {"type": kind, "prefix": "", "cleanup": True, "suffix": random.choice(TEXTS)}
    if way == 6:
        return random.choice(
            (None, {}, [], {"type": None}, {"type": "NFKC"}, {"type": "ByteLevel"})
        )
    if way == 7:
        return {"type": "Split", "pattern": {"Regex": _pattern(random)}, "behavior": "Isolated"}
    steps = [_step(random, part, depth - 1) for _ in range(random.choice((0, 2, 40)))]
    return {"type": "Sequence", f"{part}s".replace("pre_tokenizers", "pretokenizers"): steps}


def _processor(random: Random) -> Any:
    piece = {random.choice(("Sequence", "SpecialToken")): {"id": random.choice("AB"), "type_id": 0}}
    special = {"<x>": {"id": "<x>", "ids": [random.choice(NUMBERS)], "tokens": ["<x>"]}}
    single = [piece] * random.choice((0, 1, 2, 50_000))
    return random.choice(
        (
            {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special},
            {"type": "BertProcessing", "sep": ["x", 2**32], "cls": ["y", 0]},
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}] * 10_000},
            {"type": "RobertaProcessing", "sep": ["x", 1], "cls": ["y", 0], "trim_offsets": 3},
        )
    )
