"""How the drafts of a bundle share the noise of sampled draws."""

from __future__ import annotations

import numpy as np

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.core.arrays import Int64Array
from dflash_trt.sampling.coupling import DraftCoupling


def read_coupling(bundle: Bundle) -> DraftCoupling | None:
    """That of the bundle's drafts; None where they are the likeliest tokens.

    Raises:
        DflashError: the tokens that the draft chooses among cannot be read.
    """
    draft = bundle.manifest.draft
    if not draft.sharpness:
        return None
    return DraftCoupling(tuple(draft.sharpness), draft_token_ids(bundle))


def draft_token_ids(bundle: Bundle) -> Int64Array | None:
    """The tokens [K] that a bundle's draft chooses among; None where it is all of them."""
    if bundle.manifest.draft.token_count is None:
        return None
    return np.array(read_draft(bundle.folder / "weights" / "draft").token_ids, np.int64)
