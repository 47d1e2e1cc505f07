"""`dspark-jax generate` on several ranks or processes: engines behind the calls of `LM` that the command uses."""

from collections.abc import Callable, Iterable, Sequence

import jax
from jax.sharding import Mesh

from dspark_jax.checkpoint.reader import Weights
from dspark_jax.config import DraftConfig
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.schedule_source import SchedulerOption
from dspark_jax.decode.verify import REJECTION
from dspark_jax.eplb.validation import PlacementSource
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.stage import Ranges
from dspark_jax.requests import Prompt, RequestReader
from dspark_jax.results import Completion, RoundOutput
from dspark_jax.serve.engine import Engine
from dspark_jax.serve.processes import spans_processes


class EngineRunner:
    """Generates on a mesh; drafting and plain decoding are two programs, so each has an engine, made when needed.

    Args:
      model: a shipped model's name, or a checkpoint folder.
      mesh: from `make_mesh`.
      stages: the half-open range of target layers of every pipe rank; by default the engine's choice.
      max_logprobs, placement, scheduler, verify, weights: as for `Engine`; plain decoding has no scheduler.
    """

    def __init__(
        self,
        model: str,
        mesh: Mesh,
        stages: Ranges | None = None,
        max_logprobs: int | None = None,
        placement: PlacementSource | None = None,
        scheduler: SchedulerOption | None = None,
        verify: str = REJECTION,
        weights: Weights = "dequantised",
    ):
        self.model, self.mesh, self.stages, self.max_logprobs = model, mesh, stages, max_logprobs
        self.placement, self.scheduler, self.verify = placement, scheduler, verify
        self.weights: Weights = weights
        self._engines: dict[bool, Engine] = {}
        # Whether this process has to call `follow` where process 0 calls `compile` and `generate`.
        self.follows = spans_processes(mesh) and jax.process_index() > 0

    def _engine(self, speculate: bool) -> Engine:
        if speculate not in self._engines:
            slots = self.mesh.shape[PIPE] * self.mesh.shape[EXPERT]  # the fewest
            self._engines[speculate] = Engine(
                self.model, mesh=self.mesh, stages=self.stages, slots=slots, speculate=speculate,
                max_logprobs=self.max_logprobs, placement=self.placement,
                scheduler=self.scheduler if speculate else None, verify=self.verify, weights=self.weights,
            )  # fmt: skip
        return self._engines[speculate]

    @property
    def draft_config(self) -> DraftConfig | None:
        """The model's drafter."""
        return self._engine(True).draft_config

    def open(self, speculate: Iterable[bool]) -> None:
        """Makes the engines of these modes, which reads the weights."""
        for mode in speculate:
            self._engine(mode)

    def follow(self, prompts: Sequence[Prompt], params: SamplingParams, *, speculate: Sequence[bool]) -> None:
        """Takes part in process 0's `compile` with these arguments, and then one `generate` for every mode."""
        self.compile(prompts, params, speculate=speculate)
        for mode in speculate:
            self._engine(mode).follow()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return next(iter(self._engines.values())).decode(ids)

    def compile(self, prompts: Sequence[Prompt], params: SamplingParams, *, speculate: Iterable[bool]) -> float:
        """Checks the request, then compiles every mode; returns the seconds that compilation took."""
        engines = [self._engine(mode) for mode in speculate]
        for engine in engines:
            RequestReader(engine.config, engine.tokenizer, engine.max_len, self.max_logprobs).read(prompts, params, False)
        return sum(engine.warmup() for engine in engines)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        speculate: bool,
        on_round: Callable[[RoundOutput], None] | None = None,
    ) -> list[Completion]:
        """Answers every prompt; `on_round` gets what a round commits, as it arrives."""
        engine = self._engine(speculate)
        keys = [engine.submit(prompt, params) for prompt in prompts]
        running = set(keys)
        while running:
            for key, output in engine.step():
                if on_round:
                    on_round(output)
                if output.finish_reason:
                    running.discard(key)
        engine.close()
        return [engine.result(key) for key in keys]
