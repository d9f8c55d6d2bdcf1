"""How many threads a step gets: cores, not hardware threads, and what containers leave of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.hardware.cores import AUTO, SMALL_TARGET, choose_threads, count_cores

V2 = "0::/kube/pod"
V1 = "9:name=systemd:/\n3:cpuacct,cpu:/kube/pod\n0::/"


def _machine(root: Path, files: dict[str, str], cores: int, threads: int = 2) -> Path:
    """Cores of `threads` hardware threads each, numbered as Linux does, and further files."""
    for cpu in range(cores * threads):
        siblings = ",".join(str(cpu % cores + cores * other) for other in range(threads))
        name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files = {**files, name: siblings}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("cpus", "files", "expected"),
    [
        (range(16), {}, 8),
        ({0, 8}, {}, 1),  # one core's two hardware threads
        ({0, 1, 9}, {}, 2),
        (range(16), {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/pod/cpu.max": "300000 100000"}, 3),
        (range(16), {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/cpu.max": "250000 100000"}, 2),
        (range(16), {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/cpu.max": "50000 100000"}, 1),
        (range(16), {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/pod/cpu.max": "max 100000"}, 8),
        (
            range(16),
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/kube/pod/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/kube/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/kube/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
)
def test_cores_of_a_machine(
    tmp_path: Path, cpus: set[int], files: dict[str, str], expected: int
) -> None:
    assert count_cores(set(cpus), _machine(tmp_path, files, 8)) == expected


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert count_cores({0, 1, 2}, tmp_path) == 3


def test_a_small_target_gets_one_thread_and_wishes_are_kept() -> None:
    assert choose_threads(AUTO, SMALL_TARGET - 1) == 1
    assert choose_threads(7, 1) == 7
    script = "from dflash_trt.hardware.cores import *; print(choose_threads(AUTO, SMALL_TARGET));"
    one = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{one}}}); {script}"
    done = subprocess.run([sys.executable, "-c", pinned], capture_output=True, check=True)
    assert done.stdout == b"1\n"
