"""Values, bytes, templates and tokenizers that nobody expects, of a seeded generator."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 63, 64, 65, 299, 300, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1.5, 1e-300, 5e-324, 1e300, 1.7e308, float("nan"), float("inf")),
)
TEXTS: tuple[str, ...] = (
    *("", " ", "\0", "a\nb", "\x1b[31mred", "\u202eabc", "\ud800", "\ufeff", "🙂" * 50),
    *("A" * 5000, "../../outside/x", "/dev/zero", "/proc/self/environ", "a" * 300 + "/b"),
    *("{{7*7}}", "%s%s%n", "__import__('os').system('id')", "nan", "1e999", "-1", "[", "null"),
)
NAMES = ("__class__", "__proto__", "", "a.b", "torch_dtype", "auto_map", "_name_or_path")


def odd_value(random: Random, depth: int = 2) -> Any:
    """Any value of JSON, and NaN and infinities, which Python writes into it."""
    kind = random.randrange(7 if depth else 5)
    if kind == 0:
        return random.choice((None, True, False))
    if kind <= 2:
        return random.choice(NUMBERS)
    if kind == 3:
        return random.choice(TEXTS)
    if kind == 4:
        return random.choice(([], {}, [[]], [None], "x"))
    inner = [odd_value(random, depth - 1) for _ in range(random.randrange(4))]
    return inner if kind == 5 else {random.choice((*NAMES, "a")): one for one in inner}


def changed(random: Random, document: Any, keys: Sequence[str] = ()) -> Any:
    """A copy of a JSON document with one to three places changed; `keys` may be added."""
    root = [copy.deepcopy(document)]
    for _ in range(random.choice((1, 1, 2, 3))):
        places = _places(root)
        container, key = random.choice(places)
        value = container[key]
        way = random.randrange(9)
        if way == 0 and isinstance(container, dict):
            del container[key]
        elif way == 1 and isinstance(value, dict):
            value[random.choice((*keys, *NAMES))] = odd_value(random)
        elif way == 3:
            other, name = random.choice(places)
            container[key] = copy.deepcopy(other[name])
        elif way == 4 and isinstance(value, int | float):
            container[key] = random.choice((-value, value + 1, value - 1, value * 2, str(value)))
        else:
            container[key] = odd_value(random)
    if keys and isinstance(root[0], dict) and random.random() < 0.6:
        root[0][random.choice(keys)] = odd_value(random)
    return root[0]


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Where each value of a document lies: its container, and its key there."""
    found: list[tuple[Any, Any]] = []
    todo: list[Any] = [root]
    while todo:
        inner = todo.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            found.append((inner, key))
            if isinstance(inner[key], dict | list):
                todo.append(inner[key])
    return found[1:] if len(found) > 1 else found


def encode(document: Any) -> bytes:
    """JSON as Python writes it; a lone surrogate stays one."""
    return json.dumps(document).encode()


def spoil_json(random: Random, data: bytes) -> bytes:
    """The text of a JSON object, spoiled beyond its values."""
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: data[: random.randrange(len(data) + 1)],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data + random.choice((b"x", b"\0", b"{}", b"\n" * 1000, data)),
        lambda: b"[" * random.choice((99, 1000, 100_000)),
        lambda: b'{"a":' * random.choice((99, 101, 5000)) + b"1" + b"}" * 5000,
        lambda: data.replace(b":", b": 1" + b"0" * 5000 + b" ,", 1),
        lambda: data.replace(b"{", b'{"x": ' + b"9" * 4400 + b", ", 1),
        lambda: data.replace(b"{", b'{"x": [' + b"[]," * 2_100_000 + b"1], ", 1),
        lambda: data.replace(b"{", b"{" + b"".join(b'"k%d":1,' % n for n in range(100_000)), 1),
        lambda: data.replace(b"{", b'{"x": "' + b"y" * (17 << 20) + b'", ', 1),
        lambda: data.decode("utf-8", "replace").encode(random.choice(("utf-16", "utf-32"))),
        lambda: data.replace(b'"', b"'"),
        lambda: data.replace(b"{", b"{" + data.strip()[1:-1] + b",", 1),
        lambda: b"" if random.random() < 0.5 else b" " * 4096,
        lambda: spoil(random, data),
    )
    return random.choice(ways)()


