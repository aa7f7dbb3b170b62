"""The records of primitives: each complete, none twice, and what the lists beside them say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar import primitives
from autopar.frontend.layering import layer_graphs as kinds
from autopar.frontend.layering import ownership, scans, sequence
from autopar.frontend.opened_calls import BODIES, INLINED
from autopar.ir import recompute
from autopar.primitives import PRIMITIVES
from autopar.primitives.record import Primitive

EFFECTS = """accum_grad_in_ref addupdate after_all all_gather all_gather_invariant all_gather_reduced all_to_all
announce_jaxpr axis_index check compute_on create_token dce_sink debug_callback debug_print empty_ref free_ref freeze
get inspect_sharding masked_load masked_swap new_ref num_programs pbroadcast pgather ppermute precv program_id psend
psum2 psum_invariant ragged_all_to_all reduce_scatter ref run_state swap unreduced_psum unreduced_reduce_scatter"""
NOT_LIGHT = f"""{EFFECTS} approx_top_k cholesky_update dot_product_attention_bwd dot_product_attention_fwd eig
ffi_call geqp3 geqrf hessenberg householder_product io_callback lu_pivots_to_permutation noinline ormqr pmax pmin psum
pure_callback reduce reduce_window reduce_xor rng_bit_generator rng_uniform scatter-max scatter-min scatter-mul
scatter-sub schur select_and_gather_add select_and_scatter symmetric_product tridiagonal tridiagonal_solve"""
ARITHMETIC = """bitcast_convert_type clz complex conj copy_p empty empty2 eq_to imag layout_constraint le_to lt_to
mesh_cast mulhi name nextafter nonbatchable nondifferentiable_backward platform_index polynomial population_count
pvary real reduce_precision reduced_vary_cast_p rem reshard select_if_vmap sharding_constraint shift_left
shift_right_arithmetic shift_right_logical stage tie xla_metadata_value"""
GONE = frozenset("expand_dims custom_lin custom_call infeed outfeed".split())
"""Names that no primitive of JAX has."""
OPENED = frozenset("composite custom_linear_solve custom_partitioning custom_vmap_call linear_call".split())
"""Replaced by what they are made of; where that cannot be, `UNKNOWN`, which is opaque too."""

LISTS: dict[str, tuple[frozenset[str], Callable[[Primitive], bool], str]] = {
    "kept": (recompute.KEPT, lambda p: not p.traits.repeatable, EFFECTS),
    "compares": (recompute._COMPARISONS, lambda p: p.traits.compares, "eq_to le_to lt_to"),
    "jumps": (recompute._ROUNDING, lambda p: p.traits.jumps, "sign"),
    "heavy": (sequence.HEAVY - set(BODIES) - set(INLINED), lambda p: not p.light, NOT_LIGHT),
    "arithmetic": (kinds.ARITHMETIC, lambda p: p.arithmetic, ARITHMETIC),
    "partial": (ownership.PARTIAL, lambda p: bool(p.joined_by), ""),
}  # fmt: skip
"""List → (what it holds, what records say, what was decided to be added)."""


def test_records_are_complete() -> None:
    primitives.verify()
    assert not set(PRIMITIVES) & (set(INLINED) | set(BODIES))


@pytest.mark.parametrize("name", LISTS)
def test_lists_agree(name: str) -> None:
    listed, says, added = LISTS[name]
    found = {p.name for p in PRIMITIVES.values() if says(p)}
    assert sorted(found) == sorted((listed - GONE - OPENED) | set(added.split()))


def test_rows_are_apart_in_what_is_elementwise() -> None:
    found = {p.name for p in PRIMITIVES.values() if p.traits.elementwise and not p.traits.placement}
    assert found >= scans._ROW_BY_ROW
