"""ModelBuilder and LayerBuilder: a model's parts, added to a graph by their roles.

Activations between layers are rows [T,H] (T = B·S), so that every linear is one Gemm over the
checkpoint's [out, in] weights; only attention needs [B,heads,S,D].
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_trt.graph.bindings import KV, Owner, cache_input
from dflash_trt.graph.call_rows import Rows
from dflash_trt.graph.form import Precision
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.quantized import int8_product, quantized_product
from dflash_trt.graph.rope_tables import RopeTables
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.quantized_weights import linear_algorithm
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.sizes import LayerSizes


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """A target or a draft in the graph `b`, over `rows`. Roles are the spec's, behind `prefix`."""

    b: GraphBuilder
    owner: Owner
    spec: DecoderSpec
    rows: Rows
    tables: RopeTables
    prefix: str = ""

    def layer(self, index: int) -> LayerBuilder:
        """The same for one layer, whose roles need not say so."""
        is_local = self.spec.local_rope is not None and self.spec.sizes.layers[index].window
        tables = self.tables.local() if is_local else self.tables
        shared = self.b, self.owner, self.spec, self.rows, tables
        return LayerBuilder(*shared, f"layers.{index}.", index=index)

    @property
    def is_int8(self) -> bool:
        """Whether it has matrices in eight bits."""
        return self.b.has_int8(f"{self.owner}/")

    def has(self, role: str) -> bool:
        return self.prefix + role in self.spec.weights

    def entry(self, role: str) -> TensorEntry:
        return self.spec.weights[self.prefix + role]

    def name(self, role: str) -> str:
        """What a weight is called in the graph."""
        return f"{self.owner}/{self.prefix}{role}"

    def weight(self, role: str, precision: Precision | None = None) -> str:
        """A weight in `precision` (the compute type)."""
        return self.b.weight(self.name(role), self.entry(role), precision)

    def stored(self, role: str) -> str:
        """A weight as stored."""
        return self.b.stored(self.name(role), self.entry(role))

    def rms_norm(
        self, x: str, role: str, name: str, *, is_wide: bool = False, is_plain: bool = False
    ) -> str:
        """RMSNorm over the last axis, Zhang & Sennrich 2019 (arXiv 1910.07467).

        Computed in float32, the result is in the compute type; `is_wide`: x is float32 already.
        `is_plain`: it multiplies by w, whatever the model's other norms do.
        """
        b = self.b
        scale = self.weight(role, Precision.FLOAT32)
        if self.spec.norm_offset and not is_plain:
            offset = b.node("Constant", [], f"{name}_offset", value_float=self.spec.norm_offset)
            scale = b.node("Add", [scale, offset], f"{name}_scale")
        return self._normalize(x, scale, name, is_wide=is_wide)

    def unit_norm(self, x: str, width: int, name: str) -> str:
        """RMSNorm over a last axis of `width`, without weights."""
        ones = [1.0] * width
        scale = self.b.constant(f"ones_{width}", [width], ones, Precision.FLOAT32)
        return self._normalize(x, scale, name)

    def _normalize(self, x: str, scale: str, name: str, *, is_wide: bool = False) -> str:
        b = self.b
        wide = x if is_wide else b.widen(x, f"{name}_input")
        inner = name if b.form.precision is Precision.FLOAT32 else f"{name}_float32"
        epsilon = self.spec.rms_norm_eps
        normed = b.node("RMSNormalization", [wide, scale], inner, axis=-1, epsilon=epsilon)
        return b.narrow(normed, name)

    def linear(
        self,
        x: str,
        role: str,
        *,
        name: str | None = None,
        residual: str | None = None,
        precision: Precision | None = None,
    ) -> str:
        """x [T,in] @ W[out,in]^T, plus the layer's bias or a residual [T,out] where there is one.

        x and the residual are in `precision` (the compute type); the value is called `name`
        (the role). A quantised linear rounds x as well (see graph/quantized.py).
        """
        b, name, bias = self.b, name or role, f"{role}.bias"
        b.observe(x, self.name(role))
        weights, full = self.spec.weights, self.prefix + role
        algorithm = linear_algorithm(weights, full)
        if algorithm is not None:
            result = quantized_product(
                b, x, self.name(role), weights, full, algorithm, name, precision
            )
            if self.has(bias):
                result = b.node("Add", [result, self.weight(bias, precision)], f"{name}_bias")
        elif copy := b.int8(self.name(role)):
            added = self.weight(bias, precision) if self.has(bias) else None
            result = int8_product(b, x, copy, name, added)
        else:
            operands = [x, self.weight(role, precision)]
            if self.has(bias):
                operands.append(self.weight(bias, precision))
            elif residual is not None:
                operands.append(residual)
                residual = None
            result = b.node("Gemm", operands, name, transB=1)
        return result if residual is None else b.node("Add", [result, residual], f"{name}_add")


@dataclass(frozen=True, slots=True)
class LayerBuilder(ModelBuilder):
    """One layer of a model."""

    index: int = field(kw_only=True)

    @property
    def sizes(self) -> LayerSizes:
        return self.spec.sizes.layers[self.index]

    @property
    def caches(self) -> list[str]:
        """Names of the layer's caches before the call, K and V."""
        return [cache_input(self.owner, kind, self.index) for kind in KV]
