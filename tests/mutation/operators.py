"""What can be made wrong in a statement: every kind, and every expression it applies to."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

from tests.mutation.mutants import head, text_of

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum"}
OPPOSITES |= {"maximum": "minimum", "zeros": "ones", "popleft": "pop"}
# Conversions: without them Python itself complains, or nothing changes.
CONVERSIONS = frozenset(
    "str int float bool len Path tuple list set dict iter enumerate type".split()
)
# What words an error or tells of progress; what it says is not what the mutants are about.
TALK = re.compile(r"(Error|warn|warning|echo|print|log|debug|info|report|advance|cast|TypeVar)$")
TALK_KEYWORDS = frozenset("where fix usage help what description message doc reason".split())
SILENT_STATEMENTS = (
    ast.Raise | ast.Import | ast.ImportFrom | ast.Assert | ast.Pass | ast.Global | ast.Nonlocal
    | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Try | ast.Match | ast.Delete
)  # fmt: skip


def mutations(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Every (kind, text) that can take the statement's place."""
    if isinstance(statement, SILENT_STATEMENTS):
        return
    original = head(statement)
    before = text_of(original)
    for kind, changed in _dropped(original):
        yield kind, changed
    for index, node in enumerate(_expressions(original)):
        for kind, replacement in _replacements(node):
            copied = copy.deepcopy(original)
            target = list(_expressions(copied))[index]
            changed = text_of(_Replace(target, replacement).visit(copied))
            if changed != before:
                yield kind, changed


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_talk(call: ast.Call) -> bool:
    return TALK.search(_name(call)) is not None


def _dropped(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """The statement left out, where that leaves the names it needs."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        if not _is_talk(statement.value):
            yield "dropped call", "pass"
    elif isinstance(statement, ast.AugAssign):
        yield "dropped statement", "pass"
    elif isinstance(statement, ast.Break):
        yield "swapped keyword", "continue"
    elif isinstance(statement, ast.Continue):
        yield "swapped keyword", "break"


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions whose value matters, in a fixed order."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.JoinedStr | ast.arguments):
            return
        if isinstance(node, ast.Call) and _is_talk(node):
            return
        if isinstance(node, ast.keyword) and node.arg in TALK_KEYWORDS:
            return
        yield node
        for field, value in ast.iter_fields(node):
            if field == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child)

    yield from walk(statement)


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=[operator]):
            changed = copy.copy(node)
            changed.ops = [COMPARISONS[type(operator)]()]
            yield "flipped comparison", changed
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and for or", ast.BoolOp(other, node.values)
            yield "dropped condition", node.values[0]
            yield "dropped condition", node.values[-1]
        case ast.UnaryOp(op=ast.Not()):
            yield "negated condition", node.operand
        case ast.If() | ast.While() | ast.IfExp():
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            if not isinstance(node.test, ast.Compare | ast.UnaryOp):
                yield "negated condition", changed
        case ast.comprehension(ifs=[_, *_]):
            changed = copy.copy(node)
            changed.ifs = []
            yield "dropped condition", changed
        case ast.BinOp():
            yield from _arithmetic(node)
        case ast.Constant(value=bool()):
            yield "changed constant", ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield "off by one", ast.Constant(node.value + 1)
            if node.value > 1:
                yield "changed constant", ast.Constant(node.value * 2)
        case ast.Constant(value=float()):
            yield "changed constant", ast.Constant(node.value * 2 if node.value else 1.0)
        case ast.Slice():
            yield from _slices(node)
        case ast.Call():
            yield from _calls(node)


def _arithmetic(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    other = OPERATORS.get(type(node.op))
    if other is not None:
        yield "changed operator", ast.BinOp(node.left, other(), node.right)
    if isinstance(node.op, ast.Mult | ast.Div):
        yield "ignored scale", node.left
    if isinstance(node.op, ast.Mult):
        yield "ignored scale", node.right
    if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.MatMult | ast.Mod):
        yield "swapped arguments", ast.BinOp(node.right, node.op, node.left)
    if isinstance(node.op, ast.Add | ast.Sub):
        yield "ignored term", node.left


def _slices(node: ast.Slice) -> Iterator[tuple[str, ast.AST]]:
    one = ast.Constant(1)
    if node.upper is not None and not isinstance(node.upper, ast.Constant):
        yield "off by one", ast.Slice(node.lower, ast.BinOp(node.upper, ast.Sub(), one), node.step)
    if node.lower is not None and not isinstance(node.lower, ast.Constant):
        yield "off by one", ast.Slice(ast.BinOp(node.lower, ast.Add(), one), node.upper, node.step)


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    positional = node.args
    if any(isinstance(argument, ast.Starred) for argument in positional):
        return
    name = _name(node)
    if name == "range":
        bound = ast.BinOp(positional[-1], ast.Sub(), ast.Constant(1))
        yield "off by one", ast.Call(node.func, [*positional[:-1], bound], node.keywords)
    elif name in OPPOSITES:
        function: ast.expr = ast.Name(OPPOSITES[name])
        if isinstance(node.func, ast.Attribute):
            function = ast.Attribute(node.func.value, OPPOSITES[name])
        yield "opposite function", ast.Call(function, positional, node.keywords)
    elif len(positional) == 1 and not node.keywords and name not in CONVERSIONS:
        yield "dropped call", positional[0]
    for index in range(len(positional) - 1):
        if name in OPPOSITES or name in CONVERSIONS or name == "isinstance":
            break
        swapped = list(positional)
        swapped[index : index + 2] = reversed(positional[index : index + 2])
        yield "swapped arguments", ast.Call(node.func, swapped, node.keywords)
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in TALK_KEYWORDS:
            left = [*node.keywords[:index], *node.keywords[index + 1 :]]
            yield "dropped argument", ast.Call(node.func, positional, left)


class _Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, target: ast.AST, replacement: ast.AST) -> None:
        self._target = target
        self._replacement = replacement

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._target:
            return self._replacement
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.AST)
        return visited
