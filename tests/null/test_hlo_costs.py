"""Work of compiled programs, counted by hand on small texts of the three compilers' dialects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost.collectives import collective_s
from autopar.ir.cluster import LinkSpec, MeshAxis
from autopar.verify.estimate import Estimate, Rates, estimate, groups_s
from autopar.verify.hlo_collectives import collectives
from autopar.verify.hlo_costs import Work, works
from autopar.verify.hlo_loops import executed
from autopar.verify.hlo_text import Array, Module, arrays, parse, type_from_text

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=4\n\n"
LINK = LinkSpec(latency_s=1e-6, bytes_per_s=1e9)
RATES = Rates(
    flops_per_s=(("bfloat16", 2e6), ("float32", 1e6)), memory_bytes_per_s=1e6,
    axes=(MeshAxis(name="x", size=4, link=LINK),),
)  # fmt: skip


def module(*lines: str, extra: str = "") -> Module:
    body = "\n".join(f"  {line}" for line in lines)
    return parse(f"{HEAD}{extra}\nENTRY %main (p: f32[8,16]) -> f32[8,16] {{\n{body}\n}}\n")


def work(m: Module) -> dict[str, Work]:
    return {w.instruction: w for w in works(m)}


def seconds(m: Module, unknown_trips: int = 1) -> Estimate:
    return estimate(m, RATES, unknown_trips)


# --- types -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size", "stored"),
    [
        ("f32[8,16]{1,0}", 512, 512),
        ("pred[]", 1, 1),
        ("s4[3]{0:E(4)}", 2, 2),
        ("f32[8,16]{1,0:T(8,128)}", 512, 8 * 128 * 4),
        ("f32[3,8,16]{0,2,1:T(8,128)}", 1536, 8 * 16 * 128 * 4),  # the minor-most dimension has the lanes
        ("bf16[17,128]{1,0:T(8,128)(2,1)}", 17 * 256, 24 * 256),
        ("f32[100]{0:T(128)S(1)}", 400, 512),
        ("bf16[5,1,128]{2,1,0:T(2,128)(2,1)S(1)}", 1280, 5 * 2 * 256),
        ("f32[]{:T(128)}", 4, 512),
    ],
)
def test_bytes_of_a_type(text: str, size: int, stored: int) -> None:
    array = type_from_text(text)
    assert isinstance(array, Array)
    assert (array.bytes, array.stored_bytes) == (size, stored)


def test_tuples_and_memories() -> None:
    found = type_from_text("((f32[2]{0}), /*index=1*/bf16[3,4]{0,1:T(8,128)(2,1)S(1)}, token[], u32[]{:S(2)})")
    assert [(a.dtype, a.dims, a.space) for a in arrays(found)] == [
        ("f32", (2,), 0),
        ("bf16", (3, 4), 1),
        ("u32", (), 2),
    ]
    with pytest.raises(ValueError, match="cannot read HLO type"):
        type_from_text("(f32[2]{0}")


# --- products ----------------------------------------------------------------------------------------------------


def test_a_dot_reads_its_operands_and_writes_its_result() -> None:
    m = module(
        "%a = bf16[3,8,16]{2,1,0} parameter(0)",
        "%b = bf16[3,16,4]{2,1,0} parameter(1)",
        "ROOT %d = f32[3,8,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
        "rhs_contracting_dims={1}",
    )
    found = work(m)["d"]
    assert found.flops == (("bf16", 2.0 * 3 * 8 * 4 * 16),)
    assert found.bytes == 3 * (8 * 16 * 2 + 16 * 4 * 2 + 8 * 4 * 4)
    assert seconds(m).seconds == pytest.approx(max(found.flops[0][1] / 2e6, found.bytes / 1e6))


@pytest.mark.parametrize(
    ("window", "labels", "lhs", "rhs", "out", "flops"),
    [
        # 4 of 6 positions have 3 taps inside, the ends 2
        ("size=3 pad=1_1", "b0f_0io->b0f", (2, 6, 5), (3, 5, 7), (2, 6, 7), 2 * 2 * 7 * 5 * (4 * 3 + 2 * 2)),
        ("size=3 stride=2", "b0f_0io->b0f", (2, 7, 5), (3, 5, 7), (2, 3, 7), 2 * 2 * 7 * 5 * 9),
        # two groups: the kernel has the inputs of one
        ("size=1", "b0f_0io->b0f", (2, 6, 8), (1, 4, 10), (2, 6, 10), 2 * 2 * 10 * 4 * 6),
        # between the elements of a dilated input there is nothing
        ("size=2 pad=1_1 lhs_dilate=2", "b0f_0io->b0f", (1, 3, 1), (2, 1, 1), (1, 6, 1), 2 * 6),
        # a product of 16 heads, as TPU compilers write it
        ("size=16 pad=15_15 rhs_reversal=1", "bf0_i0o->b0f",
         (8, 32, 1), (32, 16, 64), (8, 16, 64), 2 * 8 * 16 * 64 * 32),
        ("size=8x16 stride=7x15 lhs_dilate=8x16", "0b1f_0o1i->01bf",
         (8, 4, 16, 64), (8, 4, 16, 64), (8, 16, 4, 4), 2 * 8 * 16 * 4 * 4 * 64),
    ],
)  # fmt: skip
def test_flops_of_a_convolution(
    window: str, labels: str, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...], flops: int
) -> None:
    def text(dims: tuple[int, ...]) -> str:
        return f"f32[{','.join(map(str, dims))}]"

    m = module(
        f"%a = {text(lhs)} parameter(0)",
        f"%b = {text(rhs)} parameter(1)",
        f"ROOT %c = {text(out)} convolution(%a, %b), window={{{window}}}, dim_labels={labels}",
    )
    assert work(m)["c"].flops == (("f32", float(flops)),)


def test_calls_of_libraries() -> None:
    m = module(
        "%a = bf16[8,16]{1,0} parameter(0)",
        "%b = bf16[16,4]{1,0} parameter(1)",
        "%x = f32[2,6,5]{2,1,0} parameter(2)",
        "%k = f32[3,5,7]{2,1,0} parameter(3)",
        "%y = f32[2,4,7]{2,1,0} parameter(4)",
        '%g = (bf16[8,4]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}',
        "%w = (f32[3,5,7]{2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3}, dim_labels=b0f_0io->b0f, "
        'custom_call_target="__cudnn$convBackwardFilter"',
        '%t = bf16[8,16]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000","bytes_accessed":"5"}}}',
        '%o = bf16[8,16]{1,0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"',
        'ROOT %s = bf16[8,16]{1,0} custom-call(%a), custom_call_target="ConcatBitcast"',
    )
    found = work(m)
    assert found["g"].flops == (("bf16", 2.0 * 8 * 4 * 16),)
    assert found["g"].bytes == 2 * (8 * 16 + 16 * 4 + 8 * 4), "the workspace moves nothing"
    assert found["w"].flops == (("f32", 2.0 * 2 * 7 * 5 * 4 * 3),)
    assert found["t"].flops == (("bf16", 1000.0),)
    assert found["o"].opaque == "__gpu$xla.gpu.triton" and found["o"].bytes == 512
    assert "s" not in found
    assert seconds(m).opaque == ("__gpu$xla.gpu.triton",)


# --- fusions -----------------------------------------------------------------------------------------------------


def fusion(root: str, *inside: str, operand: str = "f32[8,16]{1,0}", attributes: str = "") -> Module:
    """A fusion of one operand, and an index."""
    extra = "\n".join(
        [f"%inner (q: {operand}, i: s32[]) -> {root} {{", f"  %q = {operand} parameter(0)",
         "  %i = s32[] parameter(1)", *(f"  {line}" for line in inside), "}", ""]
    )  # fmt: skip
    return module(
        f"%p = {operand} parameter(0)", "%n = s32[] parameter(1)",
        f"ROOT %f = {root} fusion(%p, %n), kind=kLoop, calls=%inner{attributes}", extra=extra,
    )  # fmt: skip


def test_a_fusion_reads_and_writes_once() -> None:
    m = fusion(
        "f32[8,16]{1,0}",
        "%e = f32[8,16]{1,0} exponential(%q)",
        "%m = f32[8,16]{1,0} multiply(%e, %q)",
        "ROOT %a = f32[8,16]{1,0} add(%m, %q)",
    )
    assert work(m)["f"].bytes == 2 * 512


def test_slices_of_an_operand_count_as_slices() -> None:
    m = fusion(
        "f32[1,16]{1,0}",
        "%c = bf16[8,16]{1,0} convert(%q)",
        "%z = s32[] constant(0)",
        "%d = bf16[1,16]{1,0} dynamic-slice(%c, %i, %z), dynamic_slice_sizes={1,16}",
        "ROOT %a = f32[1,16]{1,0} convert(%d)",
    )
    assert work(m)["f"].bytes == 64 + 4 + 64, "the conversion is of the row alone"


def test_an_update_in_place_counts_the_update() -> None:
    m = fusion(
        "f32[8,16]{1,0}",
        "%z = s32[] constant(0)",
        "%u = f32[1,16]{1,0} broadcast(%z), dimensions={}",
        "%d = f32[8,16]{1,0} dynamic-update-slice(%q, %u, %i, %z)",
        "ROOT %b = f32[8,16]{1,0} bitcast(%d)",
    )
    assert work(m)["f"].bytes == 64 + 4


def test_a_gather_reads_its_rows() -> None:
    m = fusion(
        "f32[2,16]{1,0}",
        "%j = s32[2,1]{1,0} broadcast(%i), dimensions={}",
        "ROOT %g = f32[2,16]{1,0} gather(%q, %j), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, "
        "index_vector_dim=1, slice_sizes={1,16}",
        operand="f32[1000,16]{1,0}",
    )
    assert work(m)["f"].bytes == 128 + 4 + 128


def test_a_fusion_in_a_fusion_and_several_results() -> None:
    nested = (
        "%deep (r: f32[8,16]) -> bf16[8,16] {\n  %r = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %c = bf16[8,16]{1,0} convert(%r)\n}\n\n"
        "%inner (q: f32[8,16], w: f32[16,4]) -> (f32[8,4], f32[8,16]) {\n  %q = f32[8,16]{1,0} parameter(0)\n"
        "  %w = f32[16,4]{1,0} parameter(1)\n"
        "  %n = bf16[8,16]{1,0} fusion(%q), kind=kLoop, calls=%deep\n"
        "  %d = f32[8,4]{1,0} dot(%n, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT %t = (f32[8,4]{1,0}, f32[8,16]{1,0}) tuple(%d, %q)\n}\n\n"
    )
    m = module(
        "%p = f32[8,16]{1,0} parameter(0)",
        "%w = f32[16,4]{1,0} parameter(1)",
        "ROOT %f = (f32[8,4]{1,0}, f32[8,16]{1,0}) fusion(%p, %w), kind=kCustom, calls=%inner",
        extra=nested,
    )
    found = work(m)["f"]
    assert found.flops == (("bf16", 2.0 * 8 * 4 * 16),)
    assert found.bytes == 512 + 256 + 128, "what is handed on stays where it is"


def test_arrays_on_the_chip_and_padding() -> None:
    m = module(
        "%p = f32[8,16]{1,0:T(8,128)} parameter(0)",
        "%s = (f32[8,16]{1,0:T(8,128)S(1)}, f32[8,16]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)",
        "%d = f32[8,16]{1,0:T(8,128)S(1)} copy-done(%s)",
        "%e = f32[8,16]{1,0:T(8,128)S(1)} exponential(%d)",
        "%h = ((f32[8,16]{1,0:T(8,128)}), f32[8,16]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%p), "
        "slice={[0:8], [0:16]}",
        "%i = f32[8,16]{1,0:T(8,128)S(1)} slice-done(%h)",
        "ROOT %n = f32[8,16]{1,0:T(8,128)} negate(%i)",
    )
    found = work(m)
    padded = 8 * 128 * 4
    assert found["s"].bytes == padded and found["s"].is_start and found["d"].awaits == "s"
    assert "e" not in found
    assert found["h"].bytes == padded
    assert found["n"].bytes == padded
    gpu = module("%p = f32[8]{0:S(1)} parameter(0)", "ROOT %n = f32[8]{0} negate(%p)")
    assert work(gpu)["n"].bytes == 64, "a GPU's memory 1 is main memory"


def test_copies_run_beside_products() -> None:
    def text(start: str) -> Module:
        return module(
            "%p = f32[100,100]{1,0:T(8,128)} parameter(0)",
            "%q = f32[100,100]{1,0:T(8,128)S(1)} parameter(1)",
            *([start] if start else []),
            "%m = f32[100,100]{1,0:T(8,128)S(1)} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            *(["%d = f32[100,100]{1,0:T(8,128)S(1)} copy-done(%s)"] if start else []),
            "ROOT %t = () tuple()",
        )

    start = "%s = (f32[100,100]{1,0:T(8,128)S(1)}, f32[100,100]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)"
    product_s, copy_s = 2e6 / 1e6, 104 * 128 * 4 / 1e6
    assert copy_s < product_s
    assert seconds(text("")).seconds == pytest.approx(product_s)
    assert seconds(text(start)).seconds == pytest.approx(product_s), "the memory is idle meanwhile"
    slow = Rates(flops_per_s=RATES.flops_per_s, memory_bytes_per_s=1e4, axes=RATES.axes)
    assert estimate(text(start), slow).seconds == pytest.approx(copy_s * 100), "what is left is waited for"


# --- loops -------------------------------------------------------------------------------------------------------


def loop(start: str, limit: str, step: str, direction: str = "LT", attributes: str = "") -> Module:
    bodies = (
        "%body (b: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {\n  %b = (s32[], f32[8,16]{1,0}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%b), index=0\n  %x = f32[8,16]{1,0} get-tuple-element(%b), index=1\n"
        f"  %one = s32[] constant({step})\n  %j = s32[] add(%i, %one)\n"
        "  %y = f32[8,16]{1,0} negate(%x)\n"
        "  %r = f32[8,16]{1,0} all-reduce(%y), replica_groups={}, to_apply=%add\n"
        "  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%j, %r)\n}\n\n"
        "%cond (c: (s32[], f32[8,16])) -> pred[] {\n  %c = (s32[], f32[8,16]{1,0}) parameter(0)\n"
        f"  %i = s32[] get-tuple-element(%c), index=0\n  %n = s32[] constant({limit})\n"
        f"  ROOT %k = pred[] compare(%i, %n), direction={direction}\n}}\n\n"
    )
    return module(
        "%p = f32[8,16]{1,0} parameter(0)",
        "%u = s32[] parameter(1)",
        f"%z = s32[] {start}",
        "%c = s32[] copy(%z)",
        "%v = (s32[], f32[8,16]{1,0}) tuple(%c, %p)",
        f"ROOT %w = (s32[], f32[8,16]{{1,0}}) while(%v), condition=%cond, body=%body{attributes}",
        extra=bodies,
    )


@pytest.mark.parametrize(
    ("m", "trips"),
    [
        (loop("constant(0)", "5", "1"), 5),
        (loop("constant(1)", "6", "2"), 3),
        (loop("constant(0)", "5", "1", "LE"), 6),
        (loop("constant(7)", "5", "1"), 0),
        (loop("copy(%u)", "5", "1"), None),
        (loop("copy(%u)", "5", "1", attributes=', backend_config={"known_trip_count":{"n":"4"}}'), 4),
    ],
)
def test_trips_of_loops(m: Module, trips: int | None) -> None:
    [found] = {run.trips for run in executed(m) if run.computation == "body"}
    assert found == trips
    [row] = collectives(m)
    assert (row.trips, row.operand_bytes) == (trips, 512)
    once = estimate(module("%p = f32[8,16]{1,0} parameter(0)", "ROOT %y = f32[8,16]{1,0} negate(%p)"), RATES).seconds
    count = 3 if trips is None else trips
    result = seconds(m, 3)
    assert result.memory_bytes >= count * 1024
    assert result.communication_s == pytest.approx(count * collective_s("all-reduce", 4, 512, LINK))
    assert result.compute_s >= count * once
    assert result.assumes_trips == (trips is None)


# --- collectives -------------------------------------------------------------------------------------------------


def test_combined_and_asynchronous_collectives() -> None:
    m = module(
        "%p = f32[8,16]{1,0} parameter(0)",
        "%b = f32[16]{0} parameter(1)",
        "%s = ((f32[8,16]{1,0}, f32[16]{0}), (f32[32,16]{1,0}, f32[64]{0})) all-gather-start(%p, %b), "
        "replica_groups=[1,4]<=[4], dimensions={0}",
        "%d = (f32[32,16]{1,0}, f32[64]{0}) all-gather-done(%s)",
        "ROOT %r = (f32[8,16]{1,0}, f32[16]{0}) all-reduce(%p, %b), replica_groups={{0,1},{2,3}}, to_apply=%add",
    )
    rows = collectives(m)
    assert [(r.kind, r.operand_bytes, len(r.groups)) for r in rows] == [
        ("all-gather", 512, 1), ("all-gather", 64, 1), ("all-reduce", 512, 2), ("all-reduce", 64, 2),
    ]  # fmt: skip
    assert works(m)[0].bytes == 0, "what a collective moves is of the wire"
    pairs = collective_s("all-reduce", 2, 576, LINK)
    assert seconds(m).communication_s == pytest.approx(collective_s("all-gather", 4, 576, LINK) + pairs)


def test_a_tpus_asynchronous_collective_counts_once() -> None:
    def part(name: str, root: str) -> str:
        return (
            f"%{name} (q: f32[8,16]) -> f32[32,16] {{\n  %q = f32[8,16]{{1,0:T(8,128)}} parameter(0)\n"
            f"  %g.{name} = f32[32,16]{{1,0:T(8,128)}} all-gather(%q), replica_groups=[1,4]<=[4], dimensions={{0}}, "
            'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}\n'
            f"  ROOT %r.{name} = {root.replace('@', f'%g.{name}')}\n}}\n\n"
        )

    token = "(f32[8,16]{1,0:T(8,128)}, f32[32,16]{1,0:T(8,128)}, u32[]{:S(2)})"
    m = module(
        "%p = f32[8,16]{1,0:T(8,128)} parameter(0)",
        f"%a = {token} fusion(%p), kind=kCustom, calls=%one",
        "%b = f32[32,16]{1,0:T(8,128)} fusion(%p), kind=kOutput, calls=%two",
        "ROOT %c = f32[32,16]{1,0:T(8,128)} fusion(%p), kind=kCustom, calls=%three",
        extra=part("one", token + ' custom-call(@), custom_call_target="AsyncCollectiveStart"')
        + part("two", "f32[32,16]{1,0:T(8,128)} copy(@)")
        + part("three", 'f32[32,16]{1,0:T(8,128)} custom-call(@), custom_call_target="AsyncCollectiveDone"'),
    )
    assert [(r.kind, r.operand_bytes, r.computation) for r in collectives(m)] == [("all-gather", 512, "one")]


PRODUCT = "dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
PRODUCT_S, SUM_S = 2 * 100**3 / 1e6, collective_s("all-reduce", 4, 8 * 16 * 4, LINK)


def beside(*lines: str, extra: str = "") -> Estimate:
    """Of a program with a vector %p, and a matrix %q of 2 s a product with itself."""
    first = ("%p = f32[8,16]{1,0:S(1)} parameter(0)", "%q = f32[100,100]{1,0:T(8,128)S(1)} parameter(1)")
    return seconds(module(*first, *lines, "ROOT %t = () tuple()", extra=extra))


START = "%s = f32[8,16]{1,0:T(8,128)S(1)} all-reduce-start(%p), replica_groups={}, to_apply=%add"
DONE = "%d = f32[8,16]{1,0:T(8,128)S(1)} all-reduce-done(%s)"
DOT = "%m = f32[100,100]{1,0:T(8,128)S(1)} " + PRODUCT


def test_collectives_run_beside_what_lies_between_start_and_done() -> None:
    after = beside(DOT, START, DONE)
    assert (after.compute_s, after.communication_s) == pytest.approx((PRODUCT_S, SUM_S))
    assert after.hidden_s == pytest.approx(0, abs=1e-12)
    between = beside(START, DOT, DONE)
    assert between.seconds == pytest.approx(PRODUCT_S) and between.hidden_s == pytest.approx(SUM_S)
    never = beside(START, DOT)
    assert never.seconds == pytest.approx(PRODUCT_S), "at the end all has arrived"
    at_once = beside(START.replace("all-reduce-start", "all-reduce"), DOT)
    assert at_once.seconds == pytest.approx(PRODUCT_S + SUM_S)


def test_wires_move_one_after_another() -> None:
    start = (START.replace("%s", f"%s{n}") for n in range(3))
    found = beside(*start, "%d = f32[8,16]{1,0} all-reduce-done(%s2)")
    assert found.communication_s == pytest.approx(3 * SUM_S)


def test_a_reduce_scatter_that_tpus_write_as_a_fusion() -> None:
    """Its bytes are the parameter's, not the padded ones; an all-reduce that something else reads stays one."""
    ring = "replica_groups={{0,1,2,3}}, to_apply=%add"
    inside = (
        "%all-reduce-scatter (i: f32[8,10]) -> f32[3,8] {\n  %i = f32[8,10]{1,0} parameter(0)\n"
        "  %z = f32[] constant(0)\n  %b = f32[10,8]{1,0} bitcast(%i)\n"
        "  %q = f32[12,8]{1,0} pad(%b, %z), padding=0_2x0_0\n"
        f"  %r = f32[12,8]{{1,0}} all-reduce(%q), {ring}\n  %k = u32[] constant(0)\n"
        "  ROOT %d = f32[3,8]{1,0} dynamic-slice(%r, %k, %k), dynamic_slice_sizes={3,8}\n}"
    )
    call = "ROOT %f = f32[3,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter"
    (found,) = collectives(module("%p = f32[8,10]{1,0} parameter(0)", call, extra=inside))
    assert (found.kind, found.operand_bytes) == ("reduce-scatter", 8 * 10 * 4)
    apart = "%r = f32[12,8]{1,0} all-reduce(%q), " + ring
    (found,) = collectives(module("%q = f32[12,8]{1,0} parameter(0)", apart, "ROOT %t = (f32[12,8]{1,0}) tuple(%r)"))
    assert found.kind == "all-reduce"
    sliced = "ROOT %d = f32[3,8]{1,0} dynamic-slice(%r, %k, %k), dynamic_slice_sizes={3,8}"
    (found,) = collectives(module("%q = f32[12,8]{1,0} parameter(0)", "%k = u32[] parameter(1)", apart, sliced))
    assert (found.kind, found.operand_bytes) == ("all-reduce", 12 * 8 * 4), "in no fusion"


