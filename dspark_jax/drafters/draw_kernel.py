"""`draw_block` on CUDA: the plain Markov head's sequential steps by `dspark_kernels.draft_head`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.sampling import SamplingState
from dspark_jax.drafters.draw import Widen, draw_block
from dspark_jax.drafters.heads import ConfidenceHead, MarkovHead, NoHead
from dspark_kernels import draft_head


def draw(
    head: MarkovHead | NoHead,
    confidence_head: ConfidenceHead | None,
    base: Float32[Array, "R gamma D"],
    hidden: Float[Array, "R gamma d"],
    anchor: Int[Array, "R"],
    position: Int[Array, "R"],
    sampling: SamplingState,
    draft_noise: DraftNoise = draft_gumbel,
    widen: Widen | None = None,
) -> Proposal:
    """`draw_block`, by the kernel where head, device and shapes suit.

    The program then holds three forms, of which it runs one: greedy without noise where every row is greedy; the kernel with
    noise; and where a row asks for top-k or top-p, whose thresholds need whole rows of logits, also `draw_block` for such rows.
    The others stay with the kernel: sums differ in their last bits, and a request's sample must not depend on its neighbours.
    """

    def stepwise() -> Proposal:
        return draw_block(head, confidence_head, base, hidden, anchor, position, sampling, draft_noise, widen)

    if widen is not None or type(head) is not MarkovHead or head.markov_w1.weight[...].dtype != hidden.dtype:
        return stepwise()
    w1, w2 = head.markov_w1.weight[...], head.markov_w2.weight[...]
    lowering = draft_head.lowering(base, w1, w2)
    if lowering == "reference":
        return stepwise()

    def kernel(*noise) -> Proposal:
        tokens, logits = draft_head.draft(base, anchor, w1, w2, *noise, implementation=lowering)
        previous = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
        confidence = confidence_head(hidden, head.embed(previous)) if confidence_head else jnp.zeros(tokens.shape)
        return Proposal(tokens, logits, confidence)

    def with_noise() -> Proposal:
        gamma, vocab = base.shape[1:]
        noise = [draft_noise(sampling.seed, position, k, vocab) for k in range(gamma)]
        return kernel(sampling.temperature, noise)

    drawn = sampling.temperature > 0
    filtered = drawn & ((sampling.top_k > 0) | (sampling.top_p < 1))

    def by_row() -> Proposal:
        def choose(ours: jax.Array, theirs: jax.Array) -> jax.Array:
            return jnp.where(filtered.reshape(-1, *[1] * (ours.ndim - 1)), theirs, ours)

        return jax.tree.map(choose, with_noise(), stepwise())

    form = jnp.any(drawn).astype(jnp.int32) + jnp.any(filtered)
    return jax.lax.switch(form, [kernel, with_noise, by_row])
