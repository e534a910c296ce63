"""A kernel's static schedule out of libtpu's files: the hot region, the matrix units' share of it, turns of loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.aot.bundles import Schedule, dump_arguments, dumped_schedules, schedule_of

# Cut down from what libtpu writes for v6e: a loop whose body has a stretch of four bundles between its branches.
_BUNDLES = """\
= control target key start
LH: loop header
LB: loop body
= control target key end

     0   : > { %s1 = inlined_call_operand.hbm [shape: bf16[8]] }
   0x1 LB: > { %s2 = sld [smem:[#allocation25_spill]] }
   0x2   : > { %v1 = vld [vmem:[%s2] sm:$0xff] }
   0x3   : > { %756 = sbr.rel (%p24273_p6) target = $region44 }
   0x4   : > { %10 = vmatmul.mubr.bf16.gmra.mxu0 %v1  ;;  %11 = vmatmul.mubr.bf16.gmra.mxu1 %v1 }
   0x5   : > { %12 = vmatmul.mubr.bf16.gmra.mxu0 %v1 }
   0x6   : > { %v2 = vadd.f32 %v1, %v1 }
   0x7 PF: > { %s3 = sld [smem:[#allocation27_spill]] } /* Start/End empty region */
   0x8   : > { %p1 = scmp.ge.s32.totalorder %s44_s23, 3842 /* loop exit test */  ;;  %s4 = smov 0 }
   0x9   : > { %43 = sbr.rel (!%p1) target = $region166 }
"""
_SLOTS = """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 1 0 0 0 0
0 0 0 0 0 0 0 0 0 1
2 0 0 0 0 0 0 0 0 0
1 0 0 0 0 0 0 0 0 0
0 0 1 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
"""


def test_the_hot_region_is_the_longest_stretch_between_branches_and_labels() -> None:
    schedule = schedule_of(_BUNDLES, _SLOTS)
    assert (schedule.hot, schedule.program) == (4, 10), "from the branch at 0x3 to the label at 0x7; ten in all"
    assert schedule.trips == (3842,), "the loop's end is a constant"
    assert schedule.matrix_units == pytest.approx(3 / 8), "three of the two slots of four bundles"


def test_slots_that_are_not_those_of_these_bundles_say_nothing() -> None:
    assert schedule_of(_BUNDLES).matrix_units is None, "not written"
    assert schedule_of(_BUNDLES, _SLOTS + "0 0 0 0 0 0 0 0 0 0\n").matrix_units is None, "one row too many"


def test_the_schedules_of_a_folder_are_found_by_the_instruction_and_no_other(tmp_path: Path) -> None:
    for name in ("17-my_kernel.2-71-final_bundles", "18-my_kernel.21-71-final_bundles", "19-fusion.2-70-final_bundles"):
        (tmp_path / f"{name}.txt").write_text(_BUNDLES)
    (tmp_path / "17-my_kernel.2-70-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
    (tmp_path / "17-my_kernel.2-69-final_hlo-static-per-bundle-utilization.txt").write_text(_SLOTS)
    found = dumped_schedules(tmp_path, ("my_kernel.2", "my_kernel.3"))
    assert found == {"my_kernel.2": Schedule(4, 10, (3842,), 3 / 8)}, "of my_kernel.3 libtpu has written nothing"


def test_libtpu_is_told_to_write_what_is_read_and_where() -> None:
    arguments = dump_arguments(Path("/here"))
    assert "--xla_jf_dump_to=/here " in arguments, "the folder"
    assert "pass_label_regex=(final_bundles|final_hlo-static-per-bundle-utilization)" in arguments, "two of its passes"
