"""`gated_delta_step` alone: random weights, a session over it, and a float64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from dflash_plugins.gated_delta_step.reference import expect
from onnx import TensorProto, helper

from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.graph.functions import CONTRIB_DOMAIN, DFLASH_DOMAIN, IR_VERSION, OPSET
from dflash_trt.graph.gated_delta import gated_delta_function, kept_rows
from dflash_trt.graph.gated_delta_groups import gated_delta_groups_function
from dflash_trt.models.sizes import RecurrentSizes

FloatArray = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
WEIGHTS = ("kernel", "time_bias", "decay")


@dataclass
class Held:
    """What `batch` sequences have between calls; garbage where they have nothing yet."""

    rows: FloatArray
    state: FloatArray
    state_start: Int64Array
    rows_end: Int64Array
    side: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if not len(self.side):
            self.side = np.zeros_like(self.rows_end)

    def join(self, other: Held) -> Held:
        return Held(*(np.concatenate(pair) for pair in zip(self._all, other._all, strict=True)))

    def pick(self, order: list[int]) -> Held:
        """The sequences in another order of slots."""
        return Held(*(one[order].copy() for one in self._all))

    @property
    def _all(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self.rows, self.state, self.state_start, self.rows_end, self.side


@dataclass
class DeltaStep:
    """The function over float32 arrays, with random weights; `in_groups` as engines have it.

    `has_sides`: as engines with kernels have it.
    """

    sizes: RecurrentSizes
    replay: int
    seed: int = 0
    in_groups: bool = False
    has_sides: bool = False
    weights: dict[str, FloatArray] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        sizes, heads = self.sizes, self.sizes.value_heads
        self.weights = {
            "kernel": self.normal(sizes.channels, 1, sizes.kernel) * np.float32(0.5),
            "time_bias": self.normal(heads),
            "decay": -np.exp(self.normal(heads)),
        }
        form, define = GraphForm(replay=self.replay), gated_delta_function
        if self.in_groups:
            form, define = replace(form, precision=Precision.FLOAT16), gated_delta_groups_function
        if self.has_sides:
            form = replace(form, precision=Precision.FLOAT16, draws=True)
        function = define(form, sizes)
        self.kept = kept_rows(form, sizes)
        floats = {"new_rows": 3, **dict.fromkeys(WEIGHTS, 1), "rows": 3, "state": 4}
        floats |= {"kernel": 3, "rows": 3 + self.has_sides}
        places = ("start", "state_start", "rows_end", *("side",) * self.has_sides)
        info = helper.make_tensor_value_info
        inputs = [info(name, TensorProto.FLOAT, [None] * rank) for name, rank in floats.items()]
        inputs += [info(name, TensorProto.INT64, [None]) for name in places]
        ranks = {"y": 3, "state_out": 4, "rows_out": floats["rows"]}
        outputs = [info(name, TensorProto.FLOAT, [None] * rank) for name, rank in ranks.items()]
        call = helper.make_node(
            function.name,
            [*floats, *places],
            list(ranks),
            domain=DFLASH_DOMAIN,
            **{"replay": self.replay} if self.has_sides else {},
        )
        domains = (("", OPSET), (DFLASH_DOMAIN, 1), (CONTRIB_DOMAIN, 1))
        model = helper.make_model(
            helper.make_graph([call], "step", inputs, outputs),
            opset_imports=[helper.make_opsetid(*one) for one in domains],
            functions=[function],
            ir_version=IR_VERSION,
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(model.SerializeToString(), options)

    def normal(self, *shape: int) -> FloatArray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def fresh(self, batch: int) -> Held:
        """Slots whose last sequences left what they left."""
        sizes, none = self.sizes, np.zeros(batch, np.int64)
        held = (*(2,) * self.has_sides, self.kept, sizes.row_elements)
        rows = self.normal(batch, *held) * np.float32(9)
        state = self.normal(batch, sizes.value_heads, sizes.head_dim, sizes.head_dim)
        return Held(rows, state * np.float32(9), none, none.copy())

    def run(self, new_rows: FloatArray, starts: Int64Array, held: Held) -> tuple[FloatArray, Held]:
        """y [B,S,N·D] of rows at `starts`, and what is held after them."""
        feeds = {"new_rows": new_rows, **self.weights, "rows": held.rows, "state": held.state}
        feeds |= {"start": starts, "state_start": held.state_start, "rows_end": held.rows_end}
        if self.has_sides:
            feeds["side"] = held.side
        y, state, rows = self._session.run(None, feeds)
        ends = starts + new_rows.shape[1]
        return y, Held(rows, state, np.maximum(starts, ends - self.replay), ends, 1 - held.side)

    def reference(self, x: FloatArray) -> npt.NDArray[np.float64]:
        """y of one sequence [T,C+2N] from its beginning, token by token in float64."""
        none, first = self.fresh(1), np.zeros(1, np.int64)
        places = dict.fromkeys(("start", "state_start", "rows_end", "side"), first)
        rows = np.zeros((1, 2, *none.rows.shape[-2:]), np.float32)
        inputs = {"new_rows": x[None], **self.weights, "rows": rows, "state": none.state, **places}
        return expect(inputs, self.replay).y[0]
