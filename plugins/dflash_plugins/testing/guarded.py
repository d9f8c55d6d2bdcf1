"""Runs an operation over guarded memory, in the interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dflash_plugins.operation import Attributes, Launch, Operation, TensorSpec
from dflash_plugins.table import operations
from dflash_plugins.testing.numeric import Array, GuardedBuffer

Arrays = Mapping[str, Array]
Buffers = Mapping[str, GuardedBuffer]
Launcher = Callable[[Operation, Launch, Mapping[str, TensorSpec], Buffers], None]
"""Runs a launch over the buffers of all inputs and outputs; an alias shares its input's."""


def run_guarded(
    name: str, inputs: Arrays, attributes: Attributes, tactic: int, launcher: Launcher
) -> dict[str, Array]:
    """Outputs of operation `name` over `inputs`.

    Raises:
        AssertionError: the kernel wrote outside of its outputs.
    """
    operation = operations()[name]
    specs = {key: TensorSpec.of(array) for key, array in inputs.items()}
    outputs = operation.output_specs(specs, attributes)
    launch = operation.launch(specs, attributes, tactic)
    buffers = {
        key: GuardedBuffer(inputs[key].nbytes, inputs[key].tobytes()) for key in operation.inputs
    }
    for key, spec in outputs.items():
        alias = operation.aliases.get(key)
        buffers[key] = GuardedBuffer(spec.nbytes) if alias is None else buffers[alias]
    if all(launch.grid):
        launcher(operation, launch, specs | outputs, buffers)
    for key, buffer in buffers.items():
        buffer.check(key)
        if key in inputs and key not in operation.aliases.values():
            assert buffer.inner.tobytes() == inputs[key].tobytes(), f"{key} is an input only"
    return {
        key: buffers[key].inner.view(spec.dtype.numpy).reshape(spec.shape).copy()
        for key, spec in outputs.items()
    }
