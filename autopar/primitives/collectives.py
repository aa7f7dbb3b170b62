"""Collectives over named axes: what a user's shard_map communicates by itself (`intra_op.user_shard_map` counts them).

Outside of one there is nothing that they could mean; those that `jax.vmap` leaves to reduce over dimensions are in
`reduction`.
"""

from __future__ import annotations

from autopar.primitives.control import EFFECTS, whole
from autopar.primitives.record import ONE, Collective, Primitive

_WHY = "collective over a named axis outside shard_map"

UNCOUNTED = Collective(kind=None)
"""What cannot be run, or not be counted, inside the plan's own shard_map."""


def _named(name: str, collective: Collective | None) -> Primitive:
    return Primitive(name=name, rule=whole(_WHY), flops=ONE, traits=EFFECTS, collective=collective)


PRIMITIVES: tuple[Primitive, ...] = (
    _named("axis_index", None),
    *(_named(name, Collective(kind="all-gather", axes="axis_name")) for name in ("all_gather", "all_gather_invariant")),
    _named("all_to_all", Collective(kind="all-to-all", axes="axis_name")),
    _named("ppermute", Collective(kind="collective-permute", axes="axis_name")),
    *(
        _named(name, Collective(kind="all-reduce", axes="axes", reduction="sum"))
        for name in ("psum2", "psum_invariant")
    ),
    _named("reduce_scatter", Collective(kind="reduce-scatter", axes="axis_name")),
    *(
        _named(name, UNCOUNTED)
        for name in """all_gather_reduced pbroadcast pgather precv psend ragged_all_to_all unreduced_psum
        unreduced_reduce_scatter""".split()
    ),
)
