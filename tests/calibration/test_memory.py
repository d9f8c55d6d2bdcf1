"""How much memory there is, and how much a model takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.calibration import memory
from dflash_trt.checkpoints.target import read_target
from dflash_trt.quantization.linears import Algorithm
from tests.bundle.conftest import write_pair
from tests.quantization.running import quantize


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1,000 KiB available and cgroups below the folder returned."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    root = tmp_path / "cgroup"
    (root / "pods" / "mine").mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/pods/mine\n")
    monkeypatch.setattr(memory, "MEMORY_FILE", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "MEMBERSHIP_FILE", tmp_path / "membership")
    monkeypatch.setattr(memory, "CGROUP_ROOT", root)
    return root


def _limit(group: Path, most: str, current: int, inactive_file: int = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\nfile 9\n")


def test_the_tightest_limit_counts(machine: Path) -> None:
    mine, pods = machine / "pods" / "mine", machine / "pods"
    assert memory.available_memory() == 1000 << 10
    _limit(mine, "max", 5)
    assert memory.available_memory() == 1000 << 10
    _limit(mine, "500000", 200_000)
    assert memory.available_memory() == 300_000
    _limit(mine, "500000", 450_000, inactive_file=400_000)  # files that were read give way
    assert memory.available_memory() == 450_000
    _limit(pods, "600000", 400_000)
    assert memory.available_memory() == 200_000
    _limit(mine, "100", 200_000)
    assert memory.available_memory() == 0
    _limit(mine, str(1 << 40), 0)
    _limit(pods, str(1 << 40), 0)
    assert memory.available_memory() == 1000 << 10


@pytest.mark.parametrize("membership", ["0::/\n", "1:memory:/old\n", "", "0::/elsewhere\n"])
def test_no_limit_to_be_found(machine: Path, membership: str) -> None:
    memory.MEMBERSHIP_FILE.write_text(membership)
    _limit(machine / "pods", "100", 0)
    assert memory.available_memory() == 1000 << 10


def test_a_container_sees_its_own_limit_at_the_root(machine: Path) -> None:
    memory.MEMBERSHIP_FILE.write_text("0::/\n")
    _limit(machine, "500000", 100_000)
    assert memory.available_memory() == 400_000


def test_a_system_that_does_not_say(machine: Path) -> None:
    memory.MEMORY_FILE.unlink()
    memory.MEMBERSHIP_FILE.unlink()
    assert memory.available_memory() is None


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_quantised_weights_count_as_the_floats_they_become(
    tmp_path: Path, algorithm: Algorithm
) -> None:
    target = read_target(write_pair(tmp_path) / "target")
    exclude = ("*.down_proj",) if algorithm is Algorithm.NVFP4 else ()
    quantize(target, tmp_path / "q", algorithm, exclude=exclude)
    quantized = read_target(tmp_path / "q")
    wanted = memory.estimate_memory(target, None, 100, 100)
    assert memory.estimate_memory(quantized, None, 100, 100) == wanted
