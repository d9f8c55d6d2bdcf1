"""Where the rows of a call stand, and which keys they may see."""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from dflash_trt.graph.model import GraphBuilder


class Rows:
    """The rows of a call.

    ids [B,S]; start [B]; positions [B,S] int64.
    """

    def __init__(self, b: GraphBuilder, ids: str, start: str, label: str = "rows") -> None:
        """`label` tells the rows of one graph's several calls apart."""
        self.builder, self.ids, self.start, self._label = b, ids, start, label
        with b.scope(label):
            zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
            self.batch = b.node("Shape", [ids], "batch", start=0, end=1)
            self.count = b.node("Shape", [ids], "count", start=1, end=2)
            count = b.node("Squeeze", [self.count], "count_scalar")
            row = b.node("Range", [zero, count, one], "index")
            start_column = b.node("Unsqueeze", [start, b.integers(1)], "start_column")
            self.positions = b.node("Add", [start_column, row], "positions")
            if not b.form.is_native or b.form.has_kernel_caches:
                _ = self.lengths  # the bytes of graphs that always have them are pinned

    @property
    def ends(self) -> str:
        """int64 [B]: start + S."""
        b = self.builder
        return b.once(
            ("ends", self._label), lambda: b.node("Add", [self.start, self.count], "ends")
        )

    @property
    def lengths(self) -> str:
        """int32 [B]: positions that caches hold once they have the call's rows."""
        b = self.builder
        return b.once(
            ("lengths", self._label),
            lambda: b.node("Cast", [self.ends], "kv_lengths", to=TensorProto.INT32),
        )

    def shape(self, *trailing: int) -> str:
        """The shape value [B, S, *trailing]."""
        b, name = self.builder, f"{self._label}/shape_" + "x".join(map(str, trailing))
        sizes = [self.batch, self.count, b.integers(*trailing)]
        return b.once(name, lambda: b.node("Concat", sizes, name, axis=0))

    def window_mask(
        self,
        window: int | None,
        causal: bool,
        measure: Callable[[], str],
        *,
        with_sink: bool = False,
    ) -> str:
        """bool [B,1,S,M]: a query at position p may see key j where |p - j| < window (None: any).

        TensorRT refuses a mask beside a causal kind, so causality is in the mask, and so is where
        what a cache holds ends: its attention is given no lengths (docs/tensorrt.md). `measure`
        adds the value M [1]; `with_sink` adds the key behind the call's rows, which every query
        sees.
        """
        return self.builder.once(
            ("mask", self._label, window, causal, with_sink),
            lambda: self._build_mask(window, causal, measure, with_sink),
        )

    def _build_mask(
        self, window: int | None, causal: bool, measure: Callable[[], str], with_sink: bool
    ) -> str:
        b = self.builder
        label = f"window_{window}" if window is not None else "all"
        label += "_causal" * causal + "_sink" * with_sink
        with b.scope(label):
            zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
            length = b.node("Squeeze", [measure()], "cache_length_scalar")
            keys = b.node("Range", [zero, length, one], "keys")
            queries = b.node("Unsqueeze", [self.positions, b.integers(1, 3)], "queries")
            offset = b.node("Sub", [queries, keys], "offset")
            mask = ""
            if window is not None:
                distance = b.node("Abs", [offset], "distance")
                mask = b.node("Less", [distance, b.integers(window, scalar=True)], "near")
            if causal:
                past = b.node("GreaterOrEqual", [offset, zero], "past")
                mask = b.node("And", [mask, past], "near_past") if mask else past
            elif b.form.is_native:
                # No query is past the end: the larger of both is the end, once for each query.
                last = b.node("Max", [queries, self._end_columns()], "held_ends")
                held = b.node("Less", [keys, last], "held")
                mask = b.node("And", [mask, held], "near_held") if mask else held
            if with_sink:
                sink = b.node("Equal", [keys, self._end_columns()], "sink")
                mask = b.node("Or", [mask, sink], "near_past_or_sink")
        return mask

    def _end_columns(self) -> str:
        b = self.builder
        return b.node("Unsqueeze", [self.ends, b.integers(1, 2, 3)], "end_columns")
