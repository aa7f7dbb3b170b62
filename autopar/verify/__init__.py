"""A plan held against what the real compilers make of it."""
