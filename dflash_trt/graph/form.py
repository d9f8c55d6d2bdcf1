"""What graphs of one model differ in: compute type, layout of the caches, what they tell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onnx import TensorProto


class Precision(Enum):
    """Type of activations, caches and RoPE tables. Norm statistics are float32 in all of them."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def onnx_type(self) -> int:
        return _ONNX_TYPES[self]

    @property
    def item_bytes(self) -> int:
        return 4 if self is Precision.FLOAT32 else 2


_ONNX_TYPES: dict[Precision, int] = {
    Precision.FLOAT32: TensorProto.FLOAT,
    Precision.FLOAT16: TensorProto.FLOAT16,
    Precision.BFLOAT16: TensorProto.BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class GraphForm:
    """`cache_length` is M where it is fixed; None leaves the axis to each call.

    With a `page_size` the caches are pools of pages of that many positions (see paged.py).

    With `observe` a graph has one more output per distinct input of its linears: the largest
    magnitude in it. Which linear reads which is in the model's metadata.

    With `draws` the target's graphs draw each token themselves, and `target.onnx` settles the
    step (see drawing.py); without, choices are the argmax, and whoever samples reads logits.
    """

    precision: Precision = Precision.FLOAT32
    cache_length: int | None = None
    observe: bool = False
    page_size: int | None = None
    draws: bool = False


CPU_FORM = GraphForm()
