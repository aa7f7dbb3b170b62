"""The HLO oracle on texts: every notation of replica groups, and forms that this host's compiler does not print."""

from __future__ import annotations

import pytest

from autopar.verify.hlo_collectives import axes_of, instruction_counts, parse_collectives, parse_groups, tally

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"


def module(*lines: str, extra: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        HEAD
        + extra
        + "ENTRY %main.1_spmd (p: f32[8,16]) -> f32[8,16] {\n  %p = f32[8,16]{1,0} parameter(0)\n"
        + body
        + "\n}\n"
    )


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2], device_ids=([4]<=[2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
        ("mesh['x'=8] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_parse_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, 8) == groups


@pytest.mark.parametrize("text", ["[2,4]<=", "mash['a'=2] {'a'}"])
def test_groups_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        parse_groups(text, 8)


def test_axes_of() -> None:
    names = ("a", "b", "c")
    assert axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), (2, 2, 2), names) == ("c",)
    assert axes_of(((0, 5, 1, 4), (2, 3, 6, 7)), (2, 2, 2), names) == ("a", "c")
    assert axes_of(((0,), (1,)), (2,), ("a",)) == ()
    assert axes_of(((0, 4), (4, 0), (1, 1)), (2, 2, 2), names, permute=True) == ("a",)
    with pytest.raises(ValueError, match="run along no axes"):
        axes_of(((0, 3), (1, 2), (4, 7), (5, 6)), (2, 2, 2), names)


def test_operand_types_in_line_and_iota_groups() -> None:
    rows = parse_collectives(
        module("ROOT %ar = f32[8,16]{1,0} all-reduce(f32[8,16]{1,0} %p), replica_groups=[4,2]<=[8], to_apply=%add")
    )
    (row,) = rows
    assert (row.kind, row.operand_bytes, row.dtype, row.trips) == ("all-reduce", 512, "f32", 1)
    assert row.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_start_and_done_count_once() -> None:
    rows = parse_collectives(
        module(
            "%s = (f32[8,16]{1,0}, f32[32,16]{1,0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}",
            "%d = f32[32,16]{1,0} all-gather-done(%s)",
            "%q = (f32[8,16]{1,0:T(8,128)}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,0}}",
            "ROOT %r = f32[8,16]{1,0} collective-permute-done(%q)",
        )
    )
    assert [(r.kind, r.operand_bytes) for r in rows] == [("all-gather", 512), ("collective-permute", 512)]


def test_wrapped_async_counts_once() -> None:
    wrapped = (
        "%wrapped (w: f32[8,16]) -> f32[2,16] {\n  %w = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %rs = f32[2,16]{1,0} reduce-scatter(%w), replica_groups=[2,4]<=[8], to_apply=%add\n}\n\n"
    )
    rows = parse_collectives(
        module(
            "%s = ((f32[8,16]), f32[2,16], s32[]) async-start(%p), calls=%wrapped",
            "ROOT %d = f32[2,16]{1,0} async-done(%s), calls=%wrapped",
            extra=wrapped,
        )
    )
    assert [(r.kind, r.operand_bytes) for r in rows] == [("reduce-scatter", 512)]


def test_tuple_all_to_all_is_one() -> None:
    rows = parse_collectives(
        module(
            "%c = f32[2,16]{1,0} slice(%p), slice={[0:2], [0:16]}",
            "ROOT %t = (f32[2,16]{1,0}, /*index=1*/f32[2,16]{1,0}) all-to-all(%c, %c), replica_groups=[4,2]<=[8]",
        )
    )
    assert [(r.kind, r.operand_bytes) for r in rows] == [("all-to-all", 256)]


def test_combined_counts_elements_and_instructions() -> None:
    rows = parse_collectives(
        module(
            "%s = f32[] constant(1)",
            "%v = (f32[8,16]{1,0}, f32[]) all-reduce(%p, %s), replica_groups={}, to_apply=%add",
            "ROOT %w = f32[] all-reduce(%s), replica_groups={}, to_apply=%add",
        )
    )
    assert sorted(r.operand_bytes for r in rows) == [4, 4, 512]
    assert instruction_counts(rows) == {"all-reduce": 1}
    assert instruction_counts(rows, scalars=True) == {"all-reduce": 2}


def test_what_moves_nothing_is_left_out() -> None:
    rows = parse_collectives(
        module(
            "%z = f32[0,16]{1,0} slice(%p), slice={[0:0], [0:16]}",
            "%a = f32[0,16]{1,0} all-reduce(%z), replica_groups={}, to_apply=%add",
            "%b = f32[8,16]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
            "ROOT %c = f32[8,16]{1,0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}",
        )
    )
    assert rows == ()


def test_a_loop_in_a_called_computation_and_its_condition() -> None:
    bodies = (
        "%body (b: f32[8,16]) -> f32[8,16] {\n  %b = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %ar = f32[8,16]{1,0} all-reduce(%b), replica_groups={}, to_apply=%add\n}\n\n"
        "%cond (c: f32[8,16]) -> pred[] {\n  %c = f32[8,16]{1,0} parameter(0)\n"
        "  %m = f32[8,16]{1,0} all-reduce(%c), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%max\n"
        "  ROOT %k = pred[] constant(true)\n}\n\n"
        "%inner (i: f32[8,16]) -> f32[8,16] {\n  %i = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %w = f32[8,16]{1,0} while(%i), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}\n}\n\n'
    )
    rows = parse_collectives(module("ROOT %call = f32[8,16]{1,0} call(%p), to_apply=%inner", extra=bodies))
    known, unknown = tally(rows, (2, 4), ("a", "b"))
    assert known == {("all-reduce", ("a", "b"), 512): 3, ("all-reduce", ("a",), 512): 4}
    assert not unknown


def test_branches_and_unknown_trip_counts() -> None:
    bodies = (
        "%body (b: f32[8,16]) -> f32[8,16] {\n  %b = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %ar = f32[8,16]{1,0} all-reduce(%b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add\n}\n\n"
        "%cond (c: f32[8,16]) -> pred[] {\n  %c = f32[8,16]{1,0} parameter(0)\n  ROOT %k = pred[] constant(true)\n}\n\n"
    )
    rows = parse_collectives(
        module(
            "%i = s32[] constant(0)",
            "%w = f32[8,16]{1,0} while(%p), condition=%cond, body=%body",
            "ROOT %n = f32[8,16]{1,0} conditional(%i, %w, %w), branch_computations={%body, %body}",
            extra=bodies,
        )
    )
    known, unknown = tally(rows, (2, 4), ("a", "b"))
    assert known == {("all-reduce", ("a",), 512): 2}
    assert unknown == {("all-reduce", ("a",), 512): 1}


def test_collectives_that_autopar_never_emits_are_refused() -> None:
    with pytest.raises(ValueError, match="ragged-all-to-all"):
        parse_collectives(module("ROOT %r = f32[8,16]{1,0} ragged-all-to-all(%p, %p), replica_groups={{0,1}}"))


def test_text_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_collectives(HEAD)