def spoil(random: Random, data: bytes) -> bytes:
    """Bytes with a few of them flipped, cut, doubled, put elsewhere or overwritten."""
    changed_data = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        size = len(changed_data)
        if not size:
            return b"\0"
        at, length = random.randrange(size), random.choice((1, 4, 8, 64, 1024))
        way = random.randrange(7)
        if way == 0:
            changed_data[at] ^= 1 << random.randrange(8)
        elif way == 1:
            changed_data[at : at + length] = bytes(min(length, size - at))
        elif way == 2:
            changed_data[at : at + length] = b"\xff" * min(length, size - at)
        elif way == 3:
            del changed_data[at : at + length]
        elif way == 4:
            changed_data[at:at] = changed_data[at : at + length]
        elif way == 5:
            changed_data[at:at] = random.randbytes(length)
        else:
            del changed_data[at:]
    return bytes(changed_data)


_TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ('{a.__class__}'|attr('format_map'))({'a': 1}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ messages.clear() }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{{ 'a' * 10**9 }}",
    "{{ 'a\\n'|indent(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ range(10**8)|list }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ 'ab'|replace('', 'x' * 10**7) }}",
    "{{ raise_exception('x' * 100000) }}",
    "{{ raise_exception('a\\nerror: b\\x1b[31m') }}",
    "{{ undefined.a.b }}",
    "{{ strftime_now('%' * 5000) }}",
    "{% for m in messages %}",
    "{{ '\\ud800' }}",
    "{{ messages|tojson(indent=10**7) }}",
    "{{ 'a'|nothing }}",
    "{{ " + "(" * 5000 + "1 }}",
    "{% if 1 %}" * 5000,
)
_PATTERNS = (
    *("(a+)+$", "(a|a)*!", "(\\w+\\s?)*Z", "(?:a|ab)+{2,}\\d{9}", "(.+?)*\\1", "(?=a)*", "(?R)"),
    *("(", "[", "\\", "a{99999999}", "(?<n>a)\\k<m>", "\\g<0>", "\0", "🙂{0,100000}$"),
)


def draw_template(random: Random) -> str:
    """A chat template that does harm, or fails; some begin with what works."""
    good = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    if random.random() < 0.1:
        return spoil(random, good.encode()).decode("utf-8", "replace")
    return random.choice(("", good)) + random.choice(_TEMPLATES)


def spoil_tokenizer(random: Random, document: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json with other steps, vocabularies, merges, added tokens or settings."""
    model, way = document["model"], random.randrange(6)
    if way <= 1:
        for part in random.sample(("normalizer", "pre_tokenizer", "decoder"), 2):
            document[part] = _step(random)
    elif way == 2:
        for token in random.sample(sorted(model["vocab"]), random.choice((1, 3, 200))):
            model["vocab"][token] = random.choice((-1, 2**31, 2**32 - 1, 2**40, 1.5, 0, "1", None))
    elif way == 3:
        added = {"content": random.choice((*TEXTS, " ", "a")), "special": True}
        added |= {"id": random.choice(NUMBERS), "normalized": False, "lstrip": True}
        document["added_tokens"] += [added] * random.choice((1, 1, 5000))
    elif way == 4:
        document["truncation"] = {"max_length": random.choice(NUMBERS), "stride": 2**31}
        document["padding"] = {"strategy": {"Fixed": random.choice((10**9, 2**63, 4))}}
    else:
        return dict(changed(random, document, ("decoder", "unk_token", "byte_fallback")) or {})
    return document


def _step(random: Random) -> Any:
    """A step of any kind, right or wrong in its place, with odd arguments."""
    pattern, numbers = {"Regex": random.choice(_PATTERNS)}, random.sample(NUMBERS, 2)
    steps: tuple[Any, ...] = (
        {"type": "Replace", "pattern": pattern, "content": random.choice(("", "a" * 900, "\0"))},
        {"type": "Split", "pattern": pattern, "behavior": "Isolated"},
        {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAA="},
        {"type": "Prepend", "prepend": "a" * 50},
        {"type": "Strip", "content": "a", "start": numbers[0], "stop": numbers[1]},
        {"type": "Metaspace", "replacement": random.choice(("", "ab", "\u2581")), "split": 1},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 10_000},
        *(None, {}, [], {"type": None}, {"type": "Unknown"}),
    )
    return random.choice(steps)
