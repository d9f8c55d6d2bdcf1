"""The grouped dynamic convolution around a sublayer: two taps over the rows of one block.

Row t of v becomes (base[0] + dynamic[t,0]) · v[t] + (base[1] + dynamic[t,1]) · v[t - 1], where a
group of channels shares a dynamic value, and v[-1] is 0: a block hears of what lies before it by
attention alone. The dynamic values of both ends are made of what the sublayer would have read.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.graph.model_builder import LayerBuilder
from dflash_trt.models.dflash2 import TAPS


@dataclass(frozen=True, slots=True)
class Convolution:
    """One sublayer's, over `groups` groups of channels.

    `kernels` [B,S,2·taps,groups,channels] has the taps before it, then those behind it.
    """

    layer: LayerBuilder
    groups: int
    kernels: str

    def apply(self, rows: str, *, behind: bool) -> str:
        """Convolves rows [T,H] by the kernels of one end."""
        b, width = self.layer.b, self.layer.spec.hidden_size
        with b.scope("behind" if behind else "before"):
            shape = self.layer.rows.shape(self.groups, width // self.groups)
            now = b.node("Reshape", [rows, shape], "now")
            front = b.node("Pad", [now, b.integers(0, 1, 0, 0, 0, 0, 0, 0)], "behind_zero")
            bounds = [b.integers(0), b.integers(-1), b.integers(1)]
            earlier = b.node("Slice", [front, *bounds], "earlier")
            parts = []
            for tap, values in enumerate((now, earlier)):
                index = b.integers(TAPS * behind + tap, scalar=True)
                kernel = b.node("Gather", [self.kernels, index], f"kernel_{tap}", axis=2)
                parts.append(b.node("Mul", [kernel, values], f"tap_{tap}"))
            return b.node(
                "Reshape", [b.node("Add", parts, "taps"), b.integers(-1, width)], "convolved"
            )


def convolve(layer: LayerBuilder, rows: str, name: str) -> tuple[str, Convolution | None]:
    """Convolves rows [T,H] that a sublayer reads, where the layer has the convolution `name`.

    The second is what the sublayer's output goes through.
    """
    base, dynamic = f"{name}.base", f"{name}.dynamic"
    if not layer.has(base):
        return rows, None
    b = layer.b
    groups = layer.entry(dynamic).shape[0] // (2 * TAPS)
    values = layer.linear(rows, dynamic, name="dynamic")
    shape = layer.rows.shape(2 * TAPS, groups, 1)
    values = b.node("Reshape", [values, shape], "dynamic_groups")
    by_group = b.integers(2 * TAPS, groups, layer.spec.hidden_size // groups)
    fixed = b.node("Reshape", [layer.weight(base), by_group], "base_groups")
    both = Convolution(layer, groups, b.node("Add", [values, fixed], "kernels"))
    return both.apply(rows, behind=False), both
