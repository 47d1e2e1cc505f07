"""Test doubles that run through the real decode code: look-up-table models, a tokenizer, emulated devices."""

from dspark_jax.testing.devices import emulate_devices
from dspark_jax.testing.lookup import LookupDrafter, LookupTarget
from dspark_jax.testing.tokenizer import DummyTokenizer

__all__ = ["DummyTokenizer", "LookupDrafter", "LookupTarget", "emulate_devices"]
