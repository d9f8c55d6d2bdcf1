"""Ways to spoil a checkpoint folder, and one way to assert a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.errors import DflashError
from tests.models.conftest import merged

Tensors = Mapping[str, torch.Tensor | None]


@contextmanager
def refused(*pieces: str) -> Iterator[None]:
    """Asserts a DflashError of one printable line that contains every given piece."""
    with pytest.raises(DflashError) as caught:
        yield
    message = str(caught.value)
    assert message.isprintable()
    for piece in pieces:
        assert piece in message


def edit_json(path: Path, **changes: Any) -> None:
    """Changes top-level keys of a JSON file, see `merged`."""
    path.write_text(json.dumps(merged(json.loads(path.read_text()), changes)))


def text_config_changer(folder: Path) -> Iterator[Any]:
    """For a fixture: writes a text config with some keys changed; the original comes back."""
    path = folder / "config.json"
    before = path.read_text()

    def change(**changes: Any) -> None:
        text = json.loads(before)["text_config"] | changes
        edit_json(path, text_config={key: one for key, one in text.items() if one is not None})

    yield change
    path.write_text(before)


def edit_tensors(file: Path, changes: Tensors) -> None:
    """Replaces, adds or (None) removes tensors of a .safetensors file."""
    tensors = {**load_file(file), **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})
