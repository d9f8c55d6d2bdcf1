"""Where the models of a pair come from, and their shapes, which need no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflash_trt.building.named_pair import OWN_LAYER
from dflash_trt.deploy.planning.known_pairs import PairShape, as_pair, find_pair, pair_names
from dflash_trt.deploy.planning.read_shapes import (
    read_draft_shape,
    read_pair_shape,
    read_target_shape,
)
from dflash_trt.deploy.trtllm.arguments import ModelSource
from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import (
    BuildConfig,
    CheckpointSource,
    load_config,
    resolve_builtin,
)
from dflash_trt.models.hub import find_checkpoint, local_checkpoint
from dflash_trt.models.mtp import layer_shape
from dflash_trt.models.sizes import DecoderSizes


def find_source(
    source: CheckpointSource, path: Path, given: Path | None, option: str
) -> ModelSource:
    """A folder where there is one: the option's, one that ships with the project, a local one."""
    if given is not None and not given.is_dir():
        raise DflashError("there is no such folder", where=option, usage=True)
    folder = (
        given
        or resolve_builtin(source.checkpoint)
        or local_checkpoint(source.checkpoint, base=path.parent)
    )
    if folder is not None:
        return ModelSource(folder=folder)
    return ModelSource(name=source.checkpoint, revision=source.revision)


def fetch(source: ModelSource, path: Path, option: str) -> Path:
    """The model's folder, downloaded where it is a name; `option` is that of a local folder."""
    return source.folder or find_checkpoint(
        source.name or "", base=path.parent, revision=source.revision, option=option
    )


def check_own_layer(target: DecoderSizes, called: str, where: str | Path) -> None:
    """Refuses a target without an MTP layer, `called` what it is; DflashError (usage)."""
    if not target.has_state:
        what = f"has no MTP layer: it is {called}"
        raise DflashError(what, where=where, fix="pass a draft's folder", usage=True)


def read_shapes(
    target: ModelSource, draft: ModelSource | None, config: BuildConfig, path: Path
) -> PairShape:
    """Shapes from the folders there are, else of the public pair; a draft must fit its target.

    `draft` is None where it is the target's own layer.
    """
    if draft is None and target.folder is None:
        known = _public_pair(config, path)
        check_own_layer(known.target.sizes, str(known.architecture), config.target.checkpoint)
        return replace(known, draft=layer_shape(known.target))
    draft = draft or target
    if target.folder is not None and draft.folder is not None:
        return read_pair_shape(target.folder, draft.folder)
    known = _public_pair(config, path)
    if draft.folder is not None:
        return replace(known, draft=read_draft_shape(draft.folder, known.target))
    if target.folder is not None:
        shape = read_target_shape(target.folder)
        mine, wanted = (
            f"{len(sizes.layers)} layers of width {sizes.hidden_size}"
            for sizes in (shape.sizes, known.target.sizes)
        )
        if mine != wanted:
            raise DflashError(
                f"has {mine}; the target of {draft.name} has {wanted}",
                where=target.folder,
                fix="pass --draft-checkpoint too",
                usage=True,
            )
        return replace(known, target=shape)
    return known


def _public_pair(config: BuildConfig, path: Path) -> PairShape:
    """The configuration's own shape, or that of the shipped one of the same checkpoints."""
    if config.shape is not None:
        return as_pair(path.stem, config.shape)
    for name in pair_names():
        one = load_config(name)[0]
        if one.target.checkpoint == config.target.checkpoint and config.draft.checkpoint in (
            one.draft.checkpoint,
            OWN_LAYER,
        ):
            return find_pair(name)
    return find_pair(path.stem)
