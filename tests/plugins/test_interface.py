"""The operands of all plugins, as engines that are out there have them."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_plugins.operation import Operation
from dflash_plugins.table import operations

from dflash_trt.hardware.kernels import PLUGIN_INTERFACE

RECORD = Path(__file__).with_name("interface.json")


def describe(operation: Operation) -> str:
    """Inputs, attributes and outputs, each with the input that it updates."""
    inputs = [*operation.inputs, *(f"{n}: {k.__name__}" for n, k in operation.attributes.items())]
    outputs = [
        f"{name} = {operation.aliases[name]}" if name in operation.aliases else name
        for name in operation.outputs
    ]
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def test_other_operands_have_another_number() -> None:
    """Else an engine of before would run where its operands are no longer meant.

    Raise PLUGIN_INTERFACE, then take what is found here into interface.json.
    """
    found = {name: describe(one) for name, one in operations().items()}
    assert json.loads(RECORD.read_text()) == {"interface": PLUGIN_INTERFACE, "operations": found}
