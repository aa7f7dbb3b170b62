"""The records of primitives: each complete, none twice, and in one line beside the rule of its first case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar import primitives
from autopar.frontend import algebra
from autopar.frontend.normalise import COMMUTATIVE
from autopar.frontend.opened_calls import BODIES, INLINED
from autopar.ir.errors import VerifyError
from autopar.primitives import PRIMITIVES, UNKNOWN, record_of, rule_for
from autopar.primitives.record import NONLINEAR, ONE, Linear, Primitive, Traits
from autopar.runtime.one_program.local import LOCAL, NEVER_BOUND
from tests.null.test_rules_golden import cases

GOLDEN = Path(__file__).parents[1] / "golden" / "primitives.txt"


@pytest.mark.slow
def test_records_match_golden_lines(regen_goldens: bool) -> None:
    rules: dict[str, str] = {}
    for _, _, node in cases():
        rules.setdefault(node.primitive, str(rule_for(node)))
    lines = [f"{p} | {rules.get(name, 'no case')}" for name, p in PRIMITIVES.items()]
    if regen_goldens:
        GOLDEN.write_text("\n".join(lines) + "\n")
    assert lines == GOLDEN.read_text().splitlines()


def test_records_are_complete() -> None:
    primitives.verify()
    assert not set(PRIMITIVES) & (set(INLINED) | set(BODIES))
    folded = {*algebra.FOLDED, *algebra.POINTWISE, *algebra.MOVES, *algebra.CUMULATIVE, *COMMUTATIVE}
    assert {*LOCAL, *NEVER_BOUND, *folded} <= set(PRIMITIVES)


def test_a_primitive_with_two_records_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives.sorting, "PRIMITIVES", (*primitives.sorting.PRIMITIVES, record_of("tanh")))
    with pytest.raises(VerifyError, match="two records: tanh"):
        primitives.verify()


def traits(**changed: bool) -> Callable[[Primitive], Primitive]:
    return lambda p: replace(p, traits=replace(p.traits, **changed))


BROKEN: dict[str, tuple[str, Callable[[Primitive], Primitive], str]] = {
    "elementwise, not fusible": ("add", traits(fusible=False, into_reduction=False), "elementwise, but not fusible"),
    "cheap function": ("tanh", traits(expensive=False), "function, but not expensive"),
    "cheap function's cost": ("asin", lambda p: replace(p, flops=ONE), "a function of 1 an element FLOPs"),
    "reads memory, cheap": ("concatenate", traits(expensive=False), "reads_memory, but not expensive"),
    "reduction, fused whole": ("reduce_sum", traits(reads_memory=False), "reduces, but not reads_memory"),
    "generator in place": ("iota", traits(moves=False), "generates, but not moves"),
    "fused contraction": ("dot_general", traits(fusible=True), "both contraction and fusible"),
    "repeated opaque call": ("ffi_call", traits(repeatable=True), "both opaque and repeatable"),
    "alias that moves": ("reshape", traits(moves=True), "both aliases and moves"),
    "nonlinear identity": ("copy", lambda p: replace(p, linear=NONLINEAR), "an identity, but linear in nothing"),
    "group out of order": ("add", lambda p: replace(p, linear=Linear(groups=((1, 0),))), r"linear group \(1, 0\)"),
    "group of nothing": ("add", lambda p: replace(p, linear=Linear(groups=((...,),))), "linear group"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_records_are_refused(broken: str) -> None:
    name, change, message = BROKEN[broken]
    record_of(name).verify()
    with pytest.raises(VerifyError, match=message):
        change(record_of(name)).verify()


def test_all_of_a_kind_are_alike() -> None:
    """What the lists had drifted apart in."""
    functions = [p for p in PRIMITIVES.values() if p.traits.function]
    assert {"tanh", "asin", "bessel_i0e", "zeta"} <= {p.name for p in functions}
    assert len({(p.flops, str(p.traits)) for p in functions}) == 1
    assert all(p.traits.fusible for p in PRIMITIVES.values() if p.traits.elementwise)
    assert all(p.light for p in PRIMITIVES.values() if p.traits.elementwise)


def test_what_nobody_has_described_is_opaque() -> None:
    assert record_of("no_such_primitive") is UNKNOWN
    assert UNKNOWN.traits == Traits(opaque=True, repeatable=False)
    assert not UNKNOWN.light and not UNKNOWN.arithmetic
