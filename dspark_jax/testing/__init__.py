"""Test doubles that run through the real decode code: look-up-table models, a tokenizer, emulated devices.

A drafter with a chosen acceptance curve, five rounds of it, and the tokens they committed:

    >>> import jax, jax.numpy as jnp
    >>> from dspark_jax.decode.batch import prefill_items
    >>> from dspark_jax.decode.round import init_state, rounds, tick
    >>> from dspark_jax.decode.sampling import SamplingParams, SamplingState
    >>> from dspark_jax.testing import DummyTokenizer, LookupDrafter, LookupTarget

    >>> target = LookupTarget.random(vocab=8)
    >>> drafter = LookupDrafter.acceptance_curve(target, [0.9, 0.8, 0.7])
    >>> tokenizer = DummyTokenizer.letters(8)
    >>> state = init_state(target, drafter, slots=1, max_len=64)
    >>> sampling = SamplingState.from_params([SamplingParams(temperature=1.0, seed=7)])
    >>> requests = state.requests.replace(max_tokens=jnp.array([40]), sampling=sampling)
    >>> (prompt,) = prefill_items([tokenizer.encode("bad")], slots=1, chunk=4)
    >>> prefill = jax.jit(tick, static_argnames="max_len")
    >>> decode = jax.jit(rounds, static_argnames=("max_len", "count"))
    >>> state, first = prefill(target, drafter, state.replace(requests=requests), prompt, max_len=64)
    >>> state, made = decode(target, drafter, state, max_len=64, count=5)
    >>> tokens = [int(t) for line, n in zip(made.token[:, 0], made.count[:, 0]) for t in line[:n]]
    >>> len(tokens) == int(made.accepted.sum()) + 5
    True
    >>> len(tokenizer.decode(tokens)) == len(tokens)
    True

On several devices: `emulate_devices(8)` before jax starts.
"""

from dspark_jax.testing.devices import emulate_devices
from dspark_jax.testing.lookup import LookupDrafter, LookupTarget
from dspark_jax.testing.tokenizer import DummyTokenizer

__all__ = ["DummyTokenizer", "LookupDrafter", "LookupTarget", "emulate_devices"]
