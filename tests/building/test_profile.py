"""Profiles: a configuration's own, and plain GPUs."""

from __future__ import annotations

import pytest

from dflash_trt.building.profile import on_profile
from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import load_config


def test_a_gpu_and_a_number_are_a_profile() -> None:
    config, path = load_config("gpt-oss-120b")
    name, two = on_profile(config, "l40sx2", path)
    profile = two.profiles[name]
    assert (profile.gpu, profile.gpus, profile.nodes) == ("l40s", 2, 1)
    assert (two.max_batch, two.max_seq_len) == (config.max_batch, config.max_seq_len)
    # Of an NVL72 four GPUs are in a machine, of DGX Spark one.
    nodes = {"gb200x8": 2, "gb10x2": 2, "gb200x4": 1}
    found = {name: on_profile(config, name, path)[1].profiles[name].nodes for name in nodes}
    assert found == nodes


def test_its_own_profile_comes_first() -> None:
    config, path = load_config("gpt-oss-120b")
    name, chosen = on_profile(config, "b300x1", path)
    own = config.profiles[name]
    assert chosen.profiles == config.profiles
    assert (chosen.max_batch, chosen.max_seq_len) == (own.max_batch, own.max_seq_len)


def test_letters_of_any_case() -> None:
    config, path = load_config("gpt-oss-120b")
    assert [on_profile(config, name, path)[0] for name in ("B300X1", "L40Sx2")] == [
        "b300x1",
        "l40sx2",
    ]


def test_the_numbers_that_there_are() -> None:
    config, path = load_config("gpt-oss-120b")
    with pytest.raises(DflashError) as caught:
        on_profile(config, "B300X3", path)
    assert (caught.value.fix or "").startswith("choose one of b300x1, b300x2, b300x4, b300x8")


@pytest.mark.parametrize("name", ["l40sx3", "l40sx16", "gb10x4", "l40s", "l40sx", "l40sx-2"])
def test_other_numbers_are_none(name: str) -> None:
    config, path = load_config("gpt-oss-120b")
    with pytest.raises(DflashError, match="no profile"):
        on_profile(config, name, path)
