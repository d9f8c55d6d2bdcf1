"""Files of prompts, and texts on the command line."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.hostile.case import THREAD, Command, HostileCase
from tests.hostile.values import TEXTS, encode, odd_value, spoil, spoil_json

COUNT = 100
_GENERATE = ("generate", "bundle", "--max-tokens", "2", *THREAD)
_VERIFY = ("verify", "bundle", "--max-tokens", "2", "--repeats", "0", "--batch", "1", *THREAD)
_LINE = b'{"prompt": "cab"}\n'


def make(random: Random, number: int) -> HostileCase:
    """JSON lines, a plain file, or an option's text."""
    way = random.randrange(4)
    if way == 3:
        text = random.choice([one for one in TEXTS if "\0" not in one])
        option = random.choice(("--prompt", "--stop", "--system", "--prompts", "--prompt-file"))
        base = _VERIFY if option == "--prompts" else _GENERATE
        more = () if option in ("--prompt", "--prompts", "--prompt-file") else ("--prompt", "cab")
        command: Command = (*base, option, text, *more)
        return HostileCase(f"{option} {text[:20]!a}", ("bundle",), lambda folder: None, (command,))
    name = "p.txt" if way == 2 else "p.jsonl"
    command = random.choice(
        (
            (*_GENERATE, "--prompt-file", name),
            (*_GENERATE, "--json", "--prompt-file", name),
            (*_VERIFY, "--prompts", f"own={name}"),
        )
    )

    def damage(folder: Path) -> None:
        path = folder / name
        if way == 0:
            lines = [_LINE] * random.choice((0, 1, 3))
            lines.insert(random.randrange(len(lines) + 1), spoil_json(random, _LINE))
            path.write_bytes(b"".join(lines))
        elif way == 1:
            record = {"prompt": random.choice((*TEXTS, odd_value(random))), "answer": None}
            record |= {random.choice(("answer", "category", "x")): odd_value(random)}
            path.write_bytes(encode(record) + b"\n" + _LINE * random.choice((0, 20)))
        else:
            raw = (b"\xff\xfe", b"\0" * 100, b"x" * 100_000, b"\xed\xa0\x80", b"\r\n" * 50, b"")
            path.write_bytes(random.choice((*raw, spoil(random, _LINE), random.randbytes(300))))

    return HostileCase(f"prompts in {name}, way {way}", ("bundle",), damage, (command,))
