"""Files that are no regular files, too large, or links to what is somebody else's."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.hostile.bundles import COMMANDS
from tests.hostile.case import BUILT, OUTSIDE, SECRET, THREAD, Command, HostileCase, draw_readers

COUNT = 240
_PAIR = (
    *(f"target/{name}.json" for name in ("config", "tokenizer", "tokenizer_config")),
    *(f"target/{name}.json" for name in ("generation_config", "special_tokens_map")),
    *("target/model.safetensors", "target/chat_template.jinja", "target/hf_quant_config.json"),
    *("target/model.safetensors.index.json", "target/LICENSE"),
    *("draft/config.json", "draft/model.safetensors", "draft/model.safetensors.index.json"),
    *("draft/draft_tokens.json", "prompts.jsonl", "target", "draft"),
)
_BUNDLE = (
    *("manifest.json", "draft.onnx", "target.onnx", "target_only.onnx", "prompts.jsonl"),
    *("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "tokenizer", "weights"),
    *("tokenizer/chat_template.jinja", "block_schedule.json", "weights/tables.safetensors"),
    *("weights/target/config.json", "weights/target/shard-00000.safetensors", "weights/draft"),
    *("weights/draft/model.safetensors.index.json", "weights/draft/shard-00000.safetensors"),
)
_NAMED: dict[str, tuple[str, ...]] = {
    "pair/pair.yaml": ("pair",),
    "m.gguf": (),
    "prompts.txt": ("bundle",),
    "prompts.jsonl": ("bundle",),
    "schedule.json": ("bundle",),
}
_ASKED = ("generate", "bundle", "--max-tokens", "2", *THREAD)
_NAMED_COMMANDS: dict[str, tuple[Command, ...]] = {
    "pair/pair.yaml": BUILT,
    "m.gguf": (("import-gguf", "m.gguf", "-o", "out/hf"),),
    "prompts.txt": ((*_ASKED, "--prompt-file", "prompts.txt"),),
    "prompts.jsonl": (("verify", "bundle", "--repeats", "0", "--prompts", "prompts.jsonl"),),
    "schedule.json": ((*_ASKED, "--prompt", "cab", "--block-schedule", "schedule.json"),),
}


def make(random: Random, number: int) -> HostileCase:
    """A file of a pair, of a bundle, or one named on the command line, replaced."""
    owner = random.choice(("pair", "pair", "bundle", "bundle", "named"))
    replace = random.choice(_WAYS)
    if owner == "pair":
        path, needs, commands = f"pair/{random.choice(_PAIR)}", ("pair",), draw_readers(random)
    elif owner == "bundle":
        path, needs = f"bundle/{random.choice(_BUNDLE)}", ("bundle",)
        commands = (random.choice(COMMANDS),)
    else:
        path = random.choice(sorted(_NAMED))
        needs, commands = _NAMED[path], _NAMED_COMMANDS[path]

    def damage(folder: Path) -> None:
        replace(folder / path, folder.parent / OUTSIDE)

    about = f"{path} {replace.__name__.strip('_').replace('_', ' ')}"
    return HostileCase(about, needs, damage, commands)


def _leads_out(path: Path, outside: Path) -> None:
    """To what was there, with a secret in it where that can stand."""
    if path.is_dir():
        shutil.move(path, outside / "x")
    elif path.exists():
        (outside / "x").write_bytes(path.read_bytes())
        path.unlink()
    else:
        (outside / "x").write_text(SECRET)
    path.symlink_to(outside / "x")


def _leads_out_to_a_secret(path: Path, outside: Path) -> None:
    _remove(path)
    (outside / "x").write_text(f'{{"a": "{SECRET}"}}\n')
    path.symlink_to(outside / "x")


def _leads_to_a_folder_of_secrets(path: Path, outside: Path) -> None:
    _remove(path)
    (outside / "tokenizer.json").write_text(SECRET)
    path.symlink_to(outside)


def _leads_nowhere(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to(outside / "nothing")


def _leads_to_itself(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to(path.name)


def _is_a_pipe(path: Path, outside: Path) -> None:
    _remove(path)
    os.mkfifo(path)


def _is_a_socket(path: Path, outside: Path) -> None:
    _remove(path)
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _is_a_folder(path: Path, outside: Path) -> None:
    _remove(path)
    path.mkdir()


def _never_ends(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to("/dev/zero")


def _is_said_by_the_kernel(path: Path, outside: Path) -> None:
    _remove(path)
    path.symlink_to("/proc/self/environ")


def _is_sparse_and_large(path: Path, outside: Path) -> None:
    if path.is_dir():
        _remove(path)
    with path.open("ab") as file:
        file.truncate(5 << 29)


def _cannot_be_read(path: Path, outside: Path) -> None:
    _remove(path)
    path.write_bytes(b"\0")
    path.chmod(0)


def _is_empty(path: Path, outside: Path) -> None:
    _remove(path)
    path.touch()


def _is_gone(path: Path, outside: Path) -> None:
    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_WAYS: tuple[Callable[[Path, Path], None], ...] = (
    *(_leads_out, _leads_out_to_a_secret, _leads_to_a_folder_of_secrets, _leads_nowhere),
    *(_leads_to_itself, _is_a_pipe, _is_a_socket, _is_a_folder, _never_ends),
    *(_is_said_by_the_kernel, _is_sparse_and_large, _cannot_be_read, _is_empty, _is_gone),
)
