"""A mutant: one statement of the source replaced by a wrong one, and where it stands in a tree.

A mutant names its statement by the function it stands in and by its syntax, not by line or file,
so that it survives moved files and reformatted lines.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
DRAWN = FOLDER / "mutants.json"
SUCCESSORS = FOLDER / "successors.json"
MODULE = "<module>"
# Characters of a statement that is hardly found in another function by chance.
_LONG = 20

# How many of each area's drawn mutants are kept: the first that were not discarded.
QUOTAS = {
    "graph": 7,
    "runtime": 7,
    "executors": 7,
    "serving": 7,
    "quantization": 6,
    "bundle": 6,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before` becomes `after` in the function `name`; both are statements or their first lines.

    Args:
        number: the area and the place in its drawing order, such as `graph-03`.
        file: the module's path when it was drawn.
        name: the function's qualified name, or `<module>`.
        occurrence: which of the function's equal statements is meant, from 0.
        kind: what was done to the statement.
        discarded: why the mutant is not used; None for one that is.
    """

    number: str
    file: str
    name: str
    kind: str
    before: str
    after: str
    occurrence: int = 0
    discarded: str | None = None

    @property
    def area(self) -> str:
        return self.number.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Place:
    """A statement in a file of a tree, as bytes [start, end) of the source."""

    file: str
    name: str
    start: int
    end: int
    indent: int
    is_elif: bool
    key: str


def load_drawn() -> list[Mutant]:
    return [Mutant(**fields) for fields in json.loads(DRAWN.read_text())["mutants"]]


def load_kept() -> list[Mutant]:
    """The mutants in use: each area's first that were not discarded."""
    counts = dict.fromkeys(QUOTAS, 0)
    kept = []
    for mutant in load_drawn():
        if mutant.discarded is None and counts[mutant.area] < QUOTAS[mutant.area]:
            counts[mutant.area] += 1
            kept.append(mutant)
    return kept


def successors(mutant: Mutant) -> list[Mutant]:
    """What a mutant became, the newest first, where its statement was written anew."""
    stored = (
        json.loads(SUCCESSORS.read_text()).get(mutant.number, []) if SUCCESSORS.exists() else []
    )
    changes = [{k: v for k, v in one.items() if k != "why"} for one in reversed(stored)]
    return [Mutant(**(asdict(mutant) | {"occurrence": 0} | one)) for one in changes]


def locate(mutant: Mutant, root: Path) -> tuple[Mutant, Place | None, str]:
    """The mutant, or the first of its successors, that a tree has a place for; see `find`."""
    place, how = find(mutant, root)
    for successor in successors(mutant) if place is None else []:
        place, found = find(successor, root)
        if place is not None:
            return successor, place, f"its successor {found}"
    return mutant, place, how


def head(statement: ast.stmt) -> ast.stmt:
    """The statement without the statements inside it."""
    fields = dict(ast.iter_fields(statement))
    if "body" not in fields:
        return statement
    fields["body"] = [ast.Expr(ast.Constant(...))]
    fields.update({name: [] for name in ("orelse", "finalbody", "handlers") if name in fields})
    return type(statement)(**fields)


def text_of(statement: ast.stmt) -> str:
    """The statement in one line as `Mutant.before` has it; a compound one ends with its colon."""
    text = ast.unparse(ast.fix_missing_locations(head(statement)))
    return text.removesuffix("...").rstrip() if hasattr(statement, "body") else text


def key_of(text: str) -> str:
    """What is equal for equal statements, however they are written."""
    source = f"{text} ..." if text.endswith(":") else text
    (statement,) = ast.parse(source).body
    return ast.dump(head(statement))


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


def places(root: Path, file: str) -> list[Place]:
    """Every simple statement and every first line of a compound one in a file."""
    source = (root / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for name, statement in statements(ast.parse(source)):
        if isinstance(statement, ast.Try | ast.Match | ast.FunctionDef | ast.ClassDef):
            continue
        start = starts[statement.lineno - 1] + statement.col_offset
        end = starts[(statement.end_lineno or 0) - 1] + (statement.end_col_offset or 0)
        indent = -1
        if body := getattr(statement, "body", None):
            line = min(
                [body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", []))]
            )
            indent = body[0].col_offset
            end = starts[line - 1] + indent
        is_elif = source[start:].startswith(b"elif")
        key = ast.dump(head(statement))
        found.append(Place(file, name, start, end, indent, is_elif, key))
    return found


def source_files(root: Path) -> list[str]:
    paths = [*root.glob("dflash_trt/**/*.py"), *root.glob("plugins/**/*.py")]
    return sorted(str(path.relative_to(root)) for path in paths)


def find(mutant: Mutant, root: Path) -> tuple[Place | None, str]:
    """Where the mutant's statement stands in a tree now, and how it was found or why not.

    The same file and function come first, then the function in any file, then one of the same
    last name, then any function; each of these must leave one place only. A statement as short as
    a `break` is looked for in functions of its own's name alone.
    """
    key = key_of(mutant.before)
    equal = [p for file in source_files(root) for p in places(root, file) if p.key == key]
    last = mutant.name.rpartition(".")[2]
    package = str(Path(mutant.file).parent.name)
    attempts = [
        ("in its file", lambda p: p.file == mutant.file and p.name == mutant.name),
        ("in a file of that name", lambda p: _stem(p) == _stem(mutant) and p.name == mutant.name),
        ("in another file", lambda p: p.name == mutant.name),
        ("in a function of that name", lambda p: p.name.rpartition(".")[2] == last != MODULE),
        ("in another function of its package", lambda p: f"/{package}/" in p.file),
        ("in another function", lambda p: True),
    ]
    for how, holds in attempts if len(mutant.before) >= _LONG else attempts[:4]:
        chosen = [place for place in equal if holds(place)]
        functions = {(place.file, place.name) for place in chosen}
        if len(functions) == 1 and mutant.occurrence < len(chosen):
            return chosen[mutant.occurrence], how
    return None, "the statement is gone" if not equal else "the statement stands in several places"


def _stem(placed: Place | Mutant) -> str:
    return Path(placed.file).stem


def apply(mutant: Mutant, place: Place, root: Path) -> None:
    """Writes the wrong statement over the right one."""
    path = root / place.file
    source = path.read_bytes()
    text = f"el{mutant.after}" if place.is_elif else mutant.after
    if place.indent >= 0:
        text = f"{text}\n{' ' * place.indent}"
    changed = source[: place.start] + text.encode() + source[place.end :]
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
        raise ValueError(f"{mutant.number} changes nothing")
    write_source(path, changed)


def write_source(path: Path, source: bytes) -> None:
    """Writes a module, and forgets its bytecode, which is told apart by whole seconds only."""
    path.write_bytes(source)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
