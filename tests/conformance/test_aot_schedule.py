"""The order of a TPU's program, out of its scheduled HLO: what stands between the start and the done of a transfer."""

from __future__ import annotations

from conformance.aot.schedule import Transfer, kernels_of, transfers_of

# Cut down from what libtpu prints for v6e; the kernel's configuration has lines of its own, one of which is "}}".
_HLO = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%inner (p: bf16[8]) -> bf16[8] {
  %p = bf16[8]{0} parameter(0)
  ROOT %collective-permute.9 = bf16[8]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

ENTRY %main_spmd (q: bf16[8], k: bf16[8]) -> bf16[8] {
  %q = bf16[8]{0:T(8,128)(2,1)} parameter(0)
  %k = bf16[8]{0} parameter(1)
  %collective-permute-start = (bf16[8]{0:T(8,128)S(1)}, u32[]{:S(2)}) collective-permute-start(%k), channel_id=1
  %fusion.1 = bf16[8]{0} fusion(%q), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"120"}
  %my_kernel_fwd.2 = bf16[8]{0} custom-call(%fusion.1), custom_call_target="tpu_custom_call", backend_config={"c":{
    "body":"…"
}}, metadata={op_name="jit(step)/kernel"}
  %collective-permute-start.1 = (bf16[8]{0}, bf16[8]{0}) collective-permute-start(%q), source_target_pairs={{1,0}}
  %collective-permute-done = bf16[8]{0} collective-permute-done(%collective-permute-start)
  %fusion.2 = bf16[8]{0} fusion(%q), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"7"}
  %collective-permute-done.1 = bf16[8]{0} collective-permute-done(%collective-permute-start.1)
  %all-reduce.3 = bf16[8]{0} all-reduce(%fusion.2), replica_groups={{0,1}}, to_apply=%add
  ROOT %my_kernel_bwd = bf16[8]{0} custom-call(%all-reduce.3), custom_call_target="tpu_custom_call"
}
"""


def test_a_transfer_is_hidden_by_the_kernels_between_its_start_and_its_own_done() -> None:
    first, second, third = transfers_of(_HLO)
    assert first == Transfer("collective-permute", "collective-permute-start", True, ("my_kernel_fwd.2",), 120), (
        "the kernel, and what XLA expects of its own fusion"
    )
    assert first.is_hidden, "a kernel runs meanwhile"
    assert (second.kernels, second.cycles) == ((), 7), "its own done, not the other's, ends it; a fusion hides little"
    assert not second.is_hidden, "no kernel"
    assert (third.kind, third.is_async) == ("all-reduce", False), "nothing runs beside what is not asynchronous"


def test_what_stands_in_other_computations_is_no_transfer_of_the_entry() -> None:
    assert len(transfers_of(_HLO)) == 3, "the collective of %inner is not counted"


def test_transfers_in_a_loop_and_kernels_in_a_loop_beside_one_are_seen() -> None:
    """A ring that is written as a loop: as many transfers as stand in it, not none."""
    loop = """\
%body (c: bf16[8]) -> bf16[8] {
  %collective-permute-start.5 = (bf16[8]{0}, bf16[8]{0}) collective-permute-start(%c), source_target_pairs={{0,1}}
  %step_kernel.1 = bf16[8]{0} custom-call(%c), custom_call_target="tpu_custom_call"
  ROOT %collective-permute-done.5 = bf16[8]{0} collective-permute-done(%collective-permute-start.5)
}

ENTRY %main_spmd"""
    turns = "  %while.1 = bf16[8]{0} while(%q), condition=%cond, body=%body\n  %collective-permute-done ="
    transfers = transfers_of(_HLO.replace("ENTRY %main_spmd", loop).replace("  %collective-permute-done =", turns, 1))
    assert len(transfers) == 4, "the three of the entry, and that of the loop, once"
    assert transfers[0].kernels == ("my_kernel_fwd.2", "step_kernel.1"), "a loop's kernels hide what travels beside it"
    assert (transfers[3].computation, transfers[3].kernels) == ("body", ("step_kernel.1",)), "and that inside it"


def test_kernels_are_counted_by_name_without_the_compilers_numbers() -> None:
    assert kernels_of(_HLO) == {"my_kernel_fwd": 1, "my_kernel_bwd": 1}, "forward and backward"


def test_a_program_that_sends_nothing_has_no_transfer() -> None:
    assert transfers_of("HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n") == ()