def test_collectives_take_a_share_of_what_they_run_beside() -> None:
    first = ("%p = f32[8,16]{1,0:S(1)} parameter(0)", "%q = f32[100,100]{1,0:T(8,128)S(1)} parameter(1)")
    program = module(*first, START, DOT, DONE, "ROOT %t = () tuple()")
    found = estimate(program, replace(RATES, beside=0.3))
    assert found.seconds == pytest.approx(PRODUCT_S + 0.3 * SUM_S) and found.hidden_s == pytest.approx(0.7 * SUM_S)


def test_a_loop_runs_beside_a_collective() -> None:
    body = (
        "%body (b: (s32[])) -> (s32[]) {\n  %b = (s32[]) parameter(0)\n"
        "  %q = f32[100,100]{1,0:T(8,128)S(1)} constant({...})\n"
        f"  {DOT}\n  ROOT %r = (s32[]) tuple()\n}}\n\n"
        "%cond (c: (s32[])) -> pred[] {\n  %c = (s32[]) parameter(0)\n  ROOT %k = pred[] constant(true)\n}\n\n"
    )
    trips = 'body=%body, condition=%cond, backend_config={"known_trip_count":{"n":"3"}}'
    found = beside(START, "%v = (s32[]) tuple()", f"%w = (s32[]) while(%v), {trips}", DONE, extra=body)
    assert found.compute_s == pytest.approx(3 * PRODUCT_S)
    assert found.communication_s == 0 and found.hidden_s == pytest.approx(SUM_S)


