"""The benchmark that looks for overlapped phases, on listings and on what the compiler makes."""

from __future__ import annotations

import pytest
from dflash_perf.bench.attention_phases import measure, products_under_exponentials
from dflash_perf.bench.base import Work

EXPONENTIALS = "%w = math.exp2 %s : tensor<64x64xf32, #mma>"
HOPPER = f"""
scf.for %i = %a to %b step %c {{
  %s = ttng.warp_group_dot %q, %k
  %t = ttng.warp_group_dot_wait %s, %acc {{pendings = PENDINGS : i32}}
  {EXPONENTIALS}
  %fade = math.exp2 %x : tensor<64xf32, #mma>
  %acc = ttng.warp_group_dot %w, %v
  scf.yield %acc
}}
"""
BLACKWELL = f"""
ttng.tc_gen5_mma %q, %k
ttng.wait_barrier %done
{EXPONENTIALS}
ttng.tc_gen5_mma %w, %v
ttng.tc_gen5_mma %q, %k
scf.for %i = %a to %b step %c {{
  ttng.wait_barrier %done
  {EXPONENTIALS}
  ttng.wait_barrier %done
}}
"""


@pytest.mark.parametrize(
    ("listing", "under"),
    [
        (HOPPER.replace("PENDINGS", "0"), 0),
        (HOPPER.replace("PENDINGS", "1"), 1),
        (BLACKWELL, 1),
        (BLACKWELL.replace("scf.for", "ttng.tc_gen5_mma %q, %k\nscf.for"), 2),
        ("ttg.warp_specialize", None),
    ],
)
def test_products_under_exponentials_are_counted(listing: str, under: int | None) -> None:
    assert products_under_exponentials(listing) == under


@pytest.mark.exhaustive
def test_what_the_compiler_overlaps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """docs/design/roofline.md says so: another version of Triton language may do otherwise."""
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")
    figures = measure(Work(tmp_path_factory.mktemp("work"), 1))
    assert figures is not None
    found = {
        (row["arch"], row["loop"]): row["products_under_exponentials"] for row in figures["loops"]
    }
    assert found["sm_90a", "as it is"] == found["sm_90a", "scores a tile ahead"] == 0
    assert found["sm_100a", "as it is"] == 1 and found["sm_100a", "scores a tile ahead"] == 2
    assert found["sm_120a", "as it is"] == 0
    counts = figures["instructions_sm_90a"]
    assert 0.7 < counts["unmasked"] / counts["masked"] < 0.9
