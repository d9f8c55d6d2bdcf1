"""Who computes features: the served graphs, or transformers where that is faster and agrees.

A teacher in bfloat16 on a GPU, or on a CPU that multiplies bfloat16, computes the features of a
target in floating point several times faster than ONNX Runtime in float32. It is used only when its
features of two rows are the graphs', up to bfloat16's rounding through the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflash_trt.backends.base import FloatArray
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.machine import multiplies_bf16
from dflash_trt.decoding.replay import Replay
from dflash_trt.graph.form import CacheDtype
from dflash_trt.training.extras import training_module
from dflash_trt.training.features import Features
from dflash_trt.training.preparation import Preparation

Source = Literal["graphs", "transformers"]

LEAST_HIDDEN = 512
"""Of narrower targets a CPU computes a layer faster than Python calls it."""
MOST_DIFFERENT = 0.03
"""Frobenius norm of the difference over that of the graphs' features: bfloat16 keeps 8 bits, and
thirty layers of it were measured to part by 0.5 to 1 %."""
COMPARED_ROWS = 2


class Teacher:
    """The target in transformers, without its head.

    Args:
        folder: its checkpoint.
        taps: layers, from 0, whose outputs are wanted.
        device: as PyTorch calls it; weights are in bfloat16.
    """

    def __init__(self, folder: Path, taps: Sequence[int], device: str) -> None:
        self._torch = torch = training_module("torch")
        transformers = training_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
        self._model.to(device).eval()
        self._device = device
        self._taken: dict[int, Any] = {}
        self._told = [*taps, len(self._model.layers) - 1]
        for layer in set(self._told):
            self._model.layers[layer].register_forward_hook(self._taker(layer))

    def features(self, token_ids: Sequence[int]) -> FloatArray:
        """float32 [tokens, (taps + 1) · hidden], as `Replay.features`."""
        torch = self._torch
        with torch.inference_mode():
            self._model(torch.tensor([list(token_ids)], device=self._device), use_cache=False)
            taken = [self._taken[layer] for layer in self._told]
            features: FloatArray = torch.cat(taken, -1)[0].float().cpu().numpy()
        return features

    def _taker(self, layer: int) -> Any:
        def take(module: Any, given: Any, output: Any) -> None:
            self._taken[layer] = output[0] if isinstance(output, tuple) else output

        return take


def find_source(
    preparation: Preparation, rows: Sequence[Sequence[int]], replay: Replay
) -> tuple[Source, str]:
    """Who computes the features of this training, and why; `rows` are compared."""
    spec = preparation.target.spec
    if spec.quantization is not None or spec.moe is not None:
        return (
            "graphs",
            "the served graphs: they alone compute what a quantised target or experts do",
        )
    if preparation.target.cache_dtype is not CacheDtype.COMPUTE:
        return "graphs", "the served graphs: they alone have the served KV cache"
    if preparation.device == "cpu" and (spec.hidden_size < LEAST_HIDDEN or not multiplies_bf16()):
        return "graphs", "the served graphs: as fast as any here"
    teacher = _open_teacher(preparation)
    largest = 0.0
    for row in rows[:COMPARED_ROWS]:
        largest = max(largest, difference(teacher, replay.features, row))
    if not largest <= MOST_DIFFERENT:
        return (
            "graphs",
            f"the served graphs: transformers' are {100 * largest:.1f} % apart from them",
        )
    return "transformers", f"transformers in bfloat16, {100 * largest:.2f} % apart from the graphs'"


@contextmanager
def open_features(source: Source, preparation: Preparation, bundle: Bundle) -> Iterator[Features]:
    """What computes the features of a row."""
    if source == "transformers":
        yield _open_teacher(preparation).features
        return
    with Replay(bundle, threads=preparation.request.threads) as replay:
        yield replay.features


def difference(teacher: Teacher, graphs: Features, token_ids: Sequence[int]) -> float:
    """How far a row's features are apart, as a share of the graphs'."""
    expected = graphs(token_ids).astype(np.float64)
    apart = float(np.linalg.norm(teacher.features(token_ids) - expected))
    return apart / max(float(np.linalg.norm(expected)), 1e-30)


def _open_teacher(preparation: Preparation) -> Teacher:
    training_module("torch").set_num_threads(preparation.request.threads)
    taps = preparation.chosen.shape.target_layer_ids
    return Teacher(preparation.target.folder, taps, preparation.device)
