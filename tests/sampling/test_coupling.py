"""Drafts that share the noise of the target's draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.checkpoints.draft_kinds import TRAITS
from dflash_trt.errors import DflashError
from dflash_trt.sampling.choice import choose_tokens
from dflash_trt.sampling.coupling import LIKELIEST, DraftCoupling
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.speculation.coupling import Coupling, check_couples

PLACES = np.arange(30, 37)


def test_with_the_targets_own_logits_the_noise_draws_its_token() -> None:
    """With sharpness 1, at every position; without noise the likeliest is drafted."""
    sampling = SamplingParams(temperature=0.8, seed=11)
    logits = np.random.default_rng(1).normal(size=(7, 50)).astype(np.float32)
    logits[:, 9] = -np.inf
    likeliest, wanted = logits.argmax(axis=1), choose_tokens(logits, PLACES, sampling)
    drafts = DraftCoupling((1.0,) * 7).choose(logits, likeliest, sampling, 30)
    np.testing.assert_array_equal(drafts, wanted)
    assert (wanted != likeliest).any()
    some = (1.0, LIKELIEST, 1.0, LIKELIEST, LIKELIEST, 1.0, 1.0, 1.0)
    mixed = DraftCoupling(some).choose(logits, likeliest, sampling, 30)
    is_likeliest = np.array(some[:7]) == LIKELIEST
    among = np.flatnonzero(np.arange(50) != 9)[::-1]
    fewer = DraftCoupling((1.0,) * 7, among).choose(logits[:, among], likeliest, sampling, 30)
    np.testing.assert_array_equal(fewer, wanted)
    np.testing.assert_array_equal(mixed, np.where(is_likeliest, likeliest, wanted))


def test_a_coupling_agrees_as_often_as_it_must() -> None:
    """At least (1 - d) / (1 + d) of draws, d the total variation between the two laws."""
    chance = np.random.default_rng(2)
    target = chance.normal(size=30).astype(np.float32)
    draft = target + chance.normal(scale=0.5, size=30).astype(np.float32)
    laws = [np.exp(row) / np.exp(row).sum() for row in (target, draft)]
    apart = np.abs(laws[0] - laws[1]).sum() / 2
    agreed, draws = 0, 1500
    likeliest = np.full(draws, draft.argmax())
    sampling = SamplingParams(temperature=1.0, seed=3)
    rows = np.broadcast_to(draft, (draws, 30))
    drafts = DraftCoupling((1.0,) * draws).choose(rows, likeliest, sampling, 100)
    wanted = choose_tokens(np.broadcast_to(target, (draws, 30)), 100 + np.arange(draws), sampling)
    agreed = (drafts == wanted).mean()
    assert agreed > (1 - apart) / (1 + apart) - 3 / draws**0.5 / 2
    assert agreed > (likeliest == wanted).mean() + 0.1


def test_a_damaged_drafts_rows_stay_what_they_are() -> None:
    logits = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32)
    logits[0, 7], logits[1, 7] = np.nan, np.inf
    likeliest = np.array([7, 7, 9])
    coupling, sampling = DraftCoupling((1.0,) * 3), SamplingParams(temperature=5e-324, seed=1)
    drafts = coupling.choose(logits, likeliest, sampling, 4)
    assert drafts.tolist() == [7, 7, logits[2].argmax()]
    drafts = coupling.choose(logits[:2], likeliest[:2], sampling, 4)
    assert drafts.tolist() == [7, 7]


@pytest.mark.parametrize("kind", ["DSpark", "EAGLE-3"])
def test_drafts_that_go_on_from_each_other_do_not_couple(kind: str) -> None:
    with pytest.raises(DflashError, match="go on from each other"):
        check_couples(TRAITS[kind], Path("draft"))  # type: ignore[index]
    check_couples(TRAITS["DFlash"], Path("draft"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "coupling.json"
    file.write_text('{"schema_version": 1, "pair": "x", "sharpness": [0], "measured": []}')
    with pytest.raises(DflashError, match="sharpness") as refused:
        Coupling.read(file)
    assert refused.value.exit_code == 2
