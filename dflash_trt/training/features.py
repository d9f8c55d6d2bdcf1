"""What a draft is trained on: rows of tokens, and the target's tapped features of each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from dflash_trt.backends.base import FloatArray
from dflash_trt.core.machine import multiplies_bf16
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError, import_extra
from dflash_trt.graph.form import CacheDtype
from dflash_trt.training.target import TrainingTarget
from dflash_trt.training.work_folder import write_json

TOKENS, ROWS, FEATURES = "tokens.npy", "rows.npy", "features.npy"
_DONE = "done.json"
# Rows are noted as done after this many tokens: what a kill costs.
_NOTE_TOKENS = 4096

Features = Callable[[Sequence[int]], FloatArray]
"""Token ids of a row to float32 [tokens, (taps + 1) · hidden]; see `Replay.features`."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A prompt and its answer."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.answer_ids]


@dataclass(frozen=True, slots=True)
class FeatureStore:
    """Rows of prompt and answer, one after the other.

    Args:
        tokens: [N] int32, of all rows.
        rows: [R, 3] int64: where a row begins, its prompt's tokens, all of its tokens.
        features: [N, (taps + 1) · hidden] uint16, the bits of bfloat16: the residual streams
            after the tapped layers, in the taps' order, and after the last layer. Read from disk
            as needed.
    """

    tokens: NDArray[np.int32]
    rows: NDArray[np.int64]
    features: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.rows)


def to_bits(features: FloatArray) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 values; ties to even."""
    bits: NDArray[np.uint16] = features.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits


def check_space(tokens: int, width: int, folder: Path) -> None:
    """Refuses features that the disk has no room for.

    Raises:
        DflashError: says how much is missing, and what takes less.
    """
    needed = tokens * width * np.dtype(np.uint16).itemsize
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DflashError(
            f"features of {tokens:,} tokens take {needed:,} bytes, {free:,} are free",
            where=folder,
            fix="free some space, --set work=DIR on another disk, fewer rows, or online=true",
        )


def lay_out(rows: Sequence[TokenRow]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The tokens and the table of rows of a store."""
    sizes = [len(row.token_ids) for row in rows]
    starts = accumulate(sizes[:-1], initial=0)
    table = [
        (at, len(row.prompt_ids), size) for at, row, size in zip(starts, rows, sizes, strict=True)
    ]
    tokens = np.array([one for row in rows for one in row.token_ids], np.int32)
    return tokens, np.array(table, np.int64)


def capture(
    rows: Sequence[TokenRow],
    width: int,
    compute: Features,
    folder: Path,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> FeatureStore:
    """Writes the store of `rows` into `folder`, or goes on with one that was begun there.

    One row is in memory at a time.

    Raises:
        DflashError: features that are not finite, or a disk that is too small.
    """
    tokens, table = lay_out(rows)
    np.save(folder / TOKENS, tokens)
    np.save(folder / ROWS, table)
    path, done = folder / FEATURES, folder / _DONE
    begun = path.is_file() and done.is_file()
    if not begun:
        check_space(len(tokens), width, folder)
    first = int(read_json_object(done)["rows"]) if begun else 0
    features = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        path, mode="r+" if begun else "w+", dtype=np.uint16, shape=(len(tokens), width)
    )
    write_json(done, {"rows": first})
    on_tokens(int(table[:first, 2].sum()))
    unnoted = 0
    for index in range(first, len(rows)):
        offset, _, size = map(int, table[index])
        computed = compute(rows[index].token_ids)
        if not np.isfinite(computed).all():
            what = f"the target's features of row {index} are not finite"
            raise DflashError(what, where="capture", fix="try another precision of the target")
        features[offset : offset + size] = to_bits(computed)
        on_tokens(size)
        unnoted += size
        if unnoted >= _NOTE_TOKENS or index == len(rows) - 1:
            features.flush()
            write_json(done, {"rows": index + 1})
            unnoted = 0
    return open_store(folder)


