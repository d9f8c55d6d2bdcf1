"""RoPE and windows: what configs may say, and the tables against transformers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_plugins.testing.numeric import epsilon

from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.families import FAMILIES
from dflash_trt.models.layers import read_windows
from dflash_trt.models.rope import (
    Llama3Scaling,
    Proportional,
    RopeSpec,
    YarnScaling,
    inverse_frequencies,
    read_rope,
    tables,
)
from dflash_trt.models.sizes import Windows
from tests.models.helpers import refused

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3_SPEC = RopeSpec(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))


def rope(**config: Any) -> RopeSpec:
    return read_rope(ConfigFields(config, Path("config.json")))


def test_every_place_a_theta_may_stand() -> None:
    assert rope() == RopeSpec(10000.0)
    assert rope(rope_theta=1000000) == RopeSpec(1e6)
    assert rope(rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == RopeSpec(5e5)
    assert rope(rope_theta=7.0, rope_scaling=None, rope_parameters={"rope_theta": 5e5}).theta == 5e5
    assert rope(rope_theta=1e6, rope_scaling={"type": "default"}) == RopeSpec(1e6)


def test_llama3_in_both_spellings() -> None:
    assert rope(rope_theta=5e5, rope_scaling=LLAMA3) == LLAMA3_SPEC
    assert rope(rope_parameters={**LLAMA3, "rope_theta": 5e5}) == LLAMA3_SPEC
    short = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    spec = rope(rope_scaling=short, max_position_embeddings=4096)
    assert spec.scaling == Llama3Scaling(8.0, 1.0, 4.0, 4096)


@pytest.mark.parametrize(
    ("config", "piece"),
    [
        *(
            ({"rope_scaling": {"rope_type": kind}}, f'rope_scaling.rope_type = "{kind}" is not')
            for kind in ("dynamic", "longrope", "proportional")
        ),
        ({"rope_parameters": {"type": "dynamic"}}, 'rope_parameters.type = "dynamic" is not'),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": YARN | {"short_factor": [1]}}, "rope_scaling.short_factor = [1] is not"),
        ({"rope_scaling": {"mrope_section": [1]}}, "rope_scaling.mrope_section"),
        ({"rope_theta": True}, "must be a number"),
    ],
)
def test_bad_values(config: dict[str, Any], piece: str) -> None:
    """The rest is in tests/frozen."""
    with refused("config.json", piece):
        rope(**config)


@pytest.mark.parametrize("key", ["factor", "attention_factor", "mscale", "beta_slow", "truncate"])
def test_a_null_is_what_transformers_takes_it_for(key: str) -> None:
    """A factor is then what the context grew by, and `truncate` is false."""
    theirs = pytest.importorskip("transformers")
    stated: Any = {"rope_scaling": YARN | {key: None}, "max_position_embeddings": 2048}
    spec = rope(**stated)
    init = theirs.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    wanted, gain = init(theirs.LlamaConfig(head_dim=64, **stated))
    np.testing.assert_allclose(inverse_frequencies(spec, 64), wanted.numpy(), rtol=1e-6)
    assert isinstance(spec.scaling, YarnScaling) and spec.scaling.attention_factor == gain


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize(
    "spec",
    [
        RopeSpec(1e4),
        RopeSpec(1e7),
        LLAMA3_SPEC,
        RopeSpec(1e4, Llama3Scaling(32, 1, 4, 64)),
        RopeSpec(1e6, Proportional(1.0, 2.7)),
    ],
)
def test_against_transformers(spec: RopeSpec, head_dim: int) -> None:
    """Nearly all frequencies to the last place; cos and sin to 1e-6, given equal frequencies."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    parameters: dict[str, Any] = {"rope_theta": spec.theta, "rope_type": "default"}
    if isinstance(spec.scaling, Proportional):
        parameters |= {"rope_type": "linear", "factor": spec.scaling.factor}
        assert rope(rope_scaling=parameters) == spec
    elif spec.scaling is not None:
        parameters |= {"rope_type": "llama3", **asdict(spec.scaling)}
    config = llama.LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    reference = llama.LlamaRotaryEmbedding(config)
    ours = inverse_frequencies(spec, head_dim)
    theirs = reference.inv_freq.numpy()
    # A rounding of the exponent counts ln(theta) times; a power, quotients and interpolation.
    roundings = np.log(spec.theta) + 6
    np.testing.assert_allclose(ours, theirs, rtol=roundings * epsilon(np.float32))
    assert np.mean(ours == theirs) > 0.9

    positions = 4096
    ids = torch.arange(positions)[None]
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), ids)
    our_cos, our_sin = tables(spec, head_dim, positions)
    half = head_dim // 2
    equal = ours == theirs
    for mine, other in ((our_cos, cos), (our_sin, sin)):
        np.testing.assert_allclose(
            mine[:, equal], other[0, :, :half].numpy()[:, equal], rtol=0, atol=1e-6
        )


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
