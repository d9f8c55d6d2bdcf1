"""The processes of a Triton server as /proc shows them, whether or not they answer anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
_DEAD = "ZX"


def find_models(server_pid: int, proc: Path = PROC) -> dict[int, str]:
    """Names of the Python models that run, by process id.

    The Python backend starts a process with the path of the model's `model.py` as an argument,
    <repository>/<model>/<version>/model.py.
    """
    found: dict[int, str] = {}
    for process, state in _children(server_pid, proc):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        paths = (Path(one.decode("utf-8", "replace")) for one in arguments)
        models = [path.parent.parent.name for path in paths if path.name == "model.py"]
        if models and state not in _DEAD:
            found[int(process.name)] = models[0]
    return found


def runs(pid: int, parent_pid: int, proc: Path = PROC) -> bool:
    """Whether that child of its parent runs; another process may have its number by now."""
    state, parent = read_state(proc / str(pid)) or ("X", 0)
    return state not in _DEAD and parent == parent_pid


def has_dead_child(pid: int, proc: Path = PROC) -> bool:
    """Whether a child has ended and its parent has not asked why."""
    return any(state in _DEAD for _, state in _children(pid, proc))


def read_state(process: Path) -> tuple[str, int] | None:
    """The state's letter and the parent's id; None when it has ended."""
    try:
        # pid (command) state ppid …; the command may hold spaces and brackets.
        text = (process / "stat").read_text("utf-8", "replace")
        state, parent = text.rpartition(")")[2].split()[:2]
        return state, int(parent)
    except (OSError, ValueError):
        return None


def _children(pid: int, proc: Path) -> Iterator[tuple[Path, str]]:
    for process in proc.iterdir():
        state, parent = read_state(process) or ("X", 0) if process.name.isdecimal() else ("X", 0)
        if parent == pid:
            yield process, state