def open_store(folder: Path) -> FeatureStore:
    """Opens a store that `capture` finished; its features stay on disk."""
    features = np.load(folder / FEATURES, mmap_mode="r", allow_pickle=False)
    return FeatureStore(np.load(folder / TOKENS), np.load(folder / ROWS), features)


@dataclass(frozen=True, slots=True)
class OnlineFeatures:
    """A store's features that are computed when they are asked for, a row at a time.

    Answers `features[offset : offset + tokens]` of whole rows as an array on disk would.
    """

    rows: dict[int, TokenRow]
    compute: Features

    def __getitem__(self, part: slice) -> NDArray[np.uint16]:
        return to_bits(self.compute(self.rows[part.start].token_ids))


def online_store(rows: Sequence[TokenRow], compute: Features) -> FeatureStore:
    """A store of `rows` whose features are on no disk."""
    tokens, table = lay_out(rows)
    features: Any = OnlineFeatures(dict(zip(table[:, 0].tolist(), rows, strict=True)), compute)
    return FeatureStore(tokens, table, features)


LEAST_HIDDEN = 512
"""Of narrower targets a CPU computes a layer faster than Python calls it."""
MOST_DIFFERENT = 0.03
"""Frobenius norm of the difference over that of the graphs' features: bfloat16 keeps 8 bits, and
thirty layers of it were measured to part by 0.5 to 1 %."""
COMPARED_ROWS = 2


class Teacher:
    """The target in transformers, without its head: several times faster than ONNX Runtime.

    Args:
        folder: its checkpoint.
        taps: layers, from 0, whose outputs are wanted.
        device: as PyTorch calls it; weights are in bfloat16.
    """

    def __init__(self, folder: Path, taps: Sequence[int], device: str) -> None:
        transformers = import_extra("transformers", "train", "training")
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
        self._model.to(device).eval()
        self._device = device
        self._taken: dict[int, Any] = {}
        layers = self._model.get_decoder().layers  # of a model that sees, too
        self._told = [*taps, len(layers) - 1]
        for layer in set(self._told):
            layers[layer].register_forward_hook(partial(self._take, layer))

    def features(self, token_ids: Sequence[int]) -> FloatArray:
        """float32 [tokens, (taps + 1) · hidden], as `Replay.features`."""
        with torch.inference_mode():
            self._model(torch.tensor([list(token_ids)], device=self._device), use_cache=False)
            taken = [self._taken[layer] for layer in self._told]
            features: FloatArray = torch.cat(taken, -1)[0].float().cpu().numpy()
        return features

    def _take(self, layer: int, module: Any, given: Any, output: Any) -> None:
        self._taken[layer] = output[0] if isinstance(output, tuple) else output


def uses_teacher(
    target: TrainingTarget,
    taps: Sequence[int],
    device: str,
    rows: Sequence[Sequence[int]],
    graphs: Features,
) -> bool:
    """Whether a teacher is faster than the served graphs and agrees with them on some `rows`."""
    spec = target.spec
    needs_graphs = spec.quantization is not None or spec.moe is not None
    if needs_graphs or target.cache_dtype is not CacheDtype.COMPUTE:
        return False
    if device == "cpu" and (spec.hidden_size < LEAST_HIDDEN or not multiplies_bf16()):
        return False
    teacher = Teacher(target.folder, taps, device)
    return all(difference(teacher, graphs, row) <= MOST_DIFFERENT for row in rows[:COMPARED_ROWS])


def difference(teacher: Teacher, graphs: Features, token_ids: Sequence[int]) -> float:
    """How far a row's features are apart, as a share of the graphs'."""
    expected = graphs(token_ids).astype(np.float64)
    apart = float(np.linalg.norm(teacher.features(token_ids) - expected))
    return apart / max(float(np.linalg.norm(expected)), 1e-30)
