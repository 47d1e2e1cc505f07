"""What a decoding tick costs a pipeline rank of a dense model: `CostModel`'s rates over a dense model's bytes and products.

The rates are fitted to V4-style stages. Of a dense model a cut needs little more than the weights' and the state's bytes,
which nearly all of the time goes into; nothing here was fitted to measurements of one.
"""

import math
from collections.abc import Iterable

from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import SeparateConfig, StandaloneConfig
from dspark_jax.parallel import dense_leaves as leaves
from dspark_jax.parallel.leaves import Leaf, padded_vocab
from dspark_jax.parallel.stage_cost import CostModel, Work, Workload


class DenseCosts:
    """Seconds of the parts of a dense model and its drafter in one tick of `load`."""

    def __init__(self, model: CostModel, c: DenseConfig, draft: SeparateConfig | None, load: Workload):
        self.model, self.c, self.draft, self.load = model, c, draft, load
        self.gamma = draft.block_size if draft else 0
        self.slots = load.local_slots(self.gamma)
        self.rows = math.ceil(load.rows / load.expert)

    def layer(self, index: int) -> float:
        """Of target layer `index`, its tap's projection included."""
        work = [self._weights(leaves.layer(self.c, self.draft, index, 0), self.rows), self._attention(self.c, self.rows)]
        return self.model.seconds(work, self.model.layer_launches)

    def head(self) -> float:
        """From the last layer to the verdict on the drafts."""
        return self.model.seconds([*self._head(self.rows), self._sampling(self.rows)], self.model.head_launches)

    def drafter(self) -> float:
        """Context write and drafting."""
        draft, model = self.draft, self.model
        if draft is None:
            return 0.0
        rows, tick = self.slots * self.gamma, self.slots * (self.gamma + 1)
        found = list(leaves.drafter(self.c, draft, 0))
        own = draft.layers if isinstance(draft, StandaloneConfig) else draft.model
        if not isinstance(draft, StandaloneConfig):  # a pass over the tick's rows, and one a draft, or one in all
            passes = 1 if draft.mask_token_id is not None else self.gamma
            work = [self._sampling(rows)]
            for n in [tick, *[rows // passes] * passes]:
                work += [self._weights(found, n), *[self._attention(own, n)] * own.num_hidden_layers]
            return model.seconds(work, model.layer_launches * own.num_hidden_layers * (passes + 1))
        steps = list(leaves.sequential_head(draft)) if draft.head != "none" else []
        whole = [leaf for leaf in found if leaf not in steps]
        context = [leaf for i in range(draft.num_stages) for leaf in leaves.projections(own, f"layers.{i}")]
        work = [self._weights(whole, rows), self._weights(context, tick)]
        work += [self._attention(own, rows)] * draft.num_stages + [self._weights(steps, self.slots)] * self.gamma
        work += [] if draft.own_head else self._head(rows)
        work.append(self._sampling(rows))
        launches = model.layer_launches * draft.num_stages + model.head_launches + model.step_launches * self.gamma
        return model.seconds(work, launches)

    def _head(self, rows: int) -> list[Work]:
        """The output head, which is the embedding where there is no other."""
        size = self.c.hidden_size * padded_vocab(self.c, self.load.expert)
        return [Work(size * self.load.item_size / self.load.expert, 2 * rows * size)]

    def _sampling(self, rows: int) -> Work:
        return Work(self.model.logit_passes * rows * self.c.vocab_size * 4, 0)

    def _weights(self, found: Iterable[Leaf], rows: int) -> Work:
        """Weights read and multiplied with."""
        read = flops = 0.0
        for leaf in found:
            if leaf.role == "table":
                read += rows * leaf.shape[-1] * 4
            else:
                read += leaf.bytes(self.load.item_size, self.load.expert)
                flops += 2 * rows * leaf.size
        return Work(read, flops)

    def _attention(self, c: DenseConfig, rows: int) -> Work:
        """Keys and values of the whole context, read by every request, and the products with them."""
        state = 2 * c.num_key_value_heads * c.head_dim * self.load.context
        heads = rows * c.num_attention_heads * c.head_dim
        read = self.slots * state * self.load.item_size + self.model.head_passes * heads * 4
        return Work(read, 4 * heads * self.load.context)