def test_a_tpus_fusions_carry_collectives_along() -> None:
    token = "(f32[8,16]{1,0:T(8,128)S(1)}, f32[8,16]{1,0:T(8,128)S(1)})"
    parts = (
        "%one (x: f32[8,16]) -> f32[8,16] {\n  %x = f32[8,16]{1,0:T(8,128)S(1)} parameter(0)\n"
        "  %g = f32[8,16]{1,0:T(8,128)S(1)} all-reduce(%x), replica_groups={}, to_apply=%add, "
        'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}\n'
        f'  ROOT %r = {token} custom-call(%g), custom_call_target="AsyncCollectiveStart"\n}}\n\n'
        f"%two (y: {token}) -> {token} {{\n  %y = {token} parameter(0)\n"
        '  ROOT %e = f32[8,16]{1,0:T(8,128)S(1)} custom-call(%y), custom_call_target="AsyncCollectiveDone"\n}\n\n'
    )
    start = f"%s = {token} fusion(%p), kind=kCustom, calls=%one"
    done = "%d = f32[8,16]{1,0:T(8,128)S(1)} fusion(%s), kind=kCustom, calls=%two"
    assert beside(start, DOT, done, extra=parts).seconds == pytest.approx(PRODUCT_S)
    assert beside(start, done, DOT, extra=parts).seconds == pytest.approx(PRODUCT_S + SUM_S)


