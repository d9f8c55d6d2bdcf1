"""Teach the builder a new family: a row that says how its checkpoints name and shape things.

The "toy" family computes what Qwen3 does but calls its tensors decoder.* instead of model.*; its
checkpoint is the demo pair's target under those names. Nothing else is needed to build, run and
verify it, which is why its answers must be the demo pair's.

Needs nothing but dflash-trt; writes into the folder. In the project itself the row belongs into
FAMILIES of dflash_trt/models/families.py, beside a fixture in tests/reference.
Run it: python examples/add_a_family.py build/toy
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

import dflash_trt
from dflash_trt import Checkpoints
from dflash_trt.models.build_config import data_folder
from dflash_trt.models.families import FAMILIES, Family

TOY = Family(
    "toy", "ToyForCausalLM", qk_norm=True, prefix="decoder.", must_be_off=("use_sliding_window",)
)


def write_toy_checkpoint(folder: Path) -> Path:
    """The demo pair's target as the toy family would publish it."""
    shutil.copytree(data_folder("demo_pair") / "target", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [TOY.architecture]}))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name.replace("model.", TOY.prefix): tensors[name] for name in tensors}, file)
    return folder


def main(folder: str) -> None:
    FAMILIES.append(TOY)
    toy = Checkpoints(target_checkpoint=write_toy_checkpoint(Path(folder) / "target"))
    built = dflash_trt.build("demo", Path(folder) / "bundle", checkpoints=toy, overwrite=True)
    with dflash_trt.load(built.folder) as pair:
        (answer,) = pair.generate(["fleet #6400 to #6410 in kyiv at load 5\n"], max_tokens=32)
    print(f"{built.manifest.target.family}: {answer.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
