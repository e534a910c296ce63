"""Collectives read out of recorded HLO: CPU and TPU style, pairs and groups, tuples, asynchronous pairs, loops."""

from __future__ import annotations

import pytest

from conformance.hlo import Collective, collectives_of

_HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"


def _read(*lines: str, before: str = "") -> tuple[Collective, ...]:
    body = "".join(f"  {line}\n" for line in lines)
    return collectives_of(f"{_HEADER}{before}ENTRY %main.1 (p: f32[4]) -> f32[4] {{\n{body}}}\n")


def _one(line: str) -> Collective:
    (found,) = _read(line)
    return found


def test_a_permute_has_its_pairs_bytes_and_origin() -> None:
    found = _one(
        "%ppermute.1 = f32[1,3,1,8]{3,2,1,0} collective-permute(%slice.2), channel_id=1,"
        ' source_target_pairs={{4,0},{6,2}}, metadata={op_name="jit(f)/jvp()/shard_map/ppermute" stack_frame_id=2}'
    )
    assert (found.kind, found.dtypes, found.bytes) == ("collective-permute", ("f32",), 3 * 8 * 4), "what travels"
    assert found.pairs == ((4, 0), (6, 2)), "from where to where"
    assert found.op_name == "jit(f)/jvp()/shard_map/ppermute", "and why"
    assert [found.bytes_received(device) for device in (0, 2, 4)] == [96, 96, 0], "only destinations receive"


def test_a_device_that_sends_to_itself_receives_nothing() -> None:
    found = _one("%p = bf16[8]{0} collective-permute(%a), channel_id=1, source_target_pairs={{0,0},{1,2}}")
    assert [found.bytes_received(device) for device in (0, 1, 2)] == [0, 0, 16], "no wire from 0 to 0"


def test_the_start_and_done_of_a_tpu_permute_are_one_and_only_the_operand_counts() -> None:
    found = _read(
        "%collective-permute-start.1 = (bf16[1,1023,8,256]{3,2,1,0:T(8,128)(2,1)}, bf16[1,1023,8,256]{3,2,1,0:T(8,128)"
        "(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(bf16[1,1023,8,256]{3,2,1,0:T(8,128)(2,1)} %x),"
        " channel_id=3, source_target_pairs={{0,1},{1,2},{2,3}}",
        "%fusion = bf16[8]{0:T(256)} fusion(%y), kind=kLoop, calls=%fused",
        "%collective-permute-done.1 = bf16[1,1023,8,256]{3,2,1,0:T(8,128)(2,1)}"
        " collective-permute-done(%collective-permute-start.1)",
    )
    assert [(c.kind, c.is_async, c.bytes) for c in found] == [("collective-permute", True, 1023 * 8 * 256 * 2)]


def test_a_start_of_several_operands_counts_them_all_and_no_result() -> None:
    found = _one(
        "%s = ((bf16[4,8]{1,0}, f32[2]{0}), (bf16[4,8]{1,0}, f32[2]{0}), u32[], u32[])"
        " collective-permute-start(%a, %b), channel_id=1, source_target_pairs={{0,1}}"
    )
    assert (found.dtypes, found.bytes) == (("bf16", "f32"), 64 + 8), "both operands, once"


@pytest.mark.parametrize(
    ("text", "operand_bytes", "received"),
    [
        ("f32[1,16]{1,0} all-gather(%a), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={1}", 32, 32),
        ("f32[4]{0} reduce-scatter(%a), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}", 64, 48),
        ("f32[8]{0} all-reduce(%a), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add", 32, 32),
        ("f32[8]{0} all-to-all(%a), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", 32, 24),
        ("(f32[8]{0}, bf16[4]{0}) all-reduce(%a, %b), channel_id=1, replica_groups={}, to_apply=%add", 40, 40),
    ],
)
def test_bytes_are_those_of_the_operands_and_only_the_others_part_arrives(
    text: str, operand_bytes: int, received: int
) -> None:
    found = _one(f"%c = {text}")
    assert (found.bytes, found.bytes_received(0)) == (operand_bytes, received), "worked out by hand"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        # The devices at the places of the mesh: 0 4 / 1 5 / 2 6 / 3 7.
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=4,'b'=2,'c'=1], device_ids=([2,4]T(1,0)) {'a'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'a'}", ((3, 1), (2, 0))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("{}", (tuple(range(8)),)),
    ],
)
def test_groups_are_read_in_every_notation(groups: str, expected: tuple[tuple[int, ...], ...]) -> None:
    found = _one(f"%r = f32[8]{{0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add")
    assert found.groups == expected, "devices that talk to each other"


