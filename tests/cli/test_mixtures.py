"""The gpt-oss demo pair from the command line: what is shown, and NVFP4 experts as its twin."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.config import data_folder
from tests.cli.conftest import Run

DEMO = ["build", "--target", "demo-gpt-oss", "-o"]


def test_what_is_shown(run: Run, tmp_path: Path) -> None:
    built = run(*DEMO, tmp_path / "b")
    assert built.code == 0, built.err
    assert "target in BF16/MXFP4, draft in BF16" in built.out
    assert "quantised target: experts in MXFP4; excluded " in built.out
    shown = run("inspect", tmp_path / "b").out
    assert "4 experts of ffn 96 in MXFP4, 2 a row: each chosen one taken once a call" in shown
    assert "3 of 6 layers see 64 positions; attention sinks" in shown


def test_experts_in_nvfp4_are_a_twin_of_the_same_numbers(run: Run, tmp_path: Path) -> None:
    target = data_folder("demo_pair") / "gpt_oss" / "target"
    command = ["quantize", "--checkpoint", target, "--precision", "nvfp4", "-o", tmp_path / "t"]
    assert run(*command).code == 0
    assert run(*DEMO, tmp_path / "mxfp4").code == 0
    assert run(*DEMO, tmp_path / "nvfp4", "--target-checkpoint", tmp_path / "t").code == 0
    compared = run(
        "verify", tmp_path / "nvfp4", "--against", tmp_path / "mxfp4", "--json", "--max-tokens", 8
    )
    assert compared.code == 0, compared.err
    quality = compared.json["text"]
    assert quality["agreement"] == 1 and quality["max_kl"] == 0
