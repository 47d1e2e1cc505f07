"""A model whose ring compiles fast, with three drafts a round: for tests of schedules on a mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.api import LM
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.config import DraftConfig
from dspark_jax.decode import noise
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.schedule import EarlyStop, FixedLength, Plan, Schedule, StaleRate, StaleSize, StepCost, Threshold
from dspark_jax.decode.state import Requests
from dspark_jax.decode.verify import REJECTION
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.results import Completion
from dspark_jax.serve.engine import Engine
from helpers import placed_model
from helpers.checkpoints import random_params
from helpers.runner import scaled_error

GAMMA, MAX_LEN, SLOTS = 3, placed_model.MAX_LEN, 4  # slots of a microbatch, over all expert ranks
CONFIG = dataclasses.replace(placed_model.CONFIG, vocab_size=6)
DRAFT = DraftConfig(block_size=GAMMA, noise_token_id=5, target_layer_ids=(0, 1), num_stages=1, markov_rank=3)
TOP = CONFIG.vocab_size  # log-probabilities of the whole vocabulary


def stairs(rows: int, step: int) -> StepCost:
    """A cost in steps of `step` rows, half of which is the same for every batch."""
    return StepCost(tuple(1 + -(-n // step) * step / rows for n in range(rows + 1)))


@dataclass(frozen=True)
class BySeed(Schedule):
    """One of several schedules, all in one program: the requests' seed, the same in a batch, names their schedule."""

    choices: tuple[Schedule, ...] = ()

    def init(self, slots: int, gamma: int) -> Float[Array, "R history gamma"]:
        return jnp.ones((slots, max(choice.scheduler.history for choice in self.choices), gamma), jnp.float32)

    def step(
        self,
        requests: Requests,
        committed: Int[Array, "R"],
        stale: Float[Array, "R history gamma"],
        axis: str | None = None,
        plan: Plan | None = None,
    ) -> tuple[Requests, Float[Array, "R history gamma"]]:
        seed = jnp.max(jnp.where(requests.active, requests.sampling.seed, 0)).astype(jnp.int32)
        seed = seed if axis is None else jax.lax.pmax(seed, axis)
        steps = [functools.partial(choice.step, axis=axis) for choice in self.choices]
        return jax.lax.switch(seed, steps, requests, committed, stale)


def schedules(slots: int) -> dict[str, Schedule]:
    """By name, for so many slots of a microbatch on one expert rank."""
    cost = stairs(slots * (GAMMA + 1), 3)
    return {
        "fixed": Schedule(FixedLength(2)),
        "threshold": Schedule(Threshold(0.5)),
        "early stop": Schedule(EarlyStop(StepCost(tuple(1 + 0.1 * n for n in range(slots * (GAMMA + 1) + 1))))),
        "stale size": Schedule(StaleSize(cost), (0.5, 1.5, 3.0)),
        "stale rate": Schedule(StaleRate(cost), (0.5, 1.5, 3.0)),
    }


NAMES = tuple(schedules(1))


def weights() -> nnx.State:
    """Of the first seeds one whose drafts are often right; confidence logits of a few units, where they were hundreds."""

    def milder(path: tuple, leaf: np.ndarray) -> np.ndarray:
        return leaf / 200 if any("confidence" in str(getattr(key, "key", "")) for key in path) else leaf

    return jax.tree_util.tree_map_with_path(milder, random_params(CONFIG, DRAFT, 7))


@functools.cache
def lm() -> LM:
    """Random weights everywhere."""
    graph, _ = skeleton(CONFIG, DRAFT, dtype=np.float32, axis="expert")
    return LM(CONFIG, DRAFT, graph, weights(), placed_model.Letters(), max_len=MAX_LEN)


def all_schedules(slots: int) -> BySeed:
    """All of `NAMES` in one program."""
    return BySeed(FixedLength(), choices=tuple(schedules(slots).values()))


@functools.cache
def engine(pipe: int, expert: int, verify: str = REJECTION) -> Engine:
    """With one packed bucket of three quarters of the rows; shared by all tests of a process, idle between them."""
    slots = SLOTS // expert
    return Engine(
        lm(), mesh=make_mesh(pipe, expert), slots=SLOTS * pipe, chunk=GAMMA + 1, max_len=MAX_LEN, max_logprobs=TOP,
        scheduler=all_schedules(slots), buckets=[slots * (GAMMA + 1) * 3 // 4],
        verify=verify,
    )  # fmt: skip


@functools.cache
def requests(count: int = 12) -> list[tuple[list[int], SamplingParams]]:
    """Ragged greedy requests, more than there are slots, most of several chunks."""
    rng = np.random.default_rng(5)  # no row of them is ill-conditioned
    prompts = [rng.integers(0, TOP, int(rng.integers(1, 12))).tolist() for _ in range(count)]
    return [(prompt, SamplingParams(max_tokens=int(rng.integers(6, 20)), logprobs=TOP)) for prompt in prompts]


def chosen(name: str, temperature: float = 0.0) -> tuple[list[list[int]], list[SamplingParams]]:
    """The requests under one of the schedules."""
    prompts, params = zip(*requests(), strict=True)
    return list(prompts), [dataclasses.replace(p, seed=NAMES.index(name), temperature=temperature) for p in params]


@functools.cache
def _log_laws():
    """Target log-probabilities [R, T, V] of whole sequences, without any cache."""
    graph, _ = skeleton(CONFIG, DRAFT, dtype=np.float32, axis=None)

    def run(params: nnx.State, token: Int[Array, "R T"]) -> Float[Array, "R T V"]:
        target = nnx.merge(graph, params).target
        return jax.nn.log_softmax(target.logits(target.sequence(token).hidden))

    return functools.partial(jax.jit(run), weights())


def _token_laws(answers: Sequence[Completion]) -> list[np.ndarray]:
    """Target log-probabilities [tokens, V] of every answer's tokens, from a pass over the whole of prompt and answer."""
    token = np.zeros((len(answers), MAX_LEN), np.int32)
    for r, a in enumerate(answers):
        both = (*a.prompt_tokens, *a.tokens)
        token[r, : len(both)] = both
    laws = np.asarray(_log_laws()(token))
    return [law[len(a.prompt_tokens) - 1 :][: len(a.tokens)] for law, a in zip(laws, answers, strict=True)]


def check_coupled(answers: Sequence[Completion], params: Sequence[SamplingParams]) -> None:
    """Every token is the argmax of the target's log-probabilities, by temperature, plus the noise of seed and position."""
    for rows, a, p in zip(_token_laws(answers), answers, params, strict=True):
        position = len(a.prompt_tokens) + jnp.arange(len(a.tokens))
        gumbel = noise.gumbel(jnp.full(position.shape, p.seed, jnp.uint32), position, noise.COUPLED, TOP)
        assert a.tokens == tuple((rows / p.temperature + gumbel).argmax(axis=1).tolist())


def check_plain(answers: Sequence[Completion]) -> None:
    """Every text is the target's own greedy one, and its log-probabilities are those of a pass over the whole of it."""
    for rows, a in zip(_token_laws(answers), answers, strict=True):
        assert a.tokens == tuple(rows.argmax(axis=1).tolist())
        said = np.array([[value for _, value in sorted(one.top)] for one in a.logprobs or ()])
        assert scaled_error(said, rows) < 1e-5
