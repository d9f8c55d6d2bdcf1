"""A mutant: one statement of the source replaced by a wrong one, and where it stands in a tree.

A mutant names its statement, or an expression in it, by its function and its syntax, not by line.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

FOLDER = Path(__file__).parent
DRAWN = FOLDER / "mutants.json"
SEEDED = FOLDER / "seeded.json"
MODULE = "<module>"
_LONG = 20
"""Characters of what is hardly found in another function by chance."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before` becomes `after` in the function `name`; both are statements or their first lines,
    or an expression and what stands in its place.

    Args:
        number: the area and the place in its drawing order, such as `graph-03`.
        file: the module's path when it was drawn.
        name: the function's qualified name, or `<module>`.
        occurrence: which of the function's equal statements is meant, from 0.
        kind: what was done to the statement.
        meant: the test that is meant to fail for it, which is tried first; None where none is.
    """

    number: str
    file: str
    name: str
    kind: str
    before: str
    after: str
    occurrence: int = 0
    meant: str | None = None

    @property
    def area(self) -> str:
        return self.number.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [start, end) of a file, and what is written over them there."""

    file: str
    name: str
    start: int
    end: int
    replacement: str


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement of a tree; `key` is equal for equal ones, `starts` are offsets of lines."""

    file: str
    name: str
    node: ast.stmt
    key: str
    starts: list[int]

    def place(self, node: ast.stmt | ast.expr, replacement: str) -> Place:
        """That of the statement or an expression in it; a compound one's ends at its body."""
        line, column = node.end_lineno, node.end_col_offset
        if body := getattr(node, "body", None) if isinstance(node, ast.stmt) else None:
            decorators = getattr(body[0], "decorator_list", [])
            line, column = min(one.lineno for one in (body[0], *decorators)), body[0].col_offset
            replacement += f"\n{' ' * column}"
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[(line or 0) - 1] + (column or 0)
        return Place(self.file, self.name, start, end, replacement)


def load_drawn() -> list[Mutant]:
    """The mutants that were drawn from the source."""
    return [Mutant(**fields) for fields in json.loads(DRAWN.read_text())]


def load_seeded() -> list[Mutant]:
    """The faults of the way to TensorRT that were chosen, not drawn; `kind` names the fault."""
    return [Mutant(**fields) for fields in json.loads(SEEDED.read_text())]


def locate(mutant: Mutant, root: Path) -> tuple[Place | None, str]:
    """Where a tree has the mutant, and how it was found; without a place it says why.

    Its own function in its own file comes first, then one of that name elsewhere, then any; these
    must be one function.
    """
    parsed = _parse(mutant.before)
    node = parsed.value if isinstance(parsed, ast.Expr) else parsed
    key, last = ast.dump(node), mutant.name.rpartition(".")[2]
    found: list[tuple[_Statement, ast.stmt | ast.expr]] = []
    for one in _statements_of(root):
        if one.key == key:
            found.append((one, one.node))
        elif isinstance(node, ast.expr) and key in one.key:
            parts = (part for part in ast.walk(head(one.node)) if isinstance(part, ast.expr))
            found += [(one, part) for part in parts if ast.dump(part) == key]
    attempts: list[tuple[str, Callable[[_Statement], bool]]] = [
        ("in its file", lambda one: (one.file, one.name) == (mutant.file, mutant.name)),
        ("in another file", lambda one: one.name.rpartition(".")[2] == last != MODULE),
        ("in another function", lambda one: len(mutant.before) >= _LONG),
    ]
    for how, holds in attempts:
        chosen = [(one, part) for one, part in found if holds(one)]
        functions = {(one.file, one.name) for one, _ in chosen}
        if len(functions) == 1 and mutant.occurrence < len(chosen):
            statement, part = chosen[mutant.occurrence]
            is_value = isinstance(part, ast.expr) and mutant.after != "pass"
            after = f"({mutant.after})" if is_value else mutant.after
            return statement.place(part, after), how
    return None, "the statement is gone" if not found else "the statement stands in several places"


def head(statement: ast.stmt) -> ast.stmt:
    """The statement without the statements inside it."""
    fields = dict(ast.iter_fields(statement))
    if "body" not in fields:
        return statement
    fields["body"] = [ast.Expr(ast.Constant(...))]
    fields.update({name: [] for name in ("orelse", "finalbody", "handlers") if name in fields})
    return type(statement)(**fields)


def _parse(text: str) -> ast.stmt:
    (statement,) = ast.parse(f"{text} ..." if text.endswith(":") else text).body
    return head(statement)


def statements(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Every statement with the qualified name of what it stands in, in source order."""

    def walk(body: list[ast.stmt], name: str) -> Iterator[tuple[str, ast.stmt]]:
        for statement in body:
            yield name, statement
            inner = name
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = statement.name if name == MODULE else f"{name}.{statement.name}"
            for field in ("body", "orelse", "finalbody"):
                yield from walk(getattr(statement, field, []), inner)
            for handler in getattr(statement, "handlers", []):
                yield from walk(handler.body, inner)
            for case in getattr(statement, "cases", []):
                yield from walk(case.body, inner)

    yield from walk(tree.body, MODULE)


@cache
def _statements_of(root: Path) -> tuple[_Statement, ...]:
    """Every simple statement and first line of a compound one in a tree's source."""
    found = []
    for path in sorted([*root.glob("dflash_trt/**/*.py"), *root.glob("plugins/**/*.py")]):
        file, source = str(path.relative_to(root)), path.read_bytes()
        starts = list(accumulate(map(len, source.splitlines(keepends=True)), initial=0))
        for name, node in statements(ast.parse(source)):
            if not isinstance(node, ast.Try | ast.Match | ast.FunctionDef | ast.ClassDef):
                found.append(_Statement(file, name, node, ast.dump(head(node)), starts))
    return tuple(found)


def apply(place: Place, root: Path) -> None:
    """Writes the wrong code over the right one."""
    path = root / place.file
    source = path.read_bytes()
    is_elif = source[place.start :].startswith(b"elif")
    replacement = f"el{place.replacement}" if is_elif else place.replacement
    changed = source[: place.start] + replacement.encode() + source[place.end :]
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
        raise ValueError(f"a mutant changes nothing of {place.file}")
    write_source(path, changed)


def write_source(path: Path, source: bytes) -> None:
    """Writes a module, and forgets its bytecode, which is told apart by whole seconds only."""
    path.write_bytes(source)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
