"""Scripts to read and to run: `python -m dspark_jax.examples.ring_by_hand`, `… .serving_loop`."""
