"""How much memory is free, and that a process takes no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.core import free_memory
from dflash_trt.core.free_memory import available_memory


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1,000 KiB available and cgroups below the folder returned."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    root = tmp_path / "sys/fs/cgroup"
    (root / "pods" / "mine").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pods/mine\n")
    monkeypatch.setattr(free_memory, "MEMORY_FILE", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "ROOT", tmp_path)
    return root


def _limit(group: Path, most: str, current: int, inactive_file: int = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\nfile 9\n")


def test_the_tightest_limit_counts(machine: Path) -> None:
    mine, pods = machine / "pods" / "mine", machine / "pods"
    assert available_memory() == 1000 << 10
    _limit(mine, "max", 5)
    assert available_memory() == 1000 << 10
    _limit(mine, "500000", 200_000)
    assert available_memory() == 300_000
    _limit(mine, "500000", 450_000, inactive_file=400_000)  # files that were read give way
    assert available_memory() == 450_000
    _limit(pods, "600000", 400_000)
    assert available_memory() == 200_000
    _limit(mine, "100", 200_000)
    assert available_memory() == 0
    _limit(mine, str(1 << 40), 0)
    _limit(pods, str(1 << 40), 0)
    assert available_memory() == 1000 << 10


def test_a_process_takes_no_more_than_is_free(tmp_path: Path) -> None:
    """Mappings that others share, as the caches, do not count; twice is as good as once."""
    (tmp_path / "meminfo").write_text("MemAvailable: 262144 kB\nSwapFree: 0 kB\n")
    code = (
        "import mmap, resource, sys; from pathlib import Path\n"
        "from dflash_trt.core import free_memory\n"
        "none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, none)\n"
        "free_memory.MEMORY_FILE = Path(sys.argv[1]); free_memory.stay_within_memory([])\n"
        "free_memory.stay_within_memory([]); shared = mmap.mmap(-1, 1 << 30)\n"
        "held = bytearray(128 << 20)\n"
        "try: bytearray(256 << 20)\n"
        "except MemoryError: print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "meminfo")], capture_output=True, text=True
    )
    assert done.stdout == "refused\n", done.stderr
