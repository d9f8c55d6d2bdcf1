"""GraphBuilder: a thin layer over onnx.helper that names what it adds.

A value is called after the place that computes it, as `layers.3/attention/q_proj`. Weights are
external initializers that point into the checkpoint's .safetensors files; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import onnx
from onnx import TensorProto, helper

from dflash_trt.graph.bindings import Dim, observed_output
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from dflash_trt.graph.functions import IR_VERSION, OPSET, amax_function
from dflash_trt.models.quantized_weights import logical_shape
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.quantization.int8 import INT8_PARTS
from dflash_trt.version import __version__

STORAGE_TYPES = {
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "F8_E4M3": TensorProto.FLOAT8E4M3FN,
    "U8": TensorProto.UINT8,
    "I64": TensorProto.INT64,
}


class GraphBuilder:
    """Builds one ModelProto called `name`.

    `locate` gives the path of a tensor's file relative to the .onnx, in POSIX form; `computed` are
    the tensors that a build made, eight-bit copies of matrices among them.
    """

    def __init__(
        self,
        name: str,
        locate: Callable[[TensorEntry], str],
        form: GraphForm = CPU_FORM,
        computed: Mapping[str, TensorEntry] = MappingProxyType({}),
    ) -> None:
        self.form = form
        self._computed = computed
        self._name = name
        self._locate = locate
        self._scopes: list[str] = []
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._once: dict[Hashable, str] = {}
        self._functions: dict[tuple[str, str, str], onnx.FunctionProto] = {}
        self._observed: dict[str, str] = {}
        self._is_in_loop = False
        self._body_domains = dict[str, None]()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefixes the names of everything built inside with `name/`."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    @property
    def scopes(self) -> tuple[str, ...]:
        """Those that what is built now is in."""
        return tuple(self._scopes)

    @property
    def may_loop(self) -> bool:
        """Whether a loop may be added now: on the CPU, and in no other."""
        return self.form.precision is Precision.FLOAT32 and not self._is_in_loop

    def input(self, name: str, element_type: int, shape: Sequence[Dim]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, element_type, list(shape)))
        return name

    def output(self, name: str, element_type: int, shape: Sequence[Dim]) -> str:
        self._outputs.append(helper.make_tensor_value_info(name, element_type, list(shape)))
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        *,
        output: str | None = None,
        **attributes: Any,
    ) -> str:
        """Adds a standard node; returns its output, named by scope and `name` unless given."""
        full_name = self._full(name)
        result = output or full_name
        self._nodes.append(
            helper.make_node(op, list(inputs), [result], name=full_name, **attributes)
        )
        return result

    def top_k(self, values: str, count: str, name: str, *, indices: str) -> str:
        """The `count` highest along the last axis, sorted; their places are the value `indices`."""
        full_name = f"{self._full(name)}_narrow"
        self._nodes.append(
            helper.make_node("TopK", [values, count], [full_name, indices], name=full_name)
        )
        return full_name

    def call(
        self,
        function: onnx.FunctionProto,
        inputs: Sequence[str],
        name: str,
        *,
        outputs: Sequence[str] | None = None,
        **attributes: Any,
    ) -> list[str]:
        """Adds a call of a local function, and its definition once."""
        key = (function.domain, function.name, function.overload)
        self._functions.setdefault(key, function)
        full_name = self._full(name)
        results = list(outputs or [full_name])
        self._nodes.append(
            helper.make_node(
                function.name,
                list(inputs),
                results,
                name=full_name,
                domain=function.domain,
                overload=function.overload or None,
                **attributes,
            )
        )
        return results

    def loop(
        self,
        name: str,
        trips: str,
        carried: Sequence[tuple[str, int, Sequence[Dim]]],
        step: Callable[[str, list[str]], list[str]],
    ) -> list[str]:
        """Runs `step` as often as the scalar `trips` says; returns the last of what is carried,
        and behind it the first of it after each step, stacked [trips,…].

        `carried` are the values before the first step with their types and shapes. `step` is given
        the number of the step and what is carried, and adds the nodes of a body, which may read
        everything that the graph has so far. What it adds is known in the body alone.
        """
        full_name, graph_nodes, once = self._full(name), self._nodes, dict(self._once)
        with self.scope(name):
            number, going = self._full("number"), self._full("going")
            before = [self._full(f"before_{index}") for index in range(len(carried))]
            self._nodes, self._is_in_loop = [], True
            after = step(number, before)
            self._is_in_loop = False
            after = [self.node("Identity", [one], f"after_{at}") for at, one in enumerate(after)]
            kept = self.node("Identity", [after[0]], "kept")
            goes_on = self.node("Identity", [going], "goes_on")
            kinds = [(kind, list(shape)) for _, kind, shape in carried]
            info = helper.make_tensor_value_info
            inputs = [info(number, TensorProto.INT64, []), info(going, TensorProto.BOOL, [])]
            inputs += [info(one, *kind) for one, kind in zip(before, kinds, strict=True)]
            outputs = [info(goes_on, TensorProto.BOOL, [])]
            outputs += [info(one, *kind) for one, kind in zip(after, kinds, strict=True)]
            outputs.append(info(kept, *kinds[0]))
            body = helper.make_graph(self._nodes, "body", inputs, outputs)
            self._body_domains |= dict.fromkeys(node.domain for node in self._nodes)
            self._nodes, self._once = graph_nodes, once
            results = [self._full(f"last_{at}") for at in range(len(carried))] + [self._full("all")]
        operands = [trips, "", *(value for value, _, _ in carried)]
        self._nodes.append(helper.make_node("Loop", operands, results, name=full_name, body=body))
        return results

    def observe(self, x: str, key: str) -> None:
        """Adds the output max |x| where the form asks for it; `key` names the linear that x feeds.

        Linears that share an input share the output; the model's metadata maps keys to outputs.
        """
        if not self.form.observe:
            return
        output = observed_output(x)
        if output not in self._observed.values():
            self.output(output, TensorProto.FLOAT, [])
            name = x.rpartition("/")[2]
            wide = self.widen(x, f"{name}_observed")
            self.call(amax_function(), [wide], f"{name}_amax", outputs=[output])
        self._observed[key] = output

    def inline(self, function: onnx.FunctionProto, inputs: Sequence[str], name: str) -> str:
        """Adds the body of a function of one output in place of a call.

        TensorRT-RTX's parser cannot name the quantisation layers of a second call.
        """
        result = self._full(name)
        values = dict(zip(function.input, inputs, strict=True)) | {function.output[0]: result}
        for node in function.node:
            for inner in node.output:
                values.setdefault(inner, self._full(f"{name}/{inner}"))
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = values[node.output[0]]
            copy.input[:] = [values[inner] for inner in node.input]
            copy.output[:] = [values[inner] for inner in node.output]
            self._nodes.append(copy)
        return result

    def once(self, key: Hashable, build: Callable[[], str]) -> str:
        """The value that `build` adds at the first use of `key`, and the same one ever after."""
        if key not in self._once:
            self._once[key] = build()
        return self._once[key]

    def integers(self, *values: int, scalar: bool = False) -> str:
        """An int64 constant, one per distinct value."""
        label = "x".join(str(value) for value in values)
        name = f"constant.{'scalar' if scalar else 'list'}.{label}"
        if name not in self._initializers:
            dims = [] if scalar else [len(values)]
            self._initializers[name] = helper.make_tensor(name, TensorProto.INT64, dims, values)
        return name

    def constant(
        self,
        name: str,
        shape: Sequence[int],
        values: Sequence[float],
        precision: Precision | None = None,
    ) -> str:
        """A constant in `precision` (the compute type), one per name."""
        if name not in self._initializers:
            kind = (precision or self.form.precision).onnx_type
            self._initializers[name] = helper.make_tensor(name, kind, shape, values)
        return name

    def int8(self, name: str) -> tuple[str, ...]:
        """The parts of the eight-bit copy of the weight `name`; none where it has no copy."""
        parts = [f"{name}.{part}" for part in INT8_PARTS]
        known = self._computed
        return tuple(self.stored(one, known[one]) for one in parts if one in known)

    def has_int8(self, prefix: str) -> bool:
        """Whether any weight whose name begins with `prefix` has an eight-bit copy."""
        return any(one.startswith(prefix) and one.endswith(INT8_PARTS[0]) for one in self._computed)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a stored tensor or a constant."""
        return tuple(self._initializers[name].dims)

    def stored(self, name: str, entry: TensorEntry, *, is_fp4: bool = False) -> str:
        """An external initializer as stored, referenced in place.

        `is_fp4` says that U8 data are E2M1 codes, two a byte; the shape then counts codes.
        """
        if name not in self._initializers:
            tensor = TensorProto(
                name=name,
                data_type=TensorProto.FLOAT4E2M1 if is_fp4 else STORAGE_TYPES[entry.dtype],
                dims=logical_shape(entry) if is_fp4 else entry.shape,
                data_location=TensorProto.EXTERNAL,
            )
            tensor.external_data.add(key="location", value=self._locate(entry))
            tensor.external_data.add(key="offset", value=str(entry.offset))
            tensor.external_data.add(key="length", value=str(entry.length))
            self._initializers[name] = tensor
        return name

    def weight(self, name: str, entry: TensorEntry, precision: Precision | None = None) -> str:
        """An external initializer in `precision` (the compute type), cast where need be."""
        precision = precision or self.form.precision
        stored = self.stored(name, entry)
        if STORAGE_TYPES[entry.dtype] == precision.onnx_type:
            return stored
        cast = f"{stored}.{precision.value}"

        def build() -> str:
            node = helper.make_node("Cast", [stored], [cast], name=cast, to=precision.onnx_type)
            self._nodes.append(node)
            return cast

        return self.once(cast, build)

    def widen(self, value: str, name: str) -> str:
        """A value of the compute type as float32."""
        if self.form.precision is Precision.FLOAT32:
            return value
        return self.node("Cast", [value], name, to=TensorProto.FLOAT)

    def narrow(self, value: str, name: str) -> str:
        """A float32 value in the compute type."""
        if self.form.precision is Precision.FLOAT32:
            return value
        return self.node("Cast", [value], name, to=self.form.precision.onnx_type)

    def finish(self) -> onnx.ModelProto:
        """The model; call once."""
        weights = list(self._initializers.values())
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, weights)
        domains = dict.fromkeys(["", *(domain for domain, _, _ in self._functions)])
        domains |= dict.fromkeys(node.domain for node in self._nodes) | self._body_domains
        for function in self._functions.values():
            domains |= dict.fromkeys(one.domain for one in function.opset_import)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(one, 1 if one else OPSET) for one in domains],
            functions=list(self._functions.values()),
            ir_version=IR_VERSION,
            producer_name="dflash-trt",
            producer_version=__version__,
        )
        helper.set_model_props(model, self._observed)
        return model

    def _full(self, name: str) -> str:
        return "/".join([*self._scopes, name])
