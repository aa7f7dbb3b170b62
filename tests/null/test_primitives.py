"""The records of primitives: each complete, none twice, and what the lists beside them say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from autopar.frontend.layering import layer_graphs as kinds
from autopar.frontend.layering import ownership, scans, sequence
from autopar.frontend.opened_calls import BODIES, INLINED

from autopar import primitives
from autopar.cost import roofline
from autopar.intra_op import flatten, liveness, seeds, user_shard_map
from autopar.ir import recompute
from autopar.primitives import PRIMITIVES, record_of
from autopar.primitives.record import PerElement, Primitive
from tests.null.test_rules_golden import cases

FUSIBLE = roofline._FUSIBLE

NEWLY_FUSED = """bessel_i0e bessel_i1e eq_to igamma igamma_grad_a igammac layout_constraint le_to log2 lt_to mesh_cast
mulhi polygamma polynomial random_gamma_grad reduced_vary_cast_p regularized_incomplete_beta reshard shard_alike stage
tie xla_metadata_value zeta empty empty2 platform_index random_clone reduce_xor nonbatchable
nondifferentiable_backward select_if_vmap"""
NEWLY_EXPENSIVE = """acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cosh digamma igamma igamma_grad_a igammac
lgamma log2 polygamma random_gamma_grad reduce_xor regularized_incomplete_beta rem sinh zeta"""
EFFECTS = """accum_grad_in_ref addupdate after_all all_gather all_gather_invariant all_gather_reduced all_to_all
announce_jaxpr axis_index check compute_on create_token dce_sink debug_callback debug_print empty_ref free_ref freeze
get inspect_sharding masked_load masked_swap new_ref num_programs pbroadcast pgather ppermute precv program_id psend
psum2 psum_invariant ragged_all_to_all reduce_scatter ref run_state swap unreduced_psum unreduced_reduce_scatter"""
ALIASES = (
    "copy_p layout_constraint mesh_cast pvary reduced_vary_cast_p reshard sharding_constraint stage xla_metadata_value"
)
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
    "fusible": (FUSIBLE, lambda p: p.traits.fusible, NEWLY_FUSED),
    "expensive": (liveness._EXPENSIVE & FUSIBLE, lambda p: p.traits.expensive, NEWLY_EXPENSIVE),
    "reads memory": (liveness._READ_MEMORY, lambda p: p.traits.reads_memory, "reduce_xor"),
    "reduces": (liveness._REDUCTIONS, lambda p: p.traits.reduces, "reduce_xor"),
    "generates": (liveness._GENERATORS, lambda p: p.traits.generates, "empty empty2 platform_index"),
    "moves": (liveness._OTHER_LAYOUT & FUSIBLE, lambda p: p.traits.moves, "empty empty2 platform_index tile"),
    "into a reduction": (liveness._REDUCTION_FUSES, lambda p: p.traits.into_reduction, ""),
    "aliases": (liveness.ALIASES, lambda p: p.traits.aliases, ALIASES),
    "contraction": (
        flatten.HEAVY, lambda p: p.traits.contraction, "dot_product_attention_bwd dot_product_attention_fwd"
    ),
    "opaque": (roofline.OPAQUE, lambda p: p.traits.opaque, ""),
    "no arithmetic": (roofline._NO_ARITHMETIC, lambda p: p.flops == PerElement(0), ""),
    "looks up": (seeds._READS_PARAMETERS - flatten.HEAVY, lambda p: p.traits.looks_up, ""),
    "kept": (recompute.KEPT, lambda p: not p.traits.repeatable, EFFECTS),
    "compares": (recompute._COMPARISONS, lambda p: p.traits.compares, "eq_to le_to lt_to"),
    "jumps": (recompute._ROUNDING, lambda p: p.traits.jumps, "sign"),
    "heavy": (sequence.HEAVY - set(BODIES) - set(INLINED), lambda p: not p.light, NOT_LIGHT),
    "arithmetic": (kinds.ARITHMETIC, lambda p: p.arithmetic, ARITHMETIC),
    "partial": (ownership.PARTIAL, lambda p: bool(p.joined_by), ""),
    "collectives": (
        frozenset(user_shard_map._KINDS), lambda p: p.collective is not None and p.collective.kind is not None, ""
    ),
    "uncounted": (user_shard_map._UNKNOWN, lambda p: p.collective is not None and p.collective.kind is None, ""),
}  # fmt: skip
"""List → (what it holds, what records say, what was decided to be added)."""

OTHER_FLOPS = frozenset(
    """acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cosh digamma igamma igamma_grad_a igammac lgamma log2
    polygamma random_gamma_grad regularized_incomplete_beta rem sinh zeta eig geqp3 geqrf hessenberg ormqr schur
    symmetric_product tridiagonal random_fold_in random_gamma random_seed random_split rng_bit_generator rng_uniform
    threefry2x32 reduce psum pmax pmin reduce_window select_and_scatter select_and_gather_add""".split()
)
"""Functions cost alike, and so do decompositions, draws, reductions, and windows."""


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


def test_flops_agree() -> None:
    other: set[str] = set()
    for _, _, node in cases():
        if node.flops is None and node.hidden is None and not node.bodies:
            if record_of(node.primitive).flops(node) != roofline.flops(node):
                other.add(node.primitive)
    assert other <= OTHER_FLOPS
