"""The processes of a Triton server as /proc shows them: which run its models, and how they are."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
STOPPED_S = 1.0
_DEAD, _STOPPED = "ZX", "Tt"


class ProcessWatch:
    """Tells when a server or a process of its models has died, or stays stopped.

    Looking reads a line per process and asks nobody, so a server that is busy is not disturbed, and
    one that answers nothing is seen all the same. A stop counts after STOPPED_S: a profiler stops
    a process for milliseconds.
    """

    def __init__(self, server_pid: int, proc: Path = PROC) -> None:
        self._server_pid = server_pid
        self._proc = proc
        self._models: dict[int, str] = {}
        self._stopped_since: dict[int, float] = {}

    @property
    def models(self) -> set[str]:
        """The models whose processes have been found."""
        return set(self._models.values())

    def find_models(self) -> None:
        """Looks for the models' processes; those found before are kept, dead or not."""
        self._models |= find_models(self._server_pid, self._proc)

    def find_trouble(self, now: float) -> str | None:
        """What is wrong with one of them at the time `now`; None when all run."""
        for pid, model in self._models.items():
            state, ppid = self._read(pid)
            if state in _DEAD or ppid != self._server_pid:
                return f"the process of the model {model} has died"
        return self.find_stopped(now)

    def find_stopped(self, now: float) -> str | None:
        """Which of them is stopped, if any: something that holds while models are loaded, too."""
        names = {pid: f"the process of the model {name}" for pid, name in self._models.items()}
        for pid, name in {self._server_pid: "the server's process", **names}.items():
            if self._read(pid)[0] not in _STOPPED:
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) >= STOPPED_S:
                return f"{name} is stopped"
        return None

    def _read(self, pid: int) -> tuple[str, int]:
        return read_state(self._proc / str(pid)) or ("X", 0)


def find_models(server_pid: int, proc: Path = PROC) -> dict[int, str]:
    """Names of the Python models that run, by the process id of each.

    The Python backend starts a process with the path of the model's `model.py` as an argument,
    <repository>/<model>/<version>/model.py. One that has ended but is still listed, a zombie, does
    not run.
    """
    found: dict[int, str] = {}
    for process in proc.iterdir():
        if not process.name.isdecimal():
            continue
        state, ppid = read_state(process) or ("X", 0)
        if ppid == server_pid and state not in _DEAD and (model := _find_model(process)):
            found[int(process.name)] = model
    return found


def has_dead_child(pid: int, proc: Path = PROC) -> bool:
    """Whether a child has ended and its parent has not asked why."""
    states = (read_state(one) for one in proc.iterdir() if one.name.isdecimal())
    return any(one is not None and one[1] == pid and one[0] in _DEAD for one in states)


def read_state(process: Path) -> tuple[str, int] | None:
    """The state's letter and the parent's id; None when it has ended."""
    try:
        # pid (command) state ppid …; the command may hold spaces and brackets.
        text = (process / "stat").read_text("utf-8", "replace")
        state, ppid = text.rpartition(")")[2].split()[:2]
        return state, int(ppid)
    except (OSError, ValueError):
        return None


def _find_model(process: Path) -> str | None:
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return None
    for argument in arguments:
        path = Path(argument.decode("utf-8", "replace"))
        if path.name == "model.py":
            return path.parent.parent.name
    return None
