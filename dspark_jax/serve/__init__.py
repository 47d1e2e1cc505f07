"""Serving: continuous batching over the ring."""
