"""The speculative ways to decode a pair, with the acceptance that is given or published for it."""

from __future__ import annotations

from dflash_trt.config import PublishedTau
from dflash_trt.errors import DflashError
from dflash_trt.planning.acceptance import AcceptanceCurve, read_acceptance
from dflash_trt.planning.decoding import DFlash, DraftTree, Eagle3
from dflash_trt.planning.known_pairs import PairShape


def published_decodings(
    pair: PairShape, acceptance: str | None = None, eagle3_tau: float | None = None
) -> list[DFlash | Eagle3]:
    """EAGLE-3 (only where its τ is known) and DFlash.

    Args:
        acceptance: DFlash's τ at the trained block, or a file: see `read_acceptance`.
        eagle3_tau: τ of the pair's EAGLE-3 tree.

    Raises:
        DflashError: DFlash's τ is neither given nor published, or one is impossible (usage).
    """
    drafts = pair.draft.block_size - 1
    if acceptance is not None:
        curve = read_acceptance(acceptance, drafts)
    elif pair.dflash is not None:
        curve = _published(pair.dflash, drafts)
    else:
        raise DflashError(
            f"no τ is published for {pair.name}",
            where="--acceptance",
            fix="give τ at the trained block, or a sweep's acceptance",
            usage=True,
        )
    dflash = DFlash(pair.target, pair.draft, curve)
    tree = DraftTree(*pair.eagle3_tree)
    if eagle3_tau is not None:
        eagle = AcceptanceCurve.of_tau(eagle3_tau, tree.depth, "given", "--eagle3-tau")
    elif pair.eagle3 is not None:
        eagle = _published(pair.eagle3, tree.depth)
    else:
        return [dflash]
    return [Eagle3(pair.target, eagle, tree), dflash]


def _published(one: PublishedTau, drafts: int) -> AcceptanceCurve:
    return AcceptanceCurve.of_tau(one.tau, drafts, f"{one.workload}; {one.source}")
