"""A dense model as drafter, one draft after the other and PARD's way; reduced draft vocabularies keep the law."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import SamplingParams, load
from dspark_jax.checkpoint.drafter import open_drafter
from dspark_jax.checkpoint.reader import open_checkpoint
from dspark_jax.config_drafter import StandaloneConfig
from dspark_jax.decode import round as decode_round
from dspark_jax.decode.batch import prefill_items
from dspark_jax.decode.rows import padded_rows
from dspark_jax.decode.state import decode_item
from dspark_jax.decode.verify import speculative_sample
from dspark_jax.drafters.draw import draw_block
from dspark_jax.drafters.heads import NoHead
from dspark_jax.drafters.standalone import Standalone
from helpers.dense import dense, letters
from helpers.sampling_reference import softmax
from helpers.speculation import state, tile
from helpers.standalone import DATA, TARGET
from helpers.statistics import matches

GAMMA, TOKENS, PARD = 3, 12, 91
PROMPTS = [[5, 17, 40], [8, 2, 33, 60, 71, 12, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return dense("qwen3").write(tmp_path_factory.mktemp("target"), letters())


@pytest.fixture(scope="module")
def padded(folder, tmp_path_factory):
    """The target itself as drafter, with rows of the embedding that no token has and that would win every argmax."""
    model = dense("qwen3")
    weights = dict(model.weights)
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = np.concatenate([table, 9 * np.abs(table[:8])])
    config = model.config | {"vocab_size": len(table) + 8}
    return replace(model, config=config, weights=weights).write(tmp_path_factory.mktemp("drafter"))


def test_a_draft_model_that_is_the_target_is_always_right(folder, padded):
    """And the text is transformers' greedy one."""
    lm, model = load(folder, drafter=padded, draft_tokens=GAMMA), dense("qwen3")
    assert lm.gamma == GAMMA
    prompts = [model.prompt, model.text[: len(model.prompt) + 5]]
    for result in lm.generate(prompts, SamplingParams(max_tokens=TOKENS + 1)):
        at = len(result.prompt_tokens)
        assert list(result.tokens) == model.text[at : at + TOKENS + 1]
        assert result.rounds == TOKENS // (GAMMA + 1) and result.accepted_by_position == result.verified_by_position


def test_pard_drafts_are_those_of_one_causal_pass_over_its_token(folder, tmp_path):
    model = dense("qwen3")
    drafter = model.write(tmp_path / "pard")
    (drafter / "config.json").write_text(json.dumps(model.config | {"pard_token": PARD}))
    pair = open_drafter(open_checkpoint(folder, dtype="float32"), drafter, dtype="float32", draft_tokens=GAMMA)
    params = jax.tree.map(np.asarray, pair.params)

    @jax.jit
    def tick(params, state, item, text, count):
        """A tick, and the drafts of one pass without a cache over `text`, which ends in the anchor and PARD's token."""
        lm = nnx.merge(pair.graph, params)
        state, emission = decode_round.tick(lm.target, lm.drafter, state, item, 32)
        rows = padded_rows(text, jnp.zeros(2, jnp.int32), count)
        hidden, _, _ = lm.draft.forward(rows, lm.draft.init_cache(2, 32, 32))
        wanted = rows.to_lanes(jnp.argmax(lm.draft.logits(hidden), axis=-1))
        return state, emission, wanted

    lm = nnx.merge(pair.graph, params)
    now = decode_round.init_state(lm.target, lm.drafter, 2, 32)
    now = now.replace(requests=now.requests.replace(max_tokens=np.full(2, TOKENS, np.int32)))
    items = iter(prefill_items(PROMPTS, 2, GAMMA + 1))
    texts, kept = [list(p) for p in PROMPTS], []
    for _ in range(5):
        item = next(items, None) or decode_item(now.requests, GAMMA)
        ids, count = np.zeros((2, 32), np.int32), np.zeros(2, np.int32)
        # The tick's outcome is not known here: it is run once for that, and once more to have both from one program.
        _, emission, _ = tick(params, now, item, ids, count)
        for i, text in enumerate(texts):
            text += np.asarray(emission.token[i, : int(emission.count[i])]).tolist()
            row = [*text, *[PARD] * (GAMMA - 1)]
            ids[i, : len(row)], count[i] = row, len(row)
        now, emission, wanted = tick(params, now, item, ids, count)
        for i, text in enumerate(texts):
            if emission.count[i]:
                first = len(text) - 1
                assert np.array_equal(now.requests.drafts[i], wanted[i, first : first + GAMMA])
                kept.append(tuple(np.asarray(now.requests.drafts[i]).tolist()))
    assert len({drafts[1:] for drafts in kept}) > 2  # of the rows behind the anchor's


def test_a_reduced_vocabulary_keeps_the_targets_law():
    """Tokens that cannot be drafted come from the residual: the token follows the target's law exactly."""
    rows, vocab = 2 * 10**5, 6
    target = np.array([0.3, -1.2, 0.8, 1.1, -0.4, 0.1], np.float32)
    base = np.array([0.4, -0.6, 0.2], np.float32)
    pair = open_drafter(open_checkpoint(TARGET, dtype="float32"), DATA / "speculators_tiny/drafter-rnn", dtype="float32")
    assert isinstance(pair.draft, StandaloneConfig)
    model = nnx.eval_shape(lambda: Standalone(replace(pair.draft, draft_vocab_size=3), rngs=nnx.Rngs(0)))
    model.d2t = nnx.Param(jnp.array([1, 2, 3], jnp.int32))  # draft ids 0, 1, 2 are tokens 1, 3, 5

    @jax.jit
    def run(sampling, p, q):
        position = jnp.zeros(rows, jnp.int32)
        hidden = jnp.zeros((rows, 1, 2))
        proposal = draw_block(NoHead(), None, q, hidden, position, position, sampling, widen=model.widen(vocab))
        one = jnp.ones(rows, jnp.int32)
        verdict = speculative_sample(p, proposal.logits, proposal.tokens, one, sampling, position)
        return proposal.tokens, jnp.where(verdict.accepted == 1, proposal.tokens[:, 0], verdict.token)

    tokens, first = run(state(rows), tile(np.stack([target, target]), rows), tile(base[None], rows))
    assert set(np.unique(tokens)) == {1, 3, 5} and set(np.unique(first)) == set(range(vocab))
    assert matches(np.asarray(first), softmax(target))
