"""Counting rows by logical expert on the mesh: which iteration a tick belongs to, and that the counts are true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.eplb import ExpertCounter, StatisticsError, read_statistics
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from helpers.placed_model import CONFIG, DRAFT, EXPERTS, GAMMA, base_engine, lm, make_engine, requests, shuffled

TOP_K = CONFIG.num_experts_per_tok


def recount(engine: Engine, window: tuple[int, int] = (0, 10**6)) -> ExpertCounter:
    """Begins to count anew, on an idle engine."""
    engine.expert_counter = ExpertCounter(engine.ring.spec.expert_layers, 2, EXPERTS, TOP_K, window)
    return engine.expert_counter


def test_an_iteration_is_one_pass_of_a_microbatch_through_the_ranks():
    """Rank p sees in tick t what the first rank took in tick t - p; iterations end with the last rank's counts."""
    counter = ExpertCounter([(0,), (1,), (2, 3)], 2, 4, 1, (0, 3))
    ticks = np.zeros((3, 5, 2, 2, 4), np.int32)  # pipe rank, tick, expert rank, position, expert
    for p in range(3):
        for t in range(5):
            for rank in range(2):
                ticks[p, t, rank, : [1, 1, 2][p]] = 100 * (t - p) + 10 * rank + p
    for part in (ticks[:, :2], ticks[:, 2:3], ticks[:, 3:]):  # calls of other lengths
        counter.add(part.reshape(3, -1, 4, 4))
    assert counter.iterations == 3
    for rank, recorder in enumerate(counter.recorders):
        found = {key: row.tolist() for key, row in recorder.counts.items()}
        owner = {0: 0, 1: 1, 2: 2, 3: 2}
        assert found == {(i, layer): [100 * i + 10 * rank + owner[layer]] * 4 for i in range(3) for layer in range(4)}


def test_a_window_that_the_run_does_not_reach_is_named(tmp_path):
    counter = ExpertCounter([(0,), (1,)], 1, 4, 1, (5, 9))
    counter.add(np.ones((2, 4, 1, 4), np.int32))
    with pytest.raises(StatisticsError, match=r"window \[5, 9\) was counted, of 3 in all"):
        counter.write(tmp_path)


def prompt_load(prompt: list[int]) -> np.ndarray:
    """Rows by expert of every target layer for a prompt, by another program: the whole sequence at once."""
    graph, params = lm()._graph, lm()._params

    def run(params, token):
        return [aux.load for aux in nnx.merge(graph, params).target.sequence(token).moe]

    here = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(run, mesh=make_mesh(), in_specs=(here, here), out_specs=here, check_vma=False)
    return np.stack(jax.jit(mapped)(params, jnp.asarray([prompt])))


def test_a_prompt_counts_its_own_rows_and_no_draft():
    """In chunks, beside idle slots and padded rows; a request that ends with its first token never drafts."""
    engine, prompt = base_engine(1, 2), [1, 7, 3, 3, 9]
    counter = recount(engine)
    engine.generate([prompt], SamplingParams(max_tokens=1))
    found = counter.statistics()
    assert found.layers == [0, 1, 2, 3]
    np.testing.assert_array_equal(found.load()[:2], prompt_load(prompt))
    assert not found.load()[2:].any()


def test_every_row_is_counted_and_files_hold_it(tmp_path):
    engine = base_engine(1, 2)
    counter = recount(engine)
    engine.timeline.clear()
    answers = engine.generate(*requests())
    found = counter.statistics()
    rows = sum(tick.rows[0] for tick in engine.timeline)
    assert found.load()[:2].sum(axis=1).tolist() == [TOP_K * rows] * 2
    drafting = sum(answer.rounds for answer in answers)  # every commit but a request's last one
    assert found.load()[2:].sum(axis=1).tolist() == [TOP_K * GAMMA * drafting] * DRAFT.num_stages
    assert len(found.iterations) == counter.iterations == found.iterations[-1] + 1
    assert all((i, layer) in found.counts for i in found.iterations for layer in found.layers)
    counter.write(tmp_path)
    files = read_statistics(tmp_path)
    assert files.ranks == 2 and files.counts.keys() == found.counts.keys()
    for key, row in found.counts.items():
        np.testing.assert_array_equal(files.counts[key], row)
    later = recount(engine, (2, 5))
    engine.generate(*requests())
    part = later.statistics()
    assert part.iterations == [2, 3, 4]
    for key, row in part.counts.items():
        np.testing.assert_array_equal(found.counts[key], row)


@pytest.mark.long
@pytest.mark.parametrize(("pipe", "expert"), [(1, 2), (2, 2)])
def test_ids_are_logical_under_a_placement_and_ranks_agree_on_iterations(pipe, expert):
    """The same counts by iteration with and without a placement; and one pass of a microbatch is one iteration."""
    base = base_engine(pipe, expert)
    counter = recount(base)
    placed = make_engine(pipe, expert, placement=shuffled(expert), count_experts=(0, 10**6))
    base.generate(*requests())
    placed.generate(*requests())
    assert placed.expert_counter is not None
    first, second = counter.statistics(), placed.expert_counter.statistics()
    assert first.counts.keys() == second.counts.keys()
    for key, row in first.counts.items():
        np.testing.assert_array_equal(second.counts[key], row)
    for i in first.iterations:  # both target layers see the same rows in one iteration
        assert first.counts[i, 0].sum() == first.counts[i, 1].sum()


def test_counting_is_split_by_expert_rank():
    engine = base_engine(1, 2)
    counter = recount(engine)
    engine.generate([[4, 5]], SamplingParams(max_tokens=1))  # one request lives on one rank
    sums = [sum(row.sum() for row in recorder.counts.values()) for recorder in counter.recorders]
    assert sorted(s > 0 for s in sums) == [False, True]
