"""Commands on several ranks or processes: engines behind the calls of `LM` that commands use."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import jax
from jax.sharding import Mesh

from dspark_jax import api
from dspark_jax.api import LM
from dspark_jax.chat import ChatTemplate
from dspark_jax.checkpoint.reader import Weights
from dspark_jax.cli_devices import stage_ranges
from dspark_jax.cli_loading import loading
from dspark_jax.config import Numerics
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.decode.batch import Request
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.schedule_source import SchedulerOption
from dspark_jax.decode.verify import REJECTION
from dspark_jax.eplb.validation import PlacementSource
from dspark_jax.errors import ConfigError
from dspark_jax.parallel.distributed import check_processes, requested
from dspark_jax.parallel.mesh import EXPERT, PIPE, make_mesh
from dspark_jax.parallel.mesh_config import MeshConfig
from dspark_jax.parallel.stage import Ranges
from dspark_jax.requests import Params, Prompt, RequestReader
from dspark_jax.results import Completion, RoundOutput
from dspark_jax.serve.engine import Engine
from dspark_jax.serve.processes import spans_processes


class EngineRunner:
    """Generates on a mesh; drafting and plain decoding are two programs, so each has an engine, made when needed.

    Args:
      model: a shipped model's name, or a checkpoint folder.
      mesh: from `make_mesh`.
      stages: the half-open range of target layers of every pipe rank; by default the engine's choice.
      max_logprobs, placement, scheduler, verify, weights, numerics, drafter, draft_tokens: as for `Engine`; plain decoding has
        no scheduler.
      slots: requests decoded side by side, rounded up to a multiple of pipe × expert; by default the fewest.
    """

    def __init__(
        self,
        model: str,
        mesh: Mesh,
        stages: Ranges | str | None = None,
        max_logprobs: int | None = None,
        placement: PlacementSource | None = None,
        scheduler: SchedulerOption | None = None,
        verify: str = REJECTION,
        weights: Weights = "dequantised",
        slots: int = 1,
        numerics: Numerics = "default",
        drafter: Path | None = None,
        draft_tokens: int | None = None,
    ):
        self.model, self.mesh, self.stages, self.max_logprobs = model, mesh, stages, max_logprobs
        self.placement, self.scheduler, self.verify = placement, scheduler, verify
        self.weights: Weights = weights
        self.numerics: Numerics = numerics
        self.drafter, self.draft_tokens = drafter, draft_tokens
        part = mesh.shape[PIPE] * mesh.shape[EXPERT]
        self.slots = -(-slots // part) * part
        self._engines: dict[bool, Engine] = {}
        # Whether this process has to call `follow` where process 0 calls `compile` and `generate`.
        self.follows = spans_processes(mesh) and jax.process_index() > 0

    def engine(self, speculate: bool) -> Engine:
        """The engine that drafts, or the one that decodes plainly."""
        if speculate not in self._engines:
            self._engines[speculate] = Engine(
                self.model, mesh=self.mesh, stages=self.stages, slots=self.slots, speculate=speculate,
                max_logprobs=self.max_logprobs, placement=self.placement,
                scheduler=self.scheduler if speculate else None, verify=self.verify, weights=self.weights,
                numerics=self.numerics, drafter=self.drafter, draft_tokens=self.draft_tokens,
            )  # fmt: skip
        return self._engines[speculate]

    @property
    def draft_config(self) -> AnyDraftConfig | None:
        """The model's drafter."""
        return self.engine(True).draft_config

    @property
    def chat(self) -> ChatTemplate | None:
        """The model's chat template."""
        return next(iter(self._engines.values())).chat

    @cached_property
    def whole(self) -> LM:
        """The model behind the batch interface on the mesh's devices, for passes over whole texts: all of them are expert
        ranks, or where they cannot share the experts out, the first has it alone.
        """
        devices = list(self.mesh.devices.flat)
        expert = 1 if self.engine(True).config.n_routed_experts % len(devices) else len(devices)
        mesh = make_mesh(1, expert, devices)
        return api.load(self.model, mesh=mesh, weights=self.weights, numerics=self.numerics)

    def open(self, speculate: Iterable[bool]) -> None:
        """Makes the engines of these modes, which reads the weights."""
        for mode in speculate:
            self.engine(mode)

    def follow(self, prompts: Sequence[Prompt], params: SamplingParams, *, speculate: Sequence[bool]) -> None:
        """Takes part in process 0's `compile` with these arguments, and then one `generate` for every mode."""
        self.compile(prompts, params, speculate=speculate)
        for mode in speculate:
            self.engine(mode).follow()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return next(iter(self._engines.values())).decode(ids)

    def compile(self, prompts: Sequence[Prompt], params: SamplingParams, *, speculate: Iterable[bool]) -> float:
        """Checks the request, then compiles every mode; returns the seconds that compilation took."""
        engines = [self.engine(mode) for mode in speculate]
        for engine in engines:
            self._read(engine, prompts, params)
        return sum(engine.warmup() for engine in engines)

    def _read(self, engine: Engine, prompts: Sequence[Prompt], params: Params) -> list[Request]:
        return RequestReader(engine.config, engine.tokenizer, engine.max_len, self.max_logprobs).read(prompts, params, False)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        *,
        speculate: bool,
        on_round: Callable[[RoundOutput], None] | None = None,
    ) -> list[Completion]:
        """Answers every prompt; `params` are one for all or one each; `on_round` gets what a round commits, as it arrives."""
        engine = self.engine(speculate)
        requests = self._read(engine, prompts, params)
        keys = [engine.submit(prompt, request.params) for prompt, request in zip(prompts, requests, strict=True)]
        running = set(keys)
        while running:
            for key, output in engine.step():
                if on_round:
                    on_round(output)
                if output.finish_reason:
                    running.discard(key)
        engine.close()
        return [engine.result(key) for key in keys]


Generator = LM | EngineRunner


def generator(
    model: str,
    shape: MeshConfig,
    mesh: Mesh | None,
    logprobs: int | None = None,
    placement: Path | None = None,
    scheduler: SchedulerOption | None = None,
    verify: str = REJECTION,
    weights: Weights = "dequantised",
    slots: int = 1,
    drafter: Path | None = None,
    draft_tokens: int | None = None,
    numerics: Numerics = "default",
) -> Generator:
    """The batch interface on one pipeline rank of one process; an engine on more, and to place experts."""
    check_processes(mesh)
    alone = mesh is None or (shape.pipe == 1 and not requested())
    if placement is not None and mesh is None:
        raise ConfigError("--placement spreads experts over expert ranks; add --mesh, such as --mesh 1x2")
    if alone and placement is None:
        with loading():
            own = {"drafter": drafter, "draft_tokens": draft_tokens, "numerics": numerics}
            return api.load(model, mesh=mesh, scheduler=scheduler, verify=verify, weights=weights, **own)
    assert mesh is not None
    stages = stage_ranges(shape, model)
    return EngineRunner(
        model, mesh, stages, logprobs, placement, scheduler, verify, weights, slots, numerics, drafter, draft_tokens
    )
