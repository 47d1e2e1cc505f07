"""The compiled programs of a model on a mesh: prefill ticks and decoding rounds, each one jitted `shard_map`."""

from functools import cached_property

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.decode import round as decode_round
from dspark_jax.decode.schedule import Schedule
from dspark_jax.decode.state import DecodeState, Emission, WorkItem
from dspark_jax.decode.verify import REJECTION
from dspark_jax.errors import ConfigError
from dspark_jax.models.numerics import compiler_options
from dspark_jax.parallel.mesh import EXPERT, PIPE, param_specs


class DecodeProgram:
    """Ticks of one model for a fixed number of slots.

    Args:
      graph: static half of `nnx.split(SpeculativeLM(...))`, built with `axis="expert"`.
      params: the other half, or its shapes.
      mesh: from `make_mesh`; request slots are split over `expert`.
      slots: request slots, a multiple of the expert axis.
      max_len: the most positions of a request, prompt included.
      logprobs: alternatives a token in the emissions' log-probabilities; None leaves those out of the programs.
      schedule: how many drafts are verified; None verifies whole blocks.
      verify: how: REJECTION or COUPLED (`decode.verify`).
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        params: nnx.State,
        mesh: Mesh,
        slots: int,
        max_len: int,
        logprobs: int | None = None,
        schedule: Schedule | None = None,
        verify: str = REJECTION,
    ):
        if mesh.shape[PIPE] != 1:
            raise ConfigError(
                f"mesh has pipe = {mesh.shape[PIPE]}; this version decodes on one pipeline stage: use pipe = 1"
            )
        if slots % mesh.shape[EXPERT]:
            raise ConfigError(f"slots is {slots}; expected a multiple of the expert axis, {mesh.shape[EXPERT]}")
        self.graph, self.mesh, self.slots, self.max_len = graph, mesh, slots, max_len
        self.logprobs, self.schedule, self.verify = logprobs, schedule, verify
        self._specs = param_specs(params)
        self._options = compiler_options(getattr(self._model(params)[0], "config", None))

    def _model(self, params: nnx.State):
        model = nnx.merge(self.graph, params)
        return model.target, model.drafter

    def _shard(self, f, in_specs, out_specs, donate: int):
        mapped = jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        # Said outright for the sake of empty arrays (drafts where there is no drafter), which would come back replicated.
        placed = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), out_specs)
        return jax.jit(mapped, donate_argnums=donate, out_shardings=placed, compiler_options=self._options)

    def init_state(self, params: nnx.State) -> DecodeState:
        """Idle slots, placed on the mesh."""
        return self._init(params)

    @cached_property
    def _init(self):
        def init(params):
            return decode_round.init_state(*self._model(params), self.slots, self.max_len, schedule=self.schedule)

        return jax.jit(init, out_shardings=NamedSharding(self.mesh, PartitionSpec(EXPERT)))

    @cached_property
    def prefill(self):
        """(params, state, item) -> (state, emission): one tick over a work item; the state is donated."""

        def run(params: nnx.State, state: DecodeState, item: WorkItem) -> tuple[DecodeState, Emission]:
            model = self._model(params)
            return decode_round.tick(*model, state, item, self.max_len, self.logprobs, self.schedule, EXPERT, self.verify)

        rows = PartitionSpec(EXPERT)
        return self._shard(run, (self._specs, rows, rows), (rows, rows), donate=1)

    def rounds(self, count: int, speculate: bool = True):
        """(params, state) -> (state, emissions [count, slots, …]): `count` rounds in one call; the state is donated.

        `speculate=False` is plain decoding: one token a round, the drafter is not run.
        """
        return self._rounds(count, speculate)

    def _rounds(self, count: int, speculate: bool):
        cache = self.__dict__.setdefault("_compiled_rounds", {})
        if (count, speculate) not in cache:

            def run(params: nnx.State, state: DecodeState) -> tuple[DecodeState, Emission]:
                target, drafter = self._model(params)
                drafter = drafter if speculate else None
                settings = (self.max_len, count, self.logprobs, self.schedule, EXPERT, self.verify)
                return decode_round.rounds(target, drafter, state, *settings)

            rows, stacked = PartitionSpec(EXPERT), PartitionSpec(None, EXPERT)
            cache[count, speculate] = self._shard(run, (self._specs, rows), (rows, stacked), donate=1)
        return cache[count, speculate]

    def place(self, params: nnx.State) -> nnx.State:
        """Parameters on the mesh."""
        return jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(self.mesh, s)), params, self._specs)
