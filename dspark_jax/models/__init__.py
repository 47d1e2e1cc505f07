"""Target models as flax.nnx modules, one concept a file."""
