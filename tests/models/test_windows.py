"""Which layers slide, as the configs of each family say it: also by silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.families import FAMILIES
from dflash_trt.models.layers import read_windows
from dflash_trt.models.sizes import Windows
from tests.models.helpers import refused

SLIDING, FULL = "sliding_attention", "full_attention"
PUBLISHED_QWEN2 = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}


def windows(name: str, **config: Any) -> Windows:
    family = next(one for one in FAMILIES if one.name == name)
    return read_windows(ConfigFields(config, Path("config.json")), family, 4)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("qwen2", PUBLISHED_QWEN2, (None,) * 4),
        ("qwen2", {}, (None,) * 4),
        (
            "qwen2",
            PUBLISHED_QWEN2 | {"use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 131072),
        ),
        ("mistral", {"sliding_window": 4096}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {}, (4096,) * 4),
        ("gemma3", {"sliding_window": 512}, (512,) * 4),
        ("gemma3", {"sliding_window": 512, "sliding_window_pattern": 2}, (512, None, 512, None)),
        ("gpt_oss", {"sliding_window": 128}, (128, None, 128, None)),
        ("llama", {"layer_types": None, "sliding_window": 128}, (None,) * 4),
    ],
)
def test_windows_of_each_layer(name: str, config: dict[str, Any], expected: Windows) -> None:
    assert windows(name, **config) == expected


@pytest.mark.parametrize(
    ("name", "config", "piece"),
    [
        ("qwen2", {"layer_types": [SLIDING] * 4}, "must all be full_attention"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window is miss"),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING, FULL]}, "must all be sliding"),
        ("llama", {"layer_types": [SLIDING] * 4}, "must all be full_attention"),
    ],
)
def test_configs_that_contradict_their_family(
    name: str, config: dict[str, Any], piece: str
) -> None:
    with refused("config.json", piece):
        windows(name, **config)
