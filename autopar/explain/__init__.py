"""Questions to a plan, answered from its data alone: why an operator is sharded as it is, what another way would add.

Needs no jax: a plan holds the graph that it is of.
"""
