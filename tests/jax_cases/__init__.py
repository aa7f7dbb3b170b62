"""JAX's own test cases of its primitives, run as planned beside the same under plain `jax.jit`."""
