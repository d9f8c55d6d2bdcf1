"""The golden files, the facts that belong in them, and what differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.frozen.bundles import manifest_facts, write_bundles
from tests.frozen.graphs import graph_facts
from tests.frozen.outputs import output_facts
from tests.frozen.refusals import refusal_facts
from tests.frozen.tokens import token_facts

GOLDEN = Path(__file__).parent / "golden"
LINE = 300
_NOTHING = object()

OF_BUNDLES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "manifests": manifest_facts,
    "outputs": output_facts,
    "tokens": token_facts,
    "refusals": refusal_facts,
}


def all_facts(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each golden file's name and what the code says now; works in `folder`, which is empty."""
    yield "graphs", graph_facts(folder / "graphs")
    write_bundles(folder / "bundles")
    for name, facts in OF_BUNDLES.items():
        yield name, facts(folder / "bundles")


def read(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return facts


def write(name: str, facts: Mapping[str, Any]) -> None:
    text = "".join(_lines(facts, 0)) + "\n"
    assert json.loads(text) == facts
    (GOLDEN / f"{name}.json").write_text(text, encoding="utf-8")


def differences(want: Any, got: Any) -> list[str]:
    """One line per fact that is not as it was."""
    one, other = dict(_leaves(want)), dict(_leaves(got))
    return [
        f"{place}: {_shortened(one.get(place))} became {_shortened(other.get(place))}"
        for place in one | other
        if one.get(place, _NOTHING) != other.get(place, _NOTHING)
    ]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        where = f"{place} | {key}" if place else str(key)
        if isinstance(inner, dict | list) and inner:
            yield from _leaves(inner, where)
        else:
            yield where, inner


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LINE else f"{text[:LINE]}…"


def _lines(value: Any, depth: int) -> Iterator[str]:
    """JSON with a fact a line: what fits on one stays on one."""
    flat = json.dumps(value, ensure_ascii=False)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    is_short = (
        depth > 0 and len(flat) <= LINE and not any(isinstance(x, dict | list) for x in inner)
    )
    if not isinstance(value, dict | list) or not value or is_short:
        yield flat
        return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    yield f"{opening}\n"
    keyed = value.items() if isinstance(value, dict) else enumerate(value)
    for number, (key, one) in enumerate(keyed):
        prefix = f"{json.dumps(key, ensure_ascii=False)}: " if isinstance(value, dict) else ""
        yield " " * (depth + 1) + prefix
        yield from _lines(one, depth + 1)
        yield "\n" if number == len(value) - 1 else ",\n"
    yield " " * depth + closing
