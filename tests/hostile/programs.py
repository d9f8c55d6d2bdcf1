"""Chat templates and tokenizers, which are programs: they loop, allocate, and reach for Python."""

from __future__ import annotations

import base64
import struct
from random import Random
from typing import Any

from tests.hostile.values import NUMBERS, TEXTS, changed, odd_value, spoil

_GOOD = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_REACHING = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ('{a.__class__}'|attr('format_map'))({'a': 1}) }}",
    "{{ messages|attr('__class__') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{% set messages = 3 %}{{ messages.append(1) }}",
    "{{ messages.clear() }}",
)
_SLOW = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{{ (1, 2, 3)|list|batch(1)|map('list')|list }}{% for i in range(10**8) %}{% endfor %}",
)
_LARGE = (
    "{{ 'a' * 10**9 }}",
    "{{ 'a' * 5 * 10**6 }}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'a\\n'|indent(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ range(10**8)|list }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ ['a'] * 10**9 }}",
    "{{ 'ab'|replace('', 'x' * 10**7) }}",
    "{{ 'a'.encode() * 10**9 }}",
)
_FAILING = (
    "{{ raise_exception('x' * 100000) }}",
    "{{ raise_exception('a\\nerror: b\\x1b[31m') }}",
    "{{ 1 / 0 }}",
    "{{ undefined.a.b }}",
    "{{ messages[7].content }}",
    "{{ strftime_now('%' * 5000) }}",
    "{{ strftime_now('\\ud800') }}",
    "{% for m in messages %}",
    "{{",
    "{% unknown %}",
    "{% generation %}x{% endgeneration %}",
    "{{ '\\ud800' }}",
    "{{ '\\x00' }}",
    "{% if a.%}{% endif %}",
    "{{ messages|tojson(indent=10**7) }}",
    "{{ 'a'|nothing }}",
    "{% do 3 %}",
    "{% break %}",
    "{{ [].pop() }}",
    "{{ messages|sort(attribute='x')|first }}",
    "{% call f() %}{% endcall %}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{% trans %}x{% endtrans %}",
)
_DEEP = ("(", "[", "{% if 1 %}", "not ", "-", "{'a':")


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


def draw_template(random: Random) -> str:
    """A template that does harm, or fails; some begin with what works."""
    before, way = random.choice(("", _GOOD)), random.randrange(8)
    if way <= 4:
        return before + random.choice((*_SLOW, *_REACHING, *_LARGE, *_FAILING))
    if way == 5:
        mark, times = random.choice(_DEEP), random.choice((100, 5000))
        return "{{ " + mark * times + "1 }}" if "%" not in mark else mark * times
    if way == 6:
        return spoil(random, _GOOD.encode()).decode("utf-8", "replace")
    filters = ("center", "indent", "truncate", "wordwrap", "round", "batch", "slice", "int")
    odd = random.choice((*NUMBERS[:22], *map(repr, TEXTS[:6])))
    value, name = random.choice(("messages", "3.5", "''")), random.choice(filters)
    return f"{before}{{{{ {value}|{name}({odd}) }}}}"


def draw_tokenizer(random: Random, document: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json with other steps, vocabularies, merges, added tokens or settings."""
    model, way = document["model"], random.randrange(6)
    if way <= 1:
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if random.random() < 0.6:
                document[part] = _step(random, part, 3)
    elif way == 2:
        for token in random.sample(sorted(model["vocab"]), random.choice((1, 3, 200))):
            model["vocab"][token] = random.choice((-1, 2**31, 2**32 - 1, 2**40, 1.5, 0, "1", None))
        odd = (["a b"], ["a  b"], [["a"]], "x", ["a b"] * 50_000, odd_value(random))
        model["merges"] = random.choice((*odd, model["merges"]))
    elif way == 3:
        added = {"content": random.choice((*TEXTS, " ", "a")), "special": True}
        added |= {"id": random.choice(NUMBERS), "normalized": False}
        flags = {key: random.random() < 0.5 for key in ("lstrip", "rstrip", "single_word")}
        document["added_tokens"] += [{**added, **flags}] * random.choice((1, 1, 5000))
    elif way == 4:
        document["truncation"] = {"max_length": random.choice(NUMBERS), "stride": 2**31}
        document["padding"] = {"strategy": {"Fixed": random.choice((10**9, 2**63, 4))}}
        document["post_processor"] = random.choice(_PROCESSORS)
    else:
        parts = ("normalizer", "decoder", "dropout", "unk_token", "byte_fallback", "version")
        return dict(changed(random, document, parts) or {})
    return document


_PROCESSORS: tuple[Any, ...] = (
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "A"}}], "pair": []},
    {"type": "BertProcessing", "sep": ["x", 2**32], "cls": ["y", 0]},
    {"type": "Sequence", "processors": [{"type": "ByteLevel"}] * 10_000},
)


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
