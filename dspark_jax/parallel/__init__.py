"""Meshes and how work is spread over them."""
