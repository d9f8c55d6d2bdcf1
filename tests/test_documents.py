"""The documents: short enough to be read, and true of the files and commands that they name."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest

from dflash_trt.cli.main import COMMANDS
from dflash_trt.models.build_config import target_names

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("", "plugins/dflash_plugins", "plugins/dflash_plugins/block_attention")
"""Where a path in a document may begin."""
PATH = re.compile(r"[\w.\-/]+\.(?:py|md|yaml|png|toml)|[\w.\-/]+/")
"""A code span that is a path: a file of the project, or a folder with its stroke."""
EXAMPLES = ("results/", "NAME.py", "NAME.yaml", "FILE.yaml", "model.yaml", "model.py", "1/", "DIR/")
EACH = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def _missing(document: Path) -> list[str]:
    """Paths in code spans, code blocks apart, that are nowhere they could be meant to be."""
    prose = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    missing = []
    for part in re.split(r"\n\n|\n(?=\|)", prose):
        names = [span for span in re.findall(r"`([^`]+)`", part) if PATH.fullmatch(span)]
        # What a paragraph, or a row of a table, names may stand in a folder that it names as well.
        folders = [*FOLDERS, *(name for name in names if name.endswith("/"))]
        bases = [root / one for root in (ROOT, ROOT / "dflash_trt") for one in folders]
        for name in names:
            found = any((base / name).exists() for base in (*bases, document.parent))
            missing += [] if found or name.endswith(EXAMPLES) else [name]
    return missing


@pytest.mark.parametrize(
    ("document", "most"), [("README.md", 120), ("docs/structure.md", 130)], ids=str
)
def test_is_short_enough_to_be_read(document: str, most: int) -> None:
    assert len((ROOT / document).read_text(encoding="utf-8").splitlines()) <= most


@EACH
def test_names_files_that_exist(document: Path) -> None:
    assert not _missing(document)


@EACH
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    inside = [link for link in links if not link.startswith("http")]
    assert not [link for link in inside if not (document.parent / link).exists()]


@EACH
def test_names_commands_that_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"(?:^\$ |`)dflash-trt ([a-z-]+)", text, flags=re.MULTILINE)
    assert not set(named) - set(COMMANDS)


def test_every_command_has_a_row() -> None:
    rows = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"| `dflash-trt {name}" not in rows]


def test_named_targets_exist() -> None:
    targets = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"build --target ([\w.\-]+)", document.read_text(encoding="utf-8"))
    }
    assert targets - {"NAME", "DIR"} <= set(target_names())


def test_the_structure_names_every_package() -> None:
    structure = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "dflash_trt").glob("*/__init__.py")]
    assert not [name for name in packages if f"`{name}/" not in structure]


def test_no_class_shares_its_name() -> None:
    """With a class or an alias, as CONTRIBUTING asks; Triton's name is for both of its models."""
    folders = [ROOT / name for name in ("dflash_trt", "perf", "plugins")]
    code = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    classes = re.findall(r"^class ([A-Z]\w*)", code, re.MULTILINE)
    aliases = re.findall(r"^([A-Z]\w*)(?:: \w+)? = ", code, re.MULTILINE)
    assert {n for n in classes if n in aliases or classes.count(n) > 1} == {"TritonPythonModel"}


def test_what_the_first_gpu_needs_is_small() -> None:
    """What the page says to bring, unpacked, and pydantic with what it needs: below 30 MB."""
    page = (ROOT / "docs/first-gpu.md").read_text(encoding="utf-8")
    named = re.search(r"git archive .* HEAD ([\w ]+?) +#", page)
    assert named is not None
    files = [one for name in named[1].split() for one in (ROOT / name).rglob("*")]
    size = sum(one.stat().st_size for one in files if "__pycache__" not in one.parts)
    wheels = "pydantic pydantic_core annotated_types typing_inspection typing_extensions"
    for name in wheels.split():
        size += sum(one.size or 0 for one in distribution(name).files or ())
    assert 15_000_000 < size < 30_000_000
