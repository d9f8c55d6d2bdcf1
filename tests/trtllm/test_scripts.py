"""The scripts of a deployment: preflight.py on machines that lack something, serve-triton.sh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_trt.cli.main import main
from tests.trtllm.conftest import QWEN3, TORCH, Run, install_tensorrt_llm

LAYERS = [1, 9, 17, 25, 33]
DRAFT = {
    "dflash_config": {"target_layer_ids": LAYERS, "mask_token_id": 151669},
    "block_size": 16,
}
AGREES = json.dumps(DRAFT)
OK = "ok: nothing is missing to serve dflash\n"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment for a B200, and beside it a machine that has what it needs."""
    root = tmp_path_factory.mktemp("deployed")
    assert main([*QWEN3, "-o", str(root / "d")]) == 0
    install_tensorrt_llm(root, "", "", {"PATH": ""})
    hub = f"def hf_hub_download(name, file): return '{root}/' + file"
    (root / "python" / "huggingface_hub.py").write_text(hub)
    (root / "config.json").write_text(AGREES)
    return root


def _preflight(
    deployed: Path, variant: str = "dflash", **written: str
) -> subprocess.CompletedProcess[str]:
    """Runs preflight.py where files of that machine or folder say something else."""
    places = {"torch": "python/torch.py", "trtllm": "python/tensorrt_llm/__init__.py"}
    places |= {"config": "config.json"}
    before = {key: (deployed / places[key]) for key in written}
    kept = {path: path.read_text() if path.exists() else None for path in before.values()}
    try:
        for key, text in written.items():
            before[key].write_text(text)
        return subprocess.run(
            [sys.executable, "-B", deployed / "d" / "preflight.py", variant],
            env={**os.environ, "PYTHONPATH": str(deployed / "python")},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for path, text_before in kept.items():
            path.unlink() if text_before is None else path.write_text(text_before)


def _with_memory(count: int) -> str:
    return TORCH.replace("178 << 30", str(count))


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ({"torch": _with_memory(80 << 30)}, "0: sm_100, 85,899,345,920 bytes, not sm_100, 180,000"),
        ({"torch": TORCH.replace("(10, 0)", "(9, 0)")}, "GPU 0: sm_90, 191,126,044,672 bytes, not"),
        ({"torch": TORCH.replace("1)", "0)")}, "there are 0 GPUs, the files are for 1"),
        ({"torch": "raise RuntimeError('no driver')"}, "be looked at (RuntimeError('no driver'))"),
        ({"trtllm": ""}, "this is TensorRT-LLM None, the files are for 1.3.0rc29"),
        ({"trtllm": "__version__ = '\\x1b[2J'"}, r"\x1b[2J', the files are for"),
        ({"trtllm": "import sys; sys.exit('\\x1b7')"}, "(SystemExit("),
        ({"config": "null"}, "the config.json of z-lab/Qwen3-8B-DFlash-b16 cannot be read as a"),
        ({"config": AGREES.replace("16}", '"16"}')}, "has block_size '16', not 16"),
        (
            {"config": AGREES.replace("[1, ", "[2, ")},
            f"z-lab/Qwen3-8B-DFlash-b16 has target_layer_ids [2, 9, 17, 25, 33], not {LAYERS}",
        ),
    ],
)
def test_what_a_machine_lacks(deployed: Path, written: dict[str, str], error: str) -> None:
    done = _preflight(deployed, **written)
    assert done.returncode == 1 and OK not in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and error in lines[0], lines
    assert lines[0].isprintable()


@pytest.mark.parametrize(
    ("written", "notes"),
    [
        ({}, []),
        ({"torch": _with_memory(int(0.91 * 180e9))}, []),
        ({"config": '{"block_size": 16}'}, ["target_layer_ids None", "mask_token_id None"]),
        ({"config": "{"}, ["cannot be read as a draft's (JSONDecodeError"]),
    ],
)
def test_a_machine_that_lacks_nothing(
    deployed: Path, written: dict[str, str], notes: list[str]
) -> None:
    done = _preflight(deployed, **written)
    assert done.returncode == 0 and done.stdout.endswith(OK), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(notes), lines
    for line, piece in zip(lines, notes, strict=True):
        assert line.startswith("note: ") and piece in line


def test_the_triton_script(run: Run, tmp_path: Path) -> None:
    run.well(*QWEN3, "-o", tmp_path / "d")
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    launcher, ours = 'printf "%s\\n" "$@"', {**os.environ, "PATH": python}
    machine = install_tensorrt_llm(tmp_path, "# TensorRT-LLM's own\n", launcher, ours)
    (tmp_path / "llmapi" / "tensorrt_llm" / "1" / "helpers.py").touch()

    def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(tmp_path / "d" / "serve-triton.sh"), *arguments],
            env={**machine, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    done = script("autoregressive", "--http-port=9000")
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()
    assert command[0] == "tritonserver" and command[-1] == "--http-port=9000"
    assert "--http-address=127.0.0.1" in command
    repository = Path(command[1].removeprefix("--model-repository="))
    served = {path.relative_to(repository).as_posix() for path in repository.rglob("*.*")}
    assert served == {
        f"tensorrt_llm/{name}"
        for name in ("config.pbtxt", "1/model.py", "1/helpers.py", "1/model.yaml")
    }
    arguments = yaml.safe_load((repository / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert arguments["model"] == "Qwen/Qwen3-8B" and "speculative_config" not in arguments
    for outcome, piece in (
        (script("medusa"), "there is no variant 'medusa', but autoregressive, dflash"),
        (script(LLMAPI="/nowhere"), "set LLMAPI to triton_backend/all_models/llmapi"),
        (script(PATH=python), "there is no trtllm-llmapi-launch"),
    ):
        assert outcome.returncode == 1 and piece in outcome.stderr
    (Path(machine["PYTHONPATH"]) / "flashinfer.py").unlink()
    lacking = script()
    assert lacking.returncode == 1 and not lacking.stdout
    note = "note: the config.json of z-lab/Qwen3-8B-DFlash-b16 cannot be read as a draft's"
    assert [line.split(" (")[0] for line in lacking.stderr.splitlines()[1:]] == [
        "error: dflash needs flashinfer of the package flashinfer-python",
        note,
    ]
