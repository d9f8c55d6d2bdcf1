"""`accept` on a GPU: it costs about one launch; PyTorch needs several for the same result."""

from __future__ import annotations

from typing import Any

from dflash_plugins.accept.accuracy import make_inputs
from dflash_plugins.accept.launch import make_case
from dflash_plugins.operation import Case
from dflash_plugins.testing.gpu import TorchRunner

ROWS = ((1, 8), (8, 8), (64, 8), (64, 16))


def points() -> list[Case]:
    """Verify steps of one sequence and of many."""
    return [make_case(f"{batch} × {rows} rows", batch=batch, rows=rows) for batch, rows in ROWS]


def measure(torch: Any, case: Case, runner: TorchRunner) -> dict[str, Any]:
    """The kernel's seconds and PyTorch's; no bandwidth, since it reads so little."""
    tensors = runner.upload(make_inputs(*case.inputs["token_ids"].shape))
    return runner.measure(case, tensors, {"operation by operation": lambda: settle(torch, tensors)})


def settle(torch: Any, tensors: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """accepted, new_tokens, bonus and new_start in PyTorch, one operation at a time."""
    tokens, choices, starts = (tensors[name] for name in ("token_ids", "choice_ids", "cache_start"))
    matches = (tokens[:, 1:] == choices[:, :-1]).int()
    accepted = matches.cumprod(dim=1).sum(dim=1)
    column = accepted[:, None]
    row = torch.arange(choices.shape[1], device=choices.device)
    new_tokens = torch.where(row <= column, choices, -1)
    return accepted.int(), new_tokens, choices.gather(1, column)[:, 0], starts + accepted + 1
