"""What graphs of one model differ in: compute type, form of the caches, outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from onnx import TensorProto

from dflash_trt.core.limits import PagePool


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


class CacheDtype(Enum):
    """What a KV cache holds: the compute type's values, or E4M3 codes with a scale per tensor."""

    COMPUTE = "auto"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class GraphForm:
    """The form of a graph.

    Args:
        cache_length: M where it is fixed; None leaves the axis to each call.
        observe: one more output per distinct input of the linears, its largest magnitude. The
            model's metadata says which linear reads which.
        page_size: positions of a page; the caches are then pools of pages (see caches/cpu.py).
        windows: those of layers whose pages have page tables of their own; the others' have one.
        draws: the target's graphs draw tokens themselves, and `target.onnx` settles the step (see
            drawing.py). Without, choices are the argmax, and whoever samples reads logits.
        pages: of a pool, besides nobody's, where that is fixed; `window_pages` those of `windows`.
        cache_dtype: under FP8, K and V are rounded to what E4M3 holds. A float32 graph caches the
            rounded values, a narrow one their codes: the same numbers.
        replay: rows that a call may take back of those before it, which models with recurrent
            state keep (see gated_delta.py); None for models without.
    """

    precision: Precision = Precision.FLOAT32
    cache_length: int | None = None
    observe: bool = False
    page_size: int | None = None
    draws: bool = False
    pages: int | None = None
    cache_dtype: CacheDtype = CacheDtype.COMPUTE
    replay: int | None = None
    windows: tuple[int, ...] = ()
    window_pages: tuple[int, ...] = ()

    @property
    def is_paged(self) -> bool:
        return self.page_size is not None

    @property
    def is_fp8(self) -> bool:
        return self.cache_dtype is CacheDtype.FP8

    @property
    def holds_codes(self) -> bool:
        """Whether caches hold E4M3 codes, not the numbers that they stand for."""
        return self.is_fp8 and self.precision is not Precision.FLOAT32

    @property
    def is_native(self) -> bool:
        """Whether TensorRT runs the graph: its own operations, where ONNX Runtime has others."""
        return self.precision is not Precision.FLOAT32

    @property
    def has_kernels(self) -> bool:
        """Whether engines run kernels of this project: those that draw do."""
        return self.draws and self.is_native

    @property
    def has_kernel_caches(self) -> bool:
        """Whether only this project's kernels, not TensorRT's, write and read the caches."""
        return self.precision is not Precision.FLOAT32 and (self.is_paged or self.is_fp8)

    @property
    def has_candidates(self) -> bool:
        """Whether a target tells each row's highest logits, which spares a device copying all."""
        return not self.draws and self.precision is not Precision.FLOAT32

    @property
    def columns(self) -> int | None:
        """Columns of a page table, where M is fixed."""
        if self.page_size is None or self.cache_length is None:
            return None
        return -(-self.cache_length // self.page_size)

    def pages_of(self, window: int | None) -> int | None:
        """Pages of the layers of a window, or of those without one, where that is fixed."""
        if window is None or self.pages is None:
            return self.pages
        return self.window_pages[self.windows.index(window)]

    def with_pages(self, pool: PagePool | None) -> GraphForm:
        """The form where each kind of layers has the pages that `pool` has for it."""
        if pool is None:
            return self
        counts = tuple(kind.pages for kind in pool.windowed)
        return replace(self, pages=pool.pages, windows=pool.windows, window_pages=counts)

    @property
    def cache_type(self) -> int:
        """ONNX's type of a cache's elements."""
        return TensorProto.FLOAT8E4M3FN if self.holds_codes else self.precision.onnx_type

    @property
    def cache_item_bytes(self) -> int:
        return 1 if self.holds_codes else self.precision.item_bytes


CPU_FORM = GraphForm()
