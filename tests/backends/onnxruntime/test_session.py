"""Graphs that need not end are refused; what a session maps is moved to large memory pages."""

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


def _function(name: str, body: str, domain: str = "own") -> str:
    opsets = '["": 24, "own": 1]'
    return f'<domain: "{domain}", opset_import: {opsets}>\n{name} (x) => (y)\n{{ {body} }}\n'


def _loop(step: str = _STEP, turns: str = "n") -> str:
    return f'n = Size (x)\ny = Loop <body = inner {_BODY} {{ {step} }}> ({turns}, "", x)'


_TWICE = "".join(
    _function(f"f{depth}", f"z = own.f{depth + 1} (x)\ny = own.f{depth + 1} (z)")
    for depth in range(40)
)
_NESTED = f'c = Size (a)\nb = Loop <body = most {_BODY} {{ {_STEP} }}> (c, "", a)\n'
_CALLED = "b = own.f (a)\non = Identity (go)"
_BRANCH = (
    "c = Constant <value_int = 1> ()\n"
    "y = If (c) <then_branch = t () => (float[N] u) { u = Identity (x) }, "
    "else_branch = e () => (float[N] v) { v = Identity (x) }>"
)
ENDLESS = {
    "by nothing": (_loop(turns='""'), "", "a loop"),
    "inside another": (_loop(_NESTED + "on = Identity (go)"), "", "a loop"),
    "in a function that another calls": (_loop(_CALLED), _function("f", _loop()), "a loop"),
    "by a count of its own": (_loop(), _function("Size", "y = Identity (x)", ""), "by the name"),
    "in a branch": (_BRANCH, "", "a loop"),
    "by itself": ("y = own.f (x)", _function("f", "y = own.f (x)"), f"than {MAX_NODES:,} nodes"),
    "by doubling": ("y = own.f0 (x)", _TWICE, f"than {MAX_NODES:,} nodes"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_no_session_opens_on_a_graph_that_need_not_end(name: str, tmp_path: Path) -> None:
    nodes, functions, reason = ENDLESS[name]
    model = onnx.parser.parse_model(f"{_HEAD}{{ {nodes} }}\n{functions}")
    path = tmp_path / "g.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(DflashError, match=rf"g\.onnx: has .*{reason}"):
        open_session(path, 1)


def test_a_loop_over_a_tensor_ends() -> None:
    """As those of mixtures of experts, in a function or not."""
    for nodes, functions in ((_loop(), ""), ("y = own.f (x)", _function("f", _loop()))):
        model = onnx.parser.parse_model(f"{_HEAD}{{ {nodes} }}\n{functions}")
        check_ending(model, Path("g.onnx"))
