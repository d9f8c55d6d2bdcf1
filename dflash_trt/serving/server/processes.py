"""The processes of a Triton server as /proc shows them: which run its models, and how they are.

Looking reads a line per process and asks nobody: a busy server is not disturbed, and one that
answers nothing is seen all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
STOPPED_S = 1.0
_DEAD, _STOPPED = "ZX", "Tt"


class ProcessWatch:
    """Tells when a server or a process of its models has died, or stays stopped.

    A stop counts after STOPPED_S: a profiler stops a process for milliseconds.
    """

    def __init__(self, server_pid: int, proc: Path = PROC) -> None:
        self._server_pid, self._proc = server_pid, proc
        self._models: dict[int, str] = {}
        self._stopped_since: dict[int, float] = {}

    def find_models(self) -> set[str]:
        """Looks for the models' processes; names those, and those found before, dead or not."""
        self._models |= find_models(self._server_pid, self._proc)
        return set(self._models.values())

    def find_trouble(self, now: float) -> str | None:
        """Which process has died, or has been stopped for some time, if any."""
        names = {pid: f"the process of the model {name}" for pid, name in self._models.items()}
        for pid, name in {self._server_pid: "the server's process", **names}.items():
            state, parent = read_state(self._proc / str(pid)) or ("X", 0)
            # The server's own death is its parent's to notice.
            if pid in names and (state in _DEAD or parent != self._server_pid):
                return f"{name} has died"
            if state not in _STOPPED:
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) >= STOPPED_S:
                return f"{name} is stopped"
        return None


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