def test_kernels_take_a_launch_each() -> None:
    once = module("%p = f32[8,16]{1,0} parameter(0)", "ROOT %y = f32[8,16]{1,0} negate(%p)")
    rates = Rates(flops_per_s=RATES.flops_per_s, memory_bytes_per_s=1e6, axes=RATES.axes, launch_s=0.5)
    assert estimate(once, rates).seconds == pytest.approx(estimate(once, RATES).seconds + 0.5)


def test_wires_over_several_axes() -> None:
    slow, fast = LinkSpec(latency_s=1e-6, bytes_per_s=1e8), LinkSpec(latency_s=1e-6, bytes_per_s=1e9)
    axes = (MeshAxis(name="x", size=2, link=slow), MeshAxis(name="y", size=4, link=fast))
    everyone = (tuple(range(8)),)
    along_y = collective_s("reduce-scatter", 4, 8e6, fast)
    then_x = collective_s("reduce-scatter", 2, 2e6, slow)
    ring = collective_s("reduce-scatter", 8, 8e6, LinkSpec(latency_s=1e-6, bytes_per_s=4e8))
    assert groups_s("reduce-scatter", everyone, 8e6, axes) == pytest.approx(min(along_y + then_x, ring))
    assert groups_s("all-gather", ((0, 4), (1, 5), (2, 6), (3, 7)), 1e6, axes) == pytest.approx(1e-6 + 1e-2)
    assert groups_s("all-reduce", ((0, 3), (1, 2), (4, 7), (5, 6)), 1e6, axes) == pytest.approx(2 * (1e-6 + 5e-3))
    with pytest.raises(ValueError, match="not a collective"):
        collective_s("broadcast", 2, 1.0, fast)
