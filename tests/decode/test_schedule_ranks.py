"""Schedules over expert ranks: what the ranks agree on and what each chooses among its own requests."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dspark_jax.decode.schedule import (
    Block,
    EarlyStop,
    Scheduler,
    StaleRate,
    StaleSize,
    StepCost,
    bucket_index,
    packed_rows,
    survival,
)
from dspark_jax.decode.schedule.order import admission_rank, admitted
from dspark_jax.parallel.mesh import EXPERT, make_mesh
from helpers.blocks import RISING, STAIRS, THREE, block_of, lengths, random_block, stale_of, thresholds_of


def across(scheduler: Scheduler, block: Block, ranks: int):
    """Lengths on a mesh that splits the slots, and every rank's idea of size and rows."""

    def run(block: Block):
        chosen = scheduler.lengths(block, EXPERT)
        size = scheduler.size(block, EXPERT) if isinstance(scheduler, StaleSize) else jnp.asarray(0)
        return chosen, size[None], packed_rows(block.active, chosen, EXPERT)[None]

    mapped = jax.shard_map(
        run, mesh=make_mesh(1, ranks, jax.devices()[:ranks]), in_specs=P(EXPERT), out_specs=P(EXPERT), check_vma=False
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(block))


def test_ranks_agree_on_the_size_and_choose_among_their_own():
    rng = np.random.default_rng(3)
    blocks = [random_block(rng, slots=3) for _ in range(4)]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *blocks)
    cost = StepCost((*[1.0] * 6, *[1.2] * 4, *[2.9] * 16))
    chosen, size, rows = across(StaleSize(cost), whole, 4)
    assert len(set(size.tolist())) == 1 and size[0] > 0
    for i, block in enumerate(blocks):
        rank, _ = admission_rank(survival(block.confidence), block.candidates)
        own = admitted(rank, block.candidates, jnp.asarray(size[0]))
        assert chosen[3 * i : 3 * i + 3].tolist() == own.tolist()
    per_rank = (1 + chosen).reshape(4, 3).sum(1)
    assert rows.tolist() == [per_rank.max()] * 4
    # The agreed size is the best one for the sums over the ranks.
    tokens = sum(np.asarray(b.active).sum() + np.r_[0, np.cumsum(np.sort(
        (np.asarray(b.stale[:, 1]) * np.asarray(b.candidates)).ravel())[::-1])] for b in blocks)  # fmt: skip
    most = max(int(b.candidates.sum()) for b in blocks)
    assert size[0] == np.argmax((tokens / np.asarray([cost.rows[3 + k] for k in range(16)]))[: most + 1])


def test_thresholds_are_those_of_all_ranks_together():
    rng = np.random.default_rng(7)
    blocks = [replace(random_block(rng, slots=3), room=np.full(3, 5, np.int32)) for _ in range(2)]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *blocks)
    old = [np.sort(np.asarray(b.stale[:, 1]).ravel())[::-1] for b in blocks]
    expected = thresholds_of(RISING, 3, np.maximum((old[0] + old[1]) / 2, 1e-9).astype(np.float64))
    found = jax.jit(jax.shard_map(
        lambda b: StaleRate(RISING).thresholds(b, EXPERT), mesh=make_mesh(1, 2, jax.devices()[:2]), in_specs=P(EXPERT),
        out_specs=P(EXPERT), check_vma=False,
    ))(whole)  # fmt: skip
    chosen, _, _ = across(StaleRate(RISING), whole, 2)
    some = slice(0, int(((old[0] + old[1]) > 0).sum()))
    for own, lengths_here, block in zip(np.split(np.asarray(found), 2), np.split(chosen, 2), blocks, strict=True):
        np.testing.assert_allclose(own[some], expected[some], rtol=2e-4)
        today = np.sort(np.asarray(survival(jnp.asarray(block.confidence))).ravel())[::-1]
        assert ((today > own) & (today > 0)).cumprod().sum() == lengths_here.sum()


def test_b44_small_differences_between_ranks_do_not_part_the_sizes():
    """Equal rows on every rank, apart from the last bits of the confidences."""
    c = np.tile(np.float32(THREE), (2, 1))
    stale = np.tile(stale_of(THREE), (2, 1, 1)) * (1 - 1e-6 * (np.arange(6) >= 3))[:, None, None]
    chosen, size, _ = across(StaleSize(STAIRS), block_of(c, stale=stale), 2)
    assert size.tolist() == [5, 5] and chosen.tolist() == [2, 0, 3] * 2


def test_algorithm_1_plans_rank_by_rank():
    rng = np.random.default_rng(4)
    blocks = [random_block(rng, slots=3) for _ in range(2)]
    chosen, _, rows = across(EarlyStop(RISING), jax.tree.map(lambda *x: jnp.concatenate(x), *blocks), 2)
    expected = [lengths(EarlyStop(RISING), block) for block in blocks]
    assert chosen.tolist() == [n for own in expected for n in own]
    assert rows.tolist() == [max(3 + sum(e) for e in expected)] * 2


def test_buckets():
    find = jax.jit(partial(bucket_index, buckets=(4, 8, 16)))
    assert [int(find(jnp.asarray(rows))) for rows in (0, 1, 4, 5, 8, 9, 16, 17)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert int(packed_rows(jnp.asarray([True, False, True]), jnp.asarray([2, 5, 0]))) == 4
