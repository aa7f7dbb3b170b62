"""Plans for others than autopar: as code for plain JAX, flax and equinox. Needs no jax."""
