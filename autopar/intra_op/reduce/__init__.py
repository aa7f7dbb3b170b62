"""Exact reductions of a sharding problem, with the means to undo them."""
