"""Graphs that need not end are told from those that are built."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from dflash_trt.backends.onnxruntime.session import open_session
from dflash_trt.errors import DflashError
from dflash_trt.graph.ending import MAX_NODES, check_ending

_HEAD = '<ir_version: 11, opset_import: ["": 24, "own": 1]>\ng (float[N] x) => (float[N] y)\n'
_BODY = "(int64 i, bool go, float[N] a) => (bool on, float[N] b)"
_STEP = "b = Add (a, a)\non = Identity (go)"
_FUNCTION = (
    '<domain: "{domain}", opset_import: ["": 24, "own": 1]>\n{name} (x) => (y)\n{{ {body} }}\n'
)


def _function(name: str, body: str, domain: str = "own") -> str:
    return _FUNCTION.format(domain=domain, name=name, body=body)


def _loop(turns: str, step: str = _STEP) -> str:
    return f"y = Loop <body = inner {_BODY} {{ {step} }}> ({turns}, x)"


_TWICE = "".join(
    _function(f"f{depth}", f"z = own.f{depth + 1} (x)\ny = own.f{depth + 1} (z)")
    for depth in range(40)
)
_NESTED = f'c = Size (a)\nb = Loop <body = most {_BODY} {{ {_STEP} }}> (c, "", a)\n'

ENDLESS = {
    "by a number": ("n = Constant <value_int = 9> ()\n" + _loop('n, ""'), "", "a loop"),
    "by nothing": (_loop('"", ""'), "", "a loop"),
    "inside another": (
        "n = Size (x)\n" + _loop('n, ""', _NESTED + "on = Identity (go)"),
        "",
        "a loop",
    ),
    "in a function that another calls": (
        "n = Size (x)\n" + _loop('n, ""', "b = own.f (a)\non = Identity (go)"),
        _function("f", "n = Size (x)\n" + _loop('n, ""')),
        "a loop",
    ),
    "by a count of its own": (
        "n = Size (x)\n" + _loop('n, ""'),
        _function("Size", "y = Identity (x)", ""),
        "by the name of an operation",
    ),
    "in a branch": (
        "c = Constant <value_int = 1> ()\n"
        "y = If (c) <then_branch = t () => (float[N] u) { u = Identity (x) }, "
        "else_branch = e () => (float[N] v) { v = Identity (x) }>",
        "",
        "no loop",
    ),
    "by itself": (
        "y = own.f (x)",
        _function("f", "y = own.g (x)") + _function("g", "y = own.f (x)"),
        "calls itself",
    ),
    "by doubling": ("y = own.f0 (x)", _TWICE, f"more than {MAX_NODES:,} nodes"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_graphs_that_need_not_end(name: str, tmp_path: Path) -> None:
    """No session is opened on them."""
    nodes, functions, reason = ENDLESS[name]
    model = onnx.parser.parse_model(f"{_HEAD}{{ {nodes} }}\n{functions}")
    path = tmp_path / "g.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(DflashError, match=rf"g\.onnx: has .*{reason}"):
        open_session(path, 1)


def test_a_loop_over_a_tensor_ends() -> None:
    """As those of mixtures of experts, in a function or not."""
    nodes = "n = Size (x)\n" + _loop('n, ""')
    check_ending(onnx.parser.parse_model(f"{_HEAD}{{ {nodes} }}"), "g.onnx")
    called = f"{_HEAD}{{ y = own.f (x) }}\n{_function('f', nodes)}"
    check_ending(onnx.parser.parse_model(called), "g.onnx")
