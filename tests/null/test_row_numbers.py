"""What is made of row numbers is known for all rows from a few of them, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.frontend.algebra import FOLDED
from autopar.frontend.microbatch.constants import Constants
from autopar.frontend.microbatch.inline import flatten
from autopar.primitives.kinds import Numbers, Sorted, Sorting, join
from autopar.primitives.row_numbers import RowNumbers, made_of

EXAMPLES, POST = 7, 6
UNARY = ("sign", "neg", "not")
BINARY = ("add", "sub", "mul", "div", "rem", "max", "min", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor")
BOOLEAN = ("lt", "le", "gt", "ge", "eq", "ne")
SMALL = st.integers(-9, 50)
PERIOD = st.sampled_from([-1, 0, 1, 2, 3, POST, 2 * POST, EXAMPLES * POST])


def all_of(numbers: RowNumbers) -> npt.NDArray[Any]:
    more = np.arange(EXAMPLES - 1)[:, None] * numbers.step + numbers.second
    return np.concatenate([numbers.first[None], more]).reshape(-1).astype(numbers.first.dtype)


def apply(name: str, operands: Sequence[Any]) -> tuple[RowNumbers | None, npt.NDArray[Any] | None]:
    """What is known of the result, and the result of all rows."""
    last = operands[-1]  # of a selection, the dtype is that of its cases
    dtype = np.dtype(bool) if name in BOOLEAN else (last.first if isinstance(last, RowNumbers) else last).dtype

    def evaluated(values: Sequence[Any]) -> npt.NDArray[Any] | None:
        with np.errstate(all="ignore"):
            try:
                return np.asarray(FOLDED[name](*values)).astype(dtype)
            except (TypeError, ValueError):
                return None

    wanted = evaluated([all_of(x) if isinstance(x, RowNumbers) else x for x in operands])
    return made_of(name, operands, evaluated), wanted


@given(st.data())
def test_followed_is_right(data: st.DataObject) -> None:
    numbers = [RowNumbers.own(EXAMPLES * POST, POST, "int32")]
    np.testing.assert_array_equal(all_of(numbers[0]), np.arange(EXAMPLES * POST))
    for _ in range(data.draw(st.integers(1, 6))):
        name = data.draw(st.sampled_from((*UNARY, *BINARY, "select_n", "clamp")))
        x = data.draw(st.sampled_from(numbers))
        constant = np.int32(data.draw(st.one_of(PERIOD, SMALL)))
        alike = [n for n in numbers if n.first.dtype == x.first.dtype]
        other = data.draw(st.sampled_from([*alike, *([constant] if x.first.dtype == np.int32 else [])]))
        if name in UNARY and (name == "not" or x.first.dtype == np.int32):
            operands: list[Any] = [x]
        elif name == "select_n":
            which = [n for n in numbers if n.first.dtype == bool]
            if not which:
                continue
            operands = [data.draw(st.sampled_from(which)), x, other]
        elif x.first.dtype == bool and name not in (*BOOLEAN, "and", "or", "xor"):
            continue
        elif name == "clamp":
            operands = [np.int32(data.draw(SMALL)), x, np.int32(data.draw(SMALL))]
        else:
            operands = [x, other] if data.draw(st.booleans()) else [other, x]
        found, wanted = apply(name, operands)
        if found is not None and wanted is not None:
            np.testing.assert_array_equal(all_of(found), wanted, err_msg=f"{name} of {operands}")
            numbers.append(found)


def test_floor_division_is_followed() -> None:
    """As jax.numpy makes it: a quotient, corrected where signs differ and something is left."""
    own = RowNumbers.own(EXAMPLES * POST, POST, "int32")
    for by, wanted in ((2, True), (3, True), (6, True), (4, False), (12, False)):
        k = np.int32(by)
        quotient, sign, rest = (
            apply(name, x)[0] for name, x in (("div", [own, k]), ("sign", [own]), ("rem", [own, k]))
        )
        assert (quotient is not None) == wanted and (rest is not None) == wanted, by
        if quotient is None or rest is None:
            continue
        assert sign is not None
        differs, left = apply("ne", [sign, np.int32(1)])[0], apply("ne", [rest, np.int32(0)])[0]
        less = apply("sub", [quotient, np.int32(1)])[0]
        assert differs is not None and left is not None and less is not None
        corrects = apply("and", [differs, left])[0]
        assert corrects is not None
        found = apply("select_n", [corrects, quotient, less])[0]
        assert found is not None and found.is_within(POST // by)
        assert not own.is_within(POST // by) or by == 1
    assert own.is_own and own.is_within(POST)


def test_what_does_not_fit_its_dtype_is_not_followed() -> None:
    own = RowNumbers.own(2**20, 2, "int32")
    assert made_of("mul", [own, np.int32(2**9)], lambda x: np.asarray(x[0] * x[1], np.int32)) is not None
    assert made_of("mul", [own, np.int32(2**12)], lambda x: np.asarray(x[0] * x[1], np.int32)) is None


TRACED: dict[str, tuple[Callable[[], Any], bool]] = {
    "lines": (lambda: jnp.arange(EXAMPLES * POST), True),
    "narrow": (lambda: jnp.arange(EXAMPLES * POST, dtype=jnp.int8) // jnp.int8(2), True),
    "divided": (lambda: jnp.arange(EXAMPLES * POST) // 3, True),
    "repeated": (lambda: jnp.repeat(jnp.arange(EXAMPLES * POST), 4), True),
    "spread": (lambda: jnp.broadcast_to(jnp.arange(EXAMPLES * 2)[:, None, None], (EXAMPLES * 2, 3, 2)).ravel(), True),
    "in rows": (lambda: jnp.repeat(2 * jnp.arange(EXAMPLES * POST).reshape(EXAMPLES, POST) + 1, 2, axis=1), True),
    "behind one another": (lambda: jnp.tile(jnp.arange(EXAMPLES), POST), False),
    "backwards": (lambda: jnp.arange(EXAMPLES * POST)[::-1], False),
    "read by columns": (
        lambda: jax.lax.reshape(jnp.arange(EXAMPLES**2).reshape(EXAMPLES, -1), (EXAMPLES**2,), dimensions=(1, 0)),
        False,
    ),
    "of other rows": (lambda: jnp.arange(EXAMPLES * POST).reshape(POST, EXAMPLES).T, False),
}


@pytest.mark.parametrize("name", TRACED)
def test_constants_are_followed(name: str) -> None:
    of, followed = TRACED[name]
    jaxpr, _ = flatten(jax.make_jaxpr(of)().jaxpr, [], markers=True)
    constants = Constants(jaxpr)
    found = constants.numbers(jaxpr.outvars[0], EXAMPLES)
    assert (found is not None) == followed
    if found is not None:
        np.testing.assert_array_equal(all_of(found), np.asarray(of()).reshape(-1))
        assert found.first.dtype == jaxpr.outvars[0].aval.dtype


def test_other_numbers_of_one_order_are_others() -> None:
    """Where a value is now one, now the other."""
    sorting, own = Sorting(key="key", size=12, post=2), RowNumbers.own(12, 2, "int32")
    one = Numbers(sorting=sorting, dim=0, values=own)
    two = Numbers(sorting=sorting, dim=0, values=RowNumbers.own(12, 2, "int32"))
    assert one != two and join(one, one.at(0)) != one and join(one, one) == one
    rows = Sorted(sorting=sorting, dim=0)
    assert rows == Sorted(sorting=sorting, dim=1).at(0) and join(rows, rows.at(1)) != rows and rows != one
