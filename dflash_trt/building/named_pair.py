"""What a request calls its pair: a name, a YAML file, or folders that need neither.

Of a YAML file everything that is wrong is told at once, the files that it names included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_trt.building.spec import Checkpoints
from dflash_trt.core.files import resolved
from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import (
    YAML_SUFFIXES,
    BuildConfig,
    CheckpointSource,
    advise_draft,
    load_config,
    resolve_builtin,
    resolve_file,
    target_names,
    targets_not_yet,
)
from dflash_trt.models.families import DRAFT_ARCHITECTURES
from dflash_trt.models.folder import CONFIG_NAME, read_config
from dflash_trt.models.hub import local_checkpoint

ROLES = ("target", "draft")
OWN_LAYER = "mtp"
"""In a draft's place: the layer in the target's own checkpoint (models/mtp.py)."""
_TRAIN = "add --draft-checkpoint DIR; `dflash-trt train-draft` makes one"
_BOTH = "pass --target-checkpoint DIR and --draft-checkpoint DIR"


def find_config(target: str | None, given: Checkpoints) -> tuple[BuildConfig, Path]:
    """The configuration of a pair, and the file from which its paths count.

    `target` is a name that `targets` lists, a YAML file, or a folder: one that has `target/` and
    `draft/`, one with a single YAML file, or a target's checkpoint whose draft is given. None
    stands for the two folders in `given`; a draft "mtp" is the target's own layer. Where there is
    no YAML file the configuration has the defaults, and the path a name for the pair.

    Raises:
        DflashError: nothing that can be a pair, or a YAML file with mistakes (usage).
    """
    if takes_own_layer(given):
        own = given.target_checkpoint or Path(target or "")
        own = own / "target" if _is_checkpoint(own / "target") else own
        return find_config(target, replace(given, draft_checkpoint=own))
    if target is None:
        return _given_pair(given)
    folder = Path(target)
    is_name = target in target_names() or target in targets_not_yet()
    if is_name or folder.suffix in YAML_SUFFIXES or not _is_folder(target):
        return load_config(target, partial(_missing_files, given=given))
    return _folder_pair(folder, given)


def takes_own_layer(given: Checkpoints, config: BuildConfig | None = None) -> bool:
    """Whether the draft is to be the target's own layer: as is `given`, else as `config` says."""
    folder = given.draft_checkpoint
    if folder is not None:
        return str(folder) == OWN_LAYER and not folder.is_dir()
    return config is not None and config.draft.checkpoint == OWN_LAYER


def _given_pair(given: Checkpoints) -> tuple[BuildConfig, Path]:
    folders = {"target": given.target_checkpoint, "draft": given.draft_checkpoint}
    found = {role: folder for role, folder in folders.items() if folder is not None}
    fix = f"give --target NAME, FILE.yaml or DIR, or {_BOTH.removeprefix('pass ')}"
    if not found:
        raise DflashError("no pair", fix=fix, usage=True)
    for role in ROLES:
        if role not in found:
            what = f"is missing beside --{next(iter(found))}-checkpoint"
            if role == "draft" and _is_checkpoint(found["target"]):
                fix = advise_draft(found["target"]) or _TRAIN
            raise DflashError(what, where=f"--{role}-checkpoint", fix=fix, usage=True)
    return _plain_config(found["target"], found["draft"])


def _folder_pair(folder: Path, given: Checkpoints) -> tuple[BuildConfig, Path]:
    """The pair that `folder` holds or names."""
    target, draft = folder / "target", given.draft_checkpoint
    if _is_checkpoint(target) and _is_checkpoint(draft or folder / "draft"):
        inner = given.target_checkpoint or target, draft or folder / "draft"
        return _plain_config(*inner, home=folder)
    if not _is_checkpoint(folder):
        files = sorted(one for one in folder.iterdir() if one.suffix in YAML_SUFFIXES)
        if len(files) == 1:
            return load_config(str(files[0]), partial(_missing_files, given=given))
        files_found = f"{len(files)} YAML files" if files else "no YAML file"
        what = f"holds no pair: neither target/ and draft/ nor a checkpoint, and {files_found}"
        raise DflashError(what, where=folder, fix=_BOTH, usage=True)
    if set(read_config(folder).get("architectures") or ()) & set(DRAFT_ARCHITECTURES):
        fix = f"give --target-checkpoint DIR --draft-checkpoint {folder}"
        raise DflashError("is a draft, not a target", where=folder, fix=fix, usage=True)
    if draft is None:
        fix = advise_draft(folder) or _TRAIN
        raise DflashError("is a target without a draft", where=folder, fix=fix, usage=True)
    return _plain_config(given.target_checkpoint or folder, draft)


def _is_folder(name: str) -> bool:
    try:
        return bool(name.strip()) and Path(name).is_dir()
    except (OSError, ValueError):  # no path can be so long, or hold a null
        return False


def _is_checkpoint(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file()


def _plain_config(target: Path, draft: Path, home: Path | None = None) -> tuple[BuildConfig, Path]:
    """The defaults for two folders, called after `home` or else after the target's."""
    target, draft = target.absolute(), draft.absolute()
    named = resolved(home or target)
    if home is None and named.name == "target":  # as in my-pair/target
        named = named.parent
    config = BuildConfig(
        target=CheckpointSource(checkpoint=str(target)),
        draft=CheckpointSource(checkpoint=str(draft)),
    )
    limits = [config.max_seq_len, *_positions(target)]
    config = config.model_copy(update={"max_seq_len": min(limits)})
    return config, named.parent / f"{named.name}.yaml"


def _positions(folder: Path) -> Iterator[int]:
    """How many positions a target was trained for; a build says what is wrong with others."""
    stated = read_config(folder).get("max_position_embeddings")
    if isinstance(stated, int) and not isinstance(stated, bool) and stated > 0:
        yield stated


def _missing_files(
    raw: Mapping[str, Any], path: Path, given: Checkpoints | None = None
) -> Iterator[tuple[str, str]]:
    """By key, the local files and folders that the YAML `raw` names and that are not there."""
    given = given or Checkpoints()
    folders = {"target": given.target_checkpoint, "draft": given.draft_checkpoint}
    for role in ROLES:
        source = raw.get(role)
        name = source.get("checkpoint") if isinstance(source, Mapping) else source
        if folders[role] is not None or not isinstance(name, str) or resolve_builtin(name):
            continue
        if role == "draft" and name == OWN_LAYER:
            continue
        try:
            local_checkpoint(name, base=path.parent)
        except DflashError as error:
            yield f"{role}.checkpoint", f"{error.what} ({error.where})"
    prompts = raw.get("prompts")
    if isinstance(prompts, str) and not resolve_file(prompts, path).is_file():
        yield "prompts", f"there is no such file ({resolve_file(prompts, path)})"
