"""Decoding: sampling, verification and the speculative round."""
