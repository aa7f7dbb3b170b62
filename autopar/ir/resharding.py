"""What crosses from mesh to mesh, and how: values, and the chunked chain transfers that bring them.

A `ReshardingPlan` covers everything that shares links at one time: several values of one cut, forward and backward.
Each value lies on a source mesh under a `ShardingSpec` and is wanted on a destination mesh under another. Tiles follow
from specs (dimensions need not divide: the first tiles are the larger ones, as `tile_bounds` says), and every element
of every destination tile is brought exactly once by one of the plan's transfers.

A *piece* is a stretch of a box of the value: elements ``start`` to ``stop`` of the box in row-major order. A transfer
takes one piece along a chain of devices on different hosts, in chunks that follow each other: while a host receives
chunk k it passes on chunk k − 1. On every host the head of the chain hands the piece on to the other devices there
that want it (``copies``), over the links inside the host.
"""