def test_a_notation_that_is_not_known_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match="replica groups in an unknown notation"):
        _one("%r = f32[8]{0} all-reduce(%a), channel_id=1, replica_groups=every_second, to_apply=%add")


def test_a_group_of_one_device_sends_nothing() -> None:
    found = _one("%r = f32[8]{0} all-reduce(%a), channel_id=1, replica_groups={{0},{1}}, to_apply=%add")
    assert found.bytes_received(0) == 0, "nobody else is there"


_LOOP = """%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %send.1 = f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
}

%compared (a: s32[]) -> pred[] {
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%a, %limit), direction=LT
}

%condition (p: (s32[], f32[8])) -> pred[] {
  ROOT %wrapped = pred[] fusion(%i), kind=kLoop, calls=%compared
}

"""
_WHILE = "%w = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body"


def test_what_stands_in_a_loop_counts_as_often_as_the_loop_turns() -> None:
    config = ', backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}'
    (known,) = _read(_WHILE + config, before=_LOOP)
    assert (known.trips, known.bytes_received(0)) == (3, 3 * 32), "as the compiler says"
    (counted,) = _read(_WHILE, before=_LOOP)
    assert counted.trips == 5, "as the condition says, through the fusion that holds it"


def test_a_loop_whose_turns_nobody_knows_has_no_trips() -> None:
    (found,) = _read(_WHILE, before=_LOOP.replace("constant(5)", "parameter(1)"))
    assert found.trips is None, "not guessed"
    assert found.bytes_received(0) == 32, "one turn at least"


def test_loops_in_loops_multiply_and_called_computations_count_once_a_call() -> None:
    outer = _LOOP + (f"%outer (p: (s32[], f32[8])) -> (s32[], f32[8]) {{\n  {_WHILE}\n}}\n\n")
    line = "%o = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%outer"
    (nested,) = _read(line + ', backend_config={"known_trip_count":{"n":"2"}}', before=outer)
    assert nested.trips == 10, "2 times 5"
    called = _read("%a = f32[8]{0} call(%x), to_apply=%body", "%b = f32[8]{0} call(%x), to_apply=%body", before=_LOOP)
    assert [collective.trips for collective in called] == [1, 1], "two calls"


def test_an_asynchronous_computation_and_a_fusion_are_looked_into() -> None:
    inner = (
        "%wrapped (p: f32[16]) -> f32[4] {\n"
        "  ROOT %rs = f32[4]{0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}\n"
        "}\n\n"
    )
    found = _read(
        "%async-start = ((f32[16]{0}), f32[4]{0}, u32[]) async-start(%x), calls=%wrapped",
        "%async-done = f32[4]{0} async-done(%async-start)",
        before=inner,
    )
    assert [(c.kind, c.bytes) for c in found] == [("reduce-scatter", 64)], "once, by what it wraps"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('%c = (f32[8]{0}) custom-call(%x), custom_call_target="xla_ffi_python_cpu_callback"', "host callback"),
        ("%i = ((f32[8]{0}), token[]) infeed(%t)", "infeed"),
        ("%o = token[] outfeed(%x, %t)", "outfeed"),
        ("%s = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=2", "send"),
        ("%r = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=2", "recv"),
    ],
)
def test_traffic_with_the_host_counts_as_communication(line: str, kind: str) -> None:
    assert _one(line).kind == kind, "no attention has a use for it"


def test_what_computes_is_no_communication() -> None:
    assert (
        _read(
            '%c = f32[8]{0} custom-call(%x), custom_call_target="TopK"',
            "%f = f32[8]{0} fusion(%all-reduce-like), kind=kLoop, calls=%somewhere_else",
            "%s = f32[8]{0} send-done(%s0), channel_id=2",
        )
        == ()
    ), "nothing leaves the device"
