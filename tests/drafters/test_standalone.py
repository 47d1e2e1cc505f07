"""Drafters with files of their own, round by round against DeepSpec and the speculators library (golden files)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint.drafter import LoadedPair, open_drafter
from dspark_jax.checkpoint.reader import open_checkpoint
from dspark_jax.decode import round as decode_round
from dspark_jax.decode.batch import prefill_items
from dspark_jax.decode.state import decode_item
from dspark_jax.drafters.standalone import StandaloneDrafter
from helpers.speculation import state
from helpers.standalone import DATA, DEEPSPEC, SPECULATORS, TARGET, open_pair

LIMIT = 1e-4  # of the largest value; the references are fp32
MAX_LEN, TOKENS = 96, 40
KEYS = ("hidden", "base_logits", "logits", "tokens", "confidence_logits", "accepted")


class Rounds:
    """Both golden texts side by side, decoded tick by tick; one program does prompts and rounds."""

    def __init__(self, pair: LoadedPair):
        self.gamma = pair.draft.block_size
        params = jax.tree.map(np.asarray, pair.params)

        @jax.jit
        def tick(params, state, item):
            model = nnx.merge(pair.graph, params)
            state, emission = decode_round.tick(model.target, model.drafter, state, item, MAX_LEN)
            drafter, requests = model.drafter, state.requests
            assert isinstance(drafter, StandaloneDrafter)
            hidden = drafter.hidden(requests.anchor, requests.length, state.draft_cache)
            base = drafter.model.base_logits(drafter.target, hidden)
            # At temperature 1 the proposal has the logits, less their maximum; without noise, the greedy tokens.
            warm = requests.sampling.replace(temperature=jnp.ones(2))
            where = requests.anchor, requests.length, requests.active
            proposal = drafter.propose(*where, warm, state.draft_cache, lambda seed, at, k, vocab: jnp.zeros((2, vocab)))
            return state, emission, hidden, base, proposal.logits

        @jax.jit
        def start(params):
            model = nnx.merge(pair.graph, params)
            return decode_round.init_state(model.target, model.drafter, 2, MAX_LEN)

        self.start = start(params)
        self.tick = lambda state, item: tick(params, state, item)

    def prompts(self, prompts):
        state, found = self.start, []
        limits = np.full(2, TOKENS, np.int32)
        state = state.replace(requests=state.requests.replace(max_tokens=limits))
        for item in prefill_items(prompts, 2, self.gamma + 1):
            state, *found = self.tick(state, item)
        return state, *found


def near(found, golden) -> bool:
    return np.abs(np.asarray(found) - golden).max() <= LIMIT * np.abs(golden).max()


# Both layouts, own and borrowed ends, a reduced vocabulary.
ALWAYS = ("deepspec_tiny/gated", "speculators_tiny/masks")
CASES = [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.long) for n in (*DEEPSPEC, *SPECULATORS)]


@pytest.mark.parametrize("name", CASES)
def test_every_round_is_the_references(name: str) -> None:
    folder, goldens, texts = open_pair(name)
    pair = open_drafter(open_checkpoint(TARGET, dtype="float32"), folder, dtype="float32")
    rounds = Rounds(pair)
    state, emission, *first = rounds.prompts([texts[f"text{i}/prompt"] for i in (0, 1)])
    golden = [{key: goldens.get(f"text{i}/{folder.name.removeprefix('drafter-')}/{key}") for key in KEYS} for i in (0, 1)]
    for i, wanted in enumerate(golden):
        hidden, base, logits = (np.asarray(x[i], np.float32) for x in first)
        assert near(hidden, wanted["hidden"]) and near(base, wanted["base_logits"])
        logits = logits[:, np.isfinite(logits[0])]  # of a reduced vocabulary, the drafted tokens alone, ascending
        shifted = wanted["logits"] - wanted["logits"].max(axis=-1, keepdims=True)
        assert np.allclose(logits, shifted, rtol=2**-8, atol=1e-3)  # they are rounded to bf16
    found, done = [[int(emission.token[i, 0])] for i in (0, 1)], [0, 0]
    while running := [i for i in (0, 1) if len(found[i]) < TOKENS]:
        known = [i for i in running if done[i] < len(golden[i]["accepted"])]  # speculators' end with the last whole block
        for i in known:
            assert np.array_equal(state.requests.drafts[i], golden[i]["tokens"][done[i]])
            confidence = golden[i]["confidence_logits"]
            wanted = np.zeros(rounds.gamma) if confidence is None else confidence[done[i]]
            assert np.allclose(state.requests.confidence[i], wanted, atol=LIMIT)
        state, emission, *_ = rounds.tick(state, decode_item(state.requests, rounds.gamma))
        assert all(int(emission.accepted[i]) == golden[i]["accepted"][done[i]] for i in known)
        for i in running:
            found[i] += [int(t) for t in emission.token[i, : int(emission.count[i])]]
            done[i] += 1
    for i in (0, 1):
        assert found[i] == texts[f"text{i}/greedy"].tolist()
        assert done[i] >= len(golden[i]["accepted"]) - 1  # DeepSpec begins one more when the last token is known


@pytest.mark.long
def test_rows_that_pad_the_vocabulary_are_never_drafted(tmp_path) -> None:
    """vLLM's #55133: a draft vocabulary above the target's maps identically. The padding would win every argmax here."""
    folder = DATA / "deepspec_tiny/drafter-vanilla"
    weights = load_file(folder / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        weights[name] = np.concatenate([weights[name], 9 * weights[name][:8], -9 * weights[name][:8]])
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"vocab_size": len(weights["lm_head.weight"])})
    )
    save_file(weights, tmp_path / "model.safetensors")
    target = open_checkpoint(TARGET, dtype="float32")
    anchor, position = jnp.array([3, 40]), jnp.array([2, 7])
    found = []
    for source in (folder, tmp_path):
        pair = open_drafter(target, source, dtype="float32")

        @jax.jit
        def propose(params, sampling, graph=pair.graph):
            drafter = nnx.merge(graph, params).drafter
            return drafter.propose(anchor, position, anchor > 0, sampling, drafter.init_cache(2, 16))

        found.append(propose(jax.tree.map(np.asarray, pair.params), state(2)))
    assert pair.draft.draft_vocab_size == 112 and found[1].logits.shape[-1] == 96
    assert all(np.array_equal(one, two) for one, two in zip(*map(jax.tree.leaves, found), strict=True))
