"""Shapes of what every pipeline rank holds of a dense model and its drafter, as `leaves` has them of V4-style models.

The names and shapes are those of `dense_stage.DenseStage`, which the tests compare them with.
"""

from collections.abc import Iterator

from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import SeparateConfig, StandaloneConfig
from dspark_jax.parallel.leaves import Leaf, Ranges, padded_vocab


def block(c: DenseConfig, name: str) -> Iterator[Leaf]:
    """One layer."""
    d, f, heads = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim
    yield Leaf(f"{name}.self_attn.q_proj.weight", (d, heads))
    yield from projections(c, name)
    yield Leaf(f"{name}.self_attn.o_proj.weight", (heads, d))
    if c.qk_norm:
        yield Leaf(f"{name}.self_attn.q_norm.weight", (c.head_dim,))
        yield Leaf(f"{name}.self_attn.k_norm.weight", (c.head_dim,))
    for part in ("input_layernorm", "post_attention_layernorm"):
        yield Leaf(f"{name}.{part}.weight", (d,))
    for part, shape in (("gate_proj", (d, f)), ("up_proj", (d, f)), ("down_proj", (f, d))):
        yield Leaf(f"{name}.mlp.{part}.weight", shape)


def projections(c: DenseConfig, name: str) -> Iterator[Leaf]:
    """What makes keys and values."""
    for part in ("k_proj", "v_proj"):
        yield Leaf(f"{name}.self_attn.{part}.weight", (c.hidden_size, c.num_key_value_heads * c.head_dim))


def layer(c: DenseConfig, draft: SeparateConfig | None, index: int, position: int) -> Iterator[Leaf]:
    """Target layer `index` at `position` of its rank, and the context projection of its tap."""
    yield from block(c, f"layers.{position}")
    if draft and index in draft.target_layer_ids:
        yield Leaf(f"taps.{position}.weight", (c.hidden_size, c.hidden_size))


def head(c: DenseConfig, expert: int) -> Iterator[Leaf]:
    """The end of the target, on the last rank."""
    yield Leaf("norm.weight", (c.hidden_size,))
    if not c.tie_word_embeddings:
        yield Leaf("lm_head.weight", (c.hidden_size, padded_vocab(c, expert)), split=True)


def embedding(c: DenseConfig, expert: int) -> Leaf:
    """Of the first rank, and of the last one if its head is the same or its drafter borrows it."""
    return Leaf("embed_tokens.weight", (padded_vocab(c, expert), c.hidden_size), role="table", split=True)


def drafter(c: DenseConfig, draft: SeparateConfig, position: int) -> Iterator[Leaf]:
    """The drafter, its layers from layer position `position` on."""
    own, d = draft.layers if isinstance(draft, StandaloneConfig) else draft.model, c.hidden_size
    for stage in range(draft.num_stages):
        yield from block(own, f"layers.{position + stage}")
    if not isinstance(draft, StandaloneConfig):
        yield Leaf("draft.model.embed_tokens.weight", (own.vocab_size, own.hidden_size), role="table")
        yield Leaf("draft.model.norm.weight", (own.hidden_size,))
        if not own.tie_word_embeddings:
            yield Leaf("draft.lm_head.weight", (own.hidden_size, own.vocab_size))
        return
    yield Leaf("draft.hidden_norm.weight", (d,))
    yield Leaf("draft.norm.weight", (d,))
    if draft.own_embedding:
        yield Leaf("draft.embed_tokens.weight", (own.vocab_size, d), role="table")
    if draft.own_head:
        yield Leaf("draft.lm_head.weight", (d, draft.draft_vocab_size))
    if draft.mapped:
        yield Leaf("draft.d2t", (draft.draft_vocab_size,), "int", "table")
    if draft.head != "none":
        yield from sequential_head(draft)
    if draft.confidence != "none":
        read = d + (draft.markov_rank if draft.confidence == "markov" else 0)
        yield Leaf("draft.confidence_head.proj.weight", (read, 1))
        yield Leaf("draft.confidence_head.proj_bias", (1,), "fp32")


def sequential_head(draft: StandaloneConfig) -> Iterator[Leaf]:
    """What every step of drafting reads; whole on every expert rank."""
    name, d, rank = "draft.markov_head", draft.layers.hidden_size, draft.markov_rank
    yield Leaf(f"{name}.markov_w1.weight", (draft.layers.vocab_size, rank), role="table")
    yield Leaf(f"{name}.markov_w2.weight", (rank, draft.draft_vocab_size))
    if draft.head == "gated":
        yield Leaf(f"{name}.gate_proj.weight", (d + rank, rank))
        yield Leaf(f"{name}.gate_bias", (rank,), "fp32")
    if draft.head == "rnn":
        yield Leaf(f"{name}.joint_proj.weight", (2 * rank + d, 3 * rank))
        yield Leaf(f"{name}.joint_bias", (3 * rank,), "fp32")


def rank_leaves(
    c: DenseConfig, draft: SeparateConfig | None, ranges: Ranges, expert: int, rank: int, num_slots: int | None = None
) -> set[Leaf]:
    """Everything that `rank` holds; there are no experts, and no slots of them."""
    first, end = ranges[rank]
    last = rank == len(ranges) - 1
    found = {leaf for i in range(first, end) for leaf in layer(c, draft, i, i - first)}
    if rank == 0 and draft and -1 in draft.target_layer_ids:
        found.add(Leaf("taps.embedding.weight", (c.hidden_size, c.hidden_size)))
    borrowed = isinstance(draft, StandaloneConfig) and not draft.own_embedding
    if rank == 0 or (last and (c.tie_word_embeddings or borrowed)):
        found.add(embedding(c, expert))
    if last:
        found.update(head(c, expert))
        if draft:
            found.update(drafter(c, draft, end - first))
    return found


def rank_cache(c: DenseConfig, draft: SeparateConfig | None, ranges: Ranges, rank: int, max_len: int) -> set[Leaf]:
    """State of one request slot on `rank`, without the slots' axis."""
    first, end = ranges[rank]
    found = {leaf for i in range(first, end) for leaf in _keys_values(c, f"0.{i - first}", max_len)}
    if draft and rank == len(ranges) - 1:
        own = draft.layers if isinstance(draft, StandaloneConfig) else draft.model
        found.update(leaf for stage in range(draft.num_stages) for leaf in _keys_values(own, f"1.{stage}", max_len))
    return found


def _keys_values(c: DenseConfig, name: str, max_len: int) -> Iterator[Leaf]:
    """One layer's, a trash position behind the others."""
    for part in ("key", "value"):
        yield Leaf(f"{name}.{part}", (c.num_key_value_heads, max_len + 1, c.head_dim))
