"""ONNX Runtime sessions: opened with the settings that the promise of bits rests on, checked."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
import onnxruntime as ort

from dflash_trt.backends.onnxruntime.int8_probe import check_products
from dflash_trt.core.files import FileKind, find_file, resolved
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.bindings import LOGITS, OBSERVED_PREFIX
from dflash_trt.graph.ending import check_ending
from dflash_trt.graph.tensors import GraphTensor

# 0: fold Casts of any size. Most output heads exceed 1 GiB; cast at every step and not prepacked,
# they would give a row alone other bits than a row among others.
_FOLDING_LIMIT = "optimization.constant_folding_max_output_size_in_bytes"

# Q/DQ handling keeps DequantizeLinear out of folding: weights would be decoded at every step.
_NO_QDQ = "session.disable_quant_qdq"

# A step runs the draft's session and the target's in turn, each with threads of its own. Threads of
# the one that spin in wait for work would take the cores from the other: on two cores and two
# threads a block of 8 took twice as long.
_STOP_SPINNING = "session.force_spinning_stop"

# A session's errors arrive as exceptions; what an allocator of all sessions logs is a second line.
ort.set_default_logger_severity(4)

# Where the weights of a graph lie that is not read from a file.
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

_CHECK_IT = "check the bundle with `dflash-trt inspect --verify`"

# A step of one row reads every weight once. In pages of 4 KiB it waits for the place of each page
# as well: steps took a fifth to a third longer (docs/design/graphs.md). malloc asks for large pages
# only if told so before the process begins. linux/mman.h; the second needs Linux 6.1.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def open_session(
    path: Path, threads: int | None, model: bytes | None = None
) -> ort.InferenceSession:
    """A CPU session on the graph at `path`.

    `threads` bounds the intra-op threads; None leaves the choice to ONNX Runtime. `model` is what
    runs in place of the file's content, over the weights beside it.

    Raises:
        DflashError: it cannot be opened, need not end, or `check_products` refuses it.
    """
    found = find_file(path, FileKind.GRAPH)
    try:
        parsed = onnx.load_from_string(model or found.read_bytes())
    except Exception as error:  # protobuf's own class
        raise DflashError("is not a readable graph", where=path, fix=_CHECK_IT) from error
    check_ending(parsed, path)
    check_products(parsed, path, threads)
    del parsed
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions; no second line beside them
    options.add_session_config_entry(_FOLDING_LIMIT, "0")
    options.add_session_config_entry(_NO_QDQ, "1")
    options.add_session_config_entry(_STOP_SPINNING, "1")
    # A plan of where intermediates lie, kept for every shape ever met: prompts of all lengths
    # would let a server grow without end, and it saves no time here.
    options.enable_mem_pattern = False
    # Which intermediate may lie where another was: found by comparing all with all, which took more
    # than half of the time that a graph of 1,000 nodes opens in. The arena reuses them as well.
    options.enable_mem_reuse = False
    if threads is not None:
        options.intra_op_num_threads = threads
    if model is not None:
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(resolved(path.parent)))
    source = str(path) if model is None else model
    try:
        with in_huge_pages():
            return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise DflashError(
            f"ONNX Runtime cannot open it: {one_line(error)}",
            where=path,
            fix=_CHECK_IT,
        ) from error


def check_session(
    session: ort.InferenceSession,
    path: Path,
    tensors: Iterable[GraphTensor],
    extra: Collection[str] = (),
) -> None:
    """Refuses a graph that is not what the manifest describes: binding would write past it.

    Outputs that observe are let be, and those called `extra`.

    Raises:
        DflashError: its inputs and outputs are not `tensors`.
    """
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    found = {
        item.name: tuple(item.shape)
        for item in (*session.get_inputs(), *session.get_outputs())
        if not item.name.startswith(OBSERVED_PREFIX) and item.name not in extra
    }
    names = {name for name, _ in wanted.items() ^ found.items()}
    if names:
        what = "caches" if names - {LOGITS} else "logits"
        raise DflashError(
            f"its {what} are not the ones that the manifest describes",
            where=path,
            fix="build the bundle again",
        )


def bind_array(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
    """Binds a host array, input or output, by its address."""
    bind(name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)


@contextmanager
def in_huge_pages() -> Iterator[None]:
    """Moves the anonymous memory that is mapped meanwhile to large pages, where Linux has them.

    Nothing changes but speed, and nothing is raised. What other threads map meanwhile moves too.
    """
    before = _mapped_pages()
    yield
    size, libc = _page_size(), ctypes.CDLL(None)
    for page in _mapped_pages() - before:
        place = ctypes.c_void_p(page * size), ctypes.c_size_t(size)
        libc.madvise(*place, _MADV_HUGEPAGE)
        libc.madvise(*place, _MADV_COLLAPSE)


def _page_size() -> int:
    """Bytes of a large page; 0 where there are none, or none are wanted."""
    try:
        is_never = "[never]" in (_HUGE_PAGES / "enabled").read_text("ascii")
        return 0 if is_never else int((_HUGE_PAGES / "hpage_pmd_size").read_text("ascii"))
    except (OSError, ValueError):
        return 0


def _mapped_pages() -> set[int]:
    """Numbers of the large pages that lie whole in this process's writable memory of no file."""
    pages, size = set[int](), _page_size()
    # In bytes: a file's name may hold whatever else ends lines.
    for line in Path("/proc/self/maps").read_bytes().split(b"\n") if size else ():
        addresses, rights, *rest = line.split(maxsplit=5) or [b"", b""]
        if rights == b"rw-p" and (len(rest) < 4 or rest[3].startswith(b"[heap]")):
            start, end = (int(address, 16) for address in addresses.split(b"-"))
            pages |= {*range(-(-start // size), end // size)}
    return pages
