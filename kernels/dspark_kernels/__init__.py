"""Kernels of speculative decoding on mixture-of-experts models. Importable without dspark_jax; one folder an
operation.
"""
