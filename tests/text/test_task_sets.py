"""Named sets of prompts: what names them, what a line may say, and data sets on the hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from dflash_trt.errors import DflashError
from dflash_trt.text.hub_prompts import HubPrompts
from dflash_trt.text.prompts import PromptRecord
from dflash_trt.text.task_sets import name_sources, read_task_set, read_task_sets

GSM8K = "hf://openai/gsm8k?config=main&split=test&column=question"


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(DflashError) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500
    return message


def test_names_of_sets() -> None:
    given = ["gsm8k=a/b.jsonl", "a/mt-bench.jsonl", GSM8K.replace("gsm8k", "math"), "x=hf://a/b"]
    assert name_sources(given) == {
        "gsm8k": "a/b.jsonl",
        "mt-bench": "a/mt-bench.jsonl",
        "math": GSM8K.replace("gsm8k", "math"),
        "x": "hf://a/b",
    }
    # A path keeps the "=" that it has.
    assert name_sources(["runs/t=1/set.jsonl"]) == {"set": "runs/t=1/set.jsonl"}


@pytest.mark.parametrize(
    ("given", "piece"),
    [
        (["a=x.jsonl", "a=y.jsonl"], "two sets are named 'a'; name them apart"),
        (["b/a.jsonl", "c/a.txt"], "two sets are named 'a'"),
        (["my set=x.jsonl"], "'my set' cannot name a set"),
        (["=x.jsonl"], "'' cannot name a set"),
        (["my prompts.jsonl"], "'my prompts' cannot name a set of prompts; give NAME=FILE"),
        (["all=x.jsonl"], "that is all sets together"),
        (["a="], "names no file"),
        ([f"{'n' * 41}=x.jsonl"], "cannot name a set"),
    ],
)
def test_names_that_are_refused(given: list[str], piece: str) -> None:
    assert piece in _message(lambda: name_sources(given))


def test_a_set_has_what_its_lines_say_and_no_more_than_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        {"prompt": "p", "answer": "42", "category": "math", "task_id": 3},
        {"prompt": "q", "answer": [1, 2], "category": None},
        {"prompt": "r"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("one\n\nprompt\n")
    sources = {"a": str(file), "b": str(tmp_path / "b.txt")}
    first, second = read_task_sets(sources)
    assert first.prompts == (
        PromptRecord("p", "42", "math"),
        PromptRecord("q", (1, 2)),
        PromptRecord("r"),
    )
    assert second.prompts == (PromptRecord("one\n\nprompt"),)
    assert [len(one.prompts) for one in read_task_sets(sources, limit=2)] == [2, 1]


@pytest.mark.parametrize(
    ("line", "piece"),
    [
        ('{"prompt": "a", "answer": 42}', '"answer" must be a text or token ids, not 42'),
        ('{"prompt": "a", "answer": [1, -2]}', '"answer" must be a text or token ids'),
        ('{"prompt": "a", "answer": [true]}', '"answer" must be a text or token ids'),
        ('{"prompt": "a", "category": ["x"]}', '"category" must be a text'),
        ('{"question": "a"}', 'must be an object with a text "prompt"'),
        ('{"prompt": ""}', "prompt 1: the prompt is empty"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, line: str, piece: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(line)
    assert piece in _message(lambda: read_task_set("a", str(file)))


class _Hub:
    """huggingface_hub's download function, over a folder in place of the network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[dict[str, Any]]()

    def write(self, path: str, *rows: object) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.asked.append({"name": name, **options})
        return str(self.folder)

    @property
    def downloaded(self) -> list[str]:
        """The files that the last question asks for."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        names = [path.relative_to(self.folder).as_posix() for path in files]
        patterns = self.asked[-1]["allow_patterns"]
        return sorted(name for name in names if any(fnmatchcase(name, one) for one in patterns))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Hub:
    hub = _Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_split_on_the_hub(hub: _Hub) -> None:
    hub.write("main/train.jsonl", {"question": "no"})
    hub.write("main/test.jsonl", {"question": "q1", "answer": "1"}, {"question": "q2"})
    hub.write("socratic/test.jsonl", {"question": "no"})
    hub.write("README.md", {})
    records = read_task_set("gsm8k", GSM8K).prompts
    assert records == (PromptRecord("q1"), PromptRecord("q2"))
    assert hub.downloaded == ["main/test.jsonl"]
    asked = hub.asked[-1]
    assert (asked["name"], asked["repo_type"], asked["revision"]) == (
        "openai/gsm8k",
        "dataset",
        None,
    )
    (one,) = read_task_set("gsm8k", f"{GSM8K}&answer=answer&revision=v1", limit=1).prompts
    assert one == PromptRecord("q1", "1")
    assert hub.asked[-1]["revision"] == "v1"


def test_shards_arrays_tables_and_files_by_name(hub: _Hub) -> None:
    hub.write("data/test-00000-of-00002.jsonl", {"prompt": "a"})
    hub.write("data/test-00001-of-00002.jsonl", {"prompt": "b"})
    hub.write("raw/question.json", [{"turns": ["first", "second"], "kind": "x"}])
    (hub.folder / "valid.csv").write_text('prompt,n\n"two\nlines",1\nc,2\n')

    def texts(query: str) -> list[str]:
        return [one.text for one in HubPrompts.parse(f"hf://me/set{query}").read()]

    assert texts("") == ["a", "b"]
    assert texts("?split=valid") == ["two\nlines", "c"]
    assert texts("?file=raw/question.json&column=turns") == ["first"]
    assert hub.downloaded == ["raw/question.json"]
    (record,) = HubPrompts.parse(
        "hf://me/set?file=raw/question.json&column=turns&category=kind"
    ).read()
    assert record.category == "x"
    assert "has no file such as train.jsonl" in _message(lambda: texts("?split=train"))
    assert "has no column 'promt' (nearest: 'prompt')" in _message(lambda: texts("?column=promt"))
    hub.write("data/test-00000-of-00002.jsonl", {"prompt": 3})
    assert "row 1: must be an object with a text" in _message(lambda: texts(""))
    hub.write("data/test-00000-of-00002.jsonl", ["prompt"])
    assert "row 1: is no object" in _message(lambda: texts("?split=test"))


def test_parquet(hub: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.write("data/test-0.parquet", {})
    parse = HubPrompts.parse("hf://me/set")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        message = _message(parse.read)
        assert "test-0.parquet: is Parquet, which needs pyarrow (" in message
        assert message.endswith("; pip install pyarrow")
    reason = "no pyarrow that goes with this NumPy"
    pyarrow = pytest.importorskip("pyarrow", reason=reason, exc_type=ImportError)
    parquet = pytest.importorskip("pyarrow.parquet", reason=reason, exc_type=ImportError)
    assert "is no readable Parquet" in _message(parse.read)
    table = pyarrow.table({"prompt": ["a", "b", "c"], "turns": [["x", "y"], ["z"], ["w"]]})
    parquet.write_table(table, hub.folder / "data" / "test-0.parquet", row_group_size=2)
    assert [one.text for one in parse.read()] == ["a", "b", "c"]
    turns = HubPrompts.parse("hf://me/set?column=turns")
    assert [one.text for one in turns.read(2)] == ["x", "z"]
    missing = HubPrompts.parse("hf://me/set?answer=turn")
    assert "has no column 'turn' (nearest: 'turns')" in _message(missing.read)


@pytest.mark.parametrize(
    ("address", "piece"),
    [
        ("hf://gsm8k", "names no data set; write it as hf://"),
        ("hf://a/b/c", "names no data set"),
        ("hf://a/b?colum=x", "no such key: 'colum' (nearest: 'column')"),
        ("hf://a/b?column", "is no address"),
        ("hf://a/b?column=", "column needs one value"),
        ("hf://a/b?column=x&column=y", "column needs one value"),
        ("hf://a/b?file=x.csv&split=test", "give file, or config and split, not both"),
        ("hf://[a/b", "is no address"),
    ],
)
def test_addresses_that_are_refused(address: str, piece: str) -> None:
    assert piece in _message(lambda: HubPrompts.parse(address))
