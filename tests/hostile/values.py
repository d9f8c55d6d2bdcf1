"""Values and bytes that nobody expects, drawn from a seeded generator."""

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
