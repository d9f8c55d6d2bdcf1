"""The float32 graphs of one model, run over one sequence at a time, with their observations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from dflash_trt.backends.base import Int64Array
from dflash_trt.backends.onnxruntime.caches import LinearCaches, RecurrentStates
from dflash_trt.backends.onnxruntime.session import bind_array, check_session, open_session
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.bindings import (
    CACHE_START,
    OBSERVED_PREFIX,
    ROWS_END,
    STATE_START,
    TOKEN_IDS,
    GraphName,
    Owner,
    cache_output,
)
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import CacheLayout, graph_tensors


class ObservedGraphs:
    """Graphs in `folder` that were built to observe, over caches of one sequence.

    Args:
        form: that they have.
        layout: the models' caches: with a draft the graphs are target and draft, else
            target_only.
        vocab_size: width of the logits.
        positions: most positions of a sequence.
    """

    def __init__(
        self, folder: Path, form: GraphForm, layout: CacheLayout, vocab_size: int, positions: int
    ) -> None:
        self._layout, self._form = layout, form
        self._states = RecurrentStates(layout.states(), 1, 0, form.replay or 0)
        self._caches = LinearCaches(layout.of(), 1, positions)
        graphs: list[GraphName] = ["target", "draft"] if layout.draft else ["target_only"]
        self._sessions = {graph: self._open(folder, graph, vocab_size) for graph in graphs}
        self._amax: dict[str, float] = {}

    def make_room(self, length: int) -> None:
        """Makes room for a sequence that takes `length` positions."""
        self._caches.fit([length])

    def run(self, graph: GraphName, inputs: Mapping[str, Int64Array]) -> None:
        """Runs `graph` on `inputs` (its caches are bound here) and keeps what it tells.

        A target with recurrent layers must be given a sequence's rows in order.

        Raises:
            DflashError: ONNX Runtime failed, or what a linear reads is not finite.
        """
        session = self._sessions[graph]
        readers = _readers(session)
        io = session.io_binding()
        states, start = self._layout.states(graph), inputs[CACHE_START]
        if states:
            self._states.begin(range(1), start)
            reached = {STATE_START: self._states.state_start, ROWS_END: self._states.rows_end}
            inputs = {**inputs, **reached}
        for name, array in inputs.items():
            bind_array(io.bind_input, name, array)
        for name in (*states, *self._layout.of(graph)):
            held = self._states if name in states else self._caches
            shape, address = held.shape(name, 1), held.address(name, 0)
            io.bind_input(name, "cpu", 0, np.float32, shape, address)
            io.bind_output(cache_output(name), "cpu", 0, np.float32, shape, address)
        found = np.empty((len(readers), 1), np.float32)
        for name, value in zip(readers, found, strict=True):
            io.bind_output(name, "cpu", 0, np.float32, [], value.ctypes.data)
        try:
            session.run_with_iobinding(io)
        except Exception as error:
            raise DflashError(one_line(error), where=f"{graph}.onnx") from error
        if states:
            self._states.end(range(1), start, inputs[TOKEN_IDS].shape[1])
        for linears, amax in zip(readers.values(), found[:, 0].tolist(), strict=True):
            if not math.isfinite(amax):
                raise DflashError(
                    f"the input of {', '.join(linears)} is not finite",
                    where=f"{graph}.onnx",
                    fix="the checkpoint's weights are damaged, or overflow float32",
                )
            for linear in linears:
                self._keep(linear, amax)
        for name in self._layout.of(graph):
            owner, kind, layer = name.rsplit("_", 2)
            self._keep(f"{owner}/layers.{layer}.{kind}_cache", self._caches.largest(name))

    def amax(self, owner: Owner) -> dict[str, float]:
        """The largest magnitude so far in the input of each of `owner`'s linears, by role, and in
        the K and V caches of its layers, as "layers.0.k_cache"."""
        prefix = f"{owner}/"
        return {
            linear.removeprefix(prefix): value
            for linear, value in self._amax.items()
            if linear.startswith(prefix)
        }

    def _keep(self, name: str, amax: float) -> None:
        self._amax[name] = max(amax, self._amax.get(name, 0.0))

    def _open(self, folder: Path, graph: GraphName, vocab_size: int) -> ort.InferenceSession:
        path = folder / f"{graph}.onnx"
        session = open_session(path, None)
        check_session(session, path, graph_tensors(graph, self._form, self._layout, vocab_size))
        return session


def _readers(session: ort.InferenceSession) -> dict[str, list[str]]:
    """For each observing output, in the graph's order: the linears (owner/role) that read it."""
    outputs: dict[str, str] = session.get_modelmeta().custom_metadata_map
    readers: dict[str, list[str]] = {
        item.name: [] for item in session.get_outputs() if item.name.startswith(OBSERVED_PREFIX)
    }
    for linear in sorted(outputs):  # ONNX Runtime's map has no order
        readers[outputs[linear]].append(linear)
    return readers
