"""Each case's sharding rule against its golden line, and that every primitive seen in real train steps has a rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from autopar.frontend.opened_calls import BODIES, INLINED
from autopar.frontend.trace import trace
from autopar.ir.graph import Node, TensorType
from autopar.primitives import PRIMITIVES, rule_for
from autopar.primitives.notation import sums_survive
from autopar.primitives.shape import reshape_factors
from tests.op_case import Case, example_args, needs_x64, nodes_under_test
from tests.op_cases_dense import CASES as DENSE
from tests.op_cases_indexing import CASES as INDEXING

GOLDEN = Path(__file__).parents[1] / "golden" / "rules.txt"

SEEN = """
abs add add_any and argmax argmin atan2 bitcast_convert_type broadcast_in_dim ceil cholesky concatenate cond
conv_general_dilated convert_element_type copy cos cumsum custom_jvp_call custom_vjp_call device_put div dot_general
dynamic_slice dynamic_update_slice eigh empty2 eq erf_inv erfc exp expm1 fft floor gather ge gt imag integer_pow iota
is_finite jit le log log1p logistic lt lu max min mul ne neg nextafter not optimization_barrier or pad platform_index
population_count pow psum pure_callback random_bits random_clone random_fold_in random_seed random_split random_unwrap
random_wrap real reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window_max reduce_window_sum
rem remat2 reshape rev rsqrt scan scatter scatter-add scatter-max select_and_scatter_add select_n
shift_right_arithmetic shift_right_logical sign sin slice sort split sqrt square stack stop_gradient sub svd
tanh tile transpose triangular_solve unstack while xor
""".split()
"""The primitives that a survey of train steps over 22 packages found."""


def cases() -> Iterator[tuple[Case, int | None, Node]]:
    """Each case, a number where it is about several nodes, and its node."""
    for c in (*DENSE, *INDEXING):
        args = example_args(c)
        with jax.enable_x64(needs_x64(c, args)):
            nodes = nodes_under_test(trace(c.fun, *args).graph.nodes, c)
        for number, node in enumerate(nodes):
            yield c, number if len(nodes) > 1 else None, node


def _golden_lines() -> list[str]:
    return [
        f"{c.name}{'' if number is None else f' #{number}'}: {node.primitive} {rule_for(node)}".rstrip()
        for c, number, node in cases()
    ]


def test_rules_match_golden_lines(regen_goldens: bool) -> None:
    lines = _golden_lines()
    if regen_goldens:
        GOLDEN.write_text("\n".join(lines) + "\n")
    assert lines == GOLDEN.read_text().splitlines()


def test_case_names_are_unique() -> None:
    names = [c.name for c in (*DENSE, *INDEXING)]
    assert sorted(set(names)) == sorted(names)


def test_every_primitive_seen_has_a_rule() -> None:
    covered = set(PRIMITIVES) | set(INLINED) | set(BODIES)
    assert [p for p in SEEN if p not in covered] == []


def test_unknown_primitive_is_replicated_with_a_reason() -> None:
    t = TensorType(shape=(4, 8), dtype="float32")
    node = Node(id=0, primitive="xyz", params={}, operands=(0,), results=(1,), operand_types=(t,), result_types=(t,))
    rule = rule_for(node)
    assert rule.why == "no rule for primitive 'xyz'"
    assert rule.operands == rule.results == (((), ()),)
    assert rule.factors == ()


@pytest.mark.parametrize(
    ("source", "target", "major"),
    [
        ((24,), (4, 6), [("i", 4)]),
        ((4, 6), (24,), [("i", 4)]),
        ((6, 4), (8, 3), [("i", 2)]),
        ((2, 12), (8, 3), [("i", 2)]),
        ((12, 5), (3, 4, 5), [("i", 3), ("k", 5)]),
        ((6, 4, 5), (4, 6, 5), [("i", 2), ("n", 5)]),
        ((4, 9), (9, 4), []),
        ((1, 6, 1), (6,), [("i", 6)]),
    ],
)
def test_reshape_shares_major_parts(source: tuple[int, ...], target: tuple[int, ...], major: list[object]) -> None:
    factors, ins, outs = reshape_factors(source, target)
    heads = {d[0] for d in ins if d} & {d[0] for d in outs if d}
    tails = {n for d in (*ins, *outs) for n in d[1:]}
    assert [(f.name, f.size) for f in factors if f.kind == "pass" and f.name in heads - tails] == major


@pytest.mark.parametrize(
    ("operand", "result", "survives"),
    [
        ("float32", "float32", True),
        ("bfloat16", "float32", True),
        ("float32", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", False),
        ("complex64", "float32", True),
        ("float64", "complex64", False),
        ("int64", "int32", True),
        ("uint32", "int32", True),
        ("int32", "int64", False),
        ("int32", "float32", False),
        ("bool", "float32", False),
        ("float32", "bool", False),
        ("float8_e4m3fn", "float32", False),
    ],
)
def test_which_dtypes_partial_sums_survive(operand: str, result: str, survives: bool) -> None:
    assert sums_survive(operand, result) is survives
