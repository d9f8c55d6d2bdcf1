"""The processes of a Triton server as /proc shows them, whether or not they answer anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_DEAD = "ZX"


def find_models(server_pid: int) -> dict[int, str]:
    """Names of the Python models that run, by process id.

    The Python backend starts a process with the path of the model's `model.py` as an argument,
    <repository>/<model>/<version>/model.py.
    """
    found: dict[int, str] = {}
    for process, state in _children(server_pid):
        with suppress(OSError):  # it has ended meanwhile
            arguments = (process / "cmdline").read_text("utf-8", "replace").split("\0")
            models = [Path(one).parts[-3] for one in arguments if one.endswith("/1/model.py")]
            if models and state not in _DEAD:
                found[int(process.name)] = models[0]
    return found


def runs(pid: int, parent_pid: int) -> bool:
    """Whether that child of its parent runs; another process may have its number by now."""
    state, parent = read_state(PROC / str(pid))
    return state not in _DEAD and parent == parent_pid


def has_dead_child(pid: int) -> bool:
    """Whether a child has ended and its parent has not asked why."""
    return any(state in _DEAD for _, state in _children(pid))


def read_state(process: Path) -> tuple[str, int]:
    """The state's letter and the parent's id; X and 0 when it has ended."""
    try:
        # pid (command) state ppid …; the command may hold spaces and brackets.
        text = (process / "stat").read_text("utf-8", "replace")
        state, parent = text.rpartition(")")[2].split()[:2]
        return state, int(parent)
    except (OSError, ValueError):
        return "X", 0


def _children(pid: int) -> Iterator[tuple[Path, str]]:
    for process in PROC.glob("[0-9]*"):
        state, parent = read_state(process)
        if parent == pid:
            yield process, state
