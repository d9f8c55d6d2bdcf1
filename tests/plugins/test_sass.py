"""Instructions are counted in what the disassembler prints, and its refusals are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from dflash_plugins import sass
from dflash_plugins.sass import SassFacts, count_instructions, read_sass

from dflash_trt.errors import DflashError

LISTING = """\
.section\t.text.f,"ax",@progbits
.text.f:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64] ;
        /*0040*/               @P1 LDGSTS.E [R7], desc[UR4][R2.64] ;
        /*0050*/              @UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0060*/                   UBLKCP.S.G [UR8], [UR4], UR6 ;
        /*0070*/                   LDGDEPBAR ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0090*/                   LDSM.16.M88.4 R8, [R7] ;
        /*00a0*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00b0*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00c0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*00d0*/                   UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR12] ;
        /*00e0*/                   STL.64 [R1+0x8], R4 ;
        /*00f0*/                   LDL R4, [R1+0x8] ;
        /*0100*/                   STS.128 [R7], R4 ;
        /*0110*/                   STG.E.128 desc[UR4][R2.64], R4 ;
.L_x_0:
        /*10120*/                  EXIT ;
"""


def test_instructions_are_counted_by_what_they_do() -> None:
    assert count_instructions(LISTING) == SassFacts(
        asynchronous_copies=4,
        wide_accesses=3,
        mma={"HGMMA.64x64x16.F32.BF16": 1, "HMMA.16816.F32.BF16": 2, "UTCHMMA": 1},
        local_accesses=2,
        barriers=1,
    )


@pytest.mark.parametrize(
    ("said", "found"),
    [("Cannot decode architecture 'SM999'", None), ("not a cubin", "not a cubin")],
)
def test_an_unknown_architecture_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, found: str | None
) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text(f'#!/bin/sh\necho "nvdisasm fatal : {said}" >&2\nexit 1\n')
    tool.chmod(0o755)
    monkeypatch.setattr(sass, "newest_tool", lambda name: tool)
    if found is None:
        assert read_sass(b"") is None
        return
    with pytest.raises(DflashError, match=found):
        read_sass(b"")
