"""The Python interface: `load` a model, then `LM.generate` or `LM.stream`."""

import difflib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.chat import ChatTemplate, read_chat
from dspark_jax.checkpoint.drafter import with_drafter
from dspark_jax.checkpoint.reader import LoadedCheckpoint, Weights, open_checkpoint, read_tokenizer
from dspark_jax.compilation_cache import use_default_cache
from dspark_jax.config import Numerics
from dspark_jax.config_dense import ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.decode.batch import BatchDecoder, Commit, Request
from dspark_jax.decode.sampling import MAX_LOGPROBS, SamplingParams
from dspark_jax.decode.schedule_source import SchedulerOption, fingerprint_of, schedule_source
from dspark_jax.decode.verify import REJECTION, verify_faults
from dspark_jax.errors import CheckpointError, ConfigError, RequestError, memory_for, raise_all
from dspark_jax.models.speculative import embedding_dtype
from dspark_jax.parallel.mesh import EXPERT, PIPE, checked_mesh, param_specs
from dspark_jax.requests import Params, Prompt, RequestReader
from dspark_jax.results import Completion, RoundOutput, Tally
from dspark_jax.text import TextStream, Tokenizer, as_tokenizer

use_default_cache()

ASSETS = Path(__file__).parent / "assets"
MIN_CAPACITY = 256  # positions; smaller programs are not worth a compilation of their own
CHUNK = 64  # prompt tokens of one prefill call


def shipped_models() -> list[str]:
    """Names that `load` knows."""
    if not ASSETS.is_dir():
        return []
    return sorted(folder.name for folder in ASSETS.iterdir() if (folder / "config.json").is_file())


def model_folder(model: str | Path) -> Path:
    """The checkpoint folder that `model` names: a shipped model, else a folder path (`./nano` if one has such a name).

    Raises CheckpointError that lists the shipped models and near matches.
    """
    if not isinstance(model, str | os.PathLike):
        raise CheckpointError(f"model is {model!r:.80}; expected the name of a shipped model or the path of a folder")
    names = shipped_models()
    if isinstance(model, str) and model in names:
        return ASSETS / model
    if str(model) and Path(model).is_dir():
        return Path(model)
    if is_gguf(model):
        raise CheckpointError(
            f"model {str(model)!r} is a GGUF file, which runs by `load` and `Engine` and the commands that use these;"
            " expected the path of a folder here"
        )
    near = difflib.get_close_matches(str(model).lower(), names, 1, 0.5)
    known = f"the name of a shipped model ({', '.join(names)})" if names else "a shipped model (none is installed)"
    from dspark_jax.presets import PRESETS

    problem = "is a file" if str(model) and Path(model).is_file() else "not found"
    if str(model) in PRESETS:
        problem = "is a preset without weights (for `dspark-jax inspect` and `plan-stages`)"
    raise CheckpointError(
        f"model {str(model)!r} {problem}; expected {known} or the path of a folder with config.json, *.safetensors and"
        " tokenizer.json" + (f"; did you mean {near[0]!r}?" if near else "")
    )


def is_gguf(model: str | Path) -> bool:
    """Whether `model` is the path of a GGUF file."""
    return str(model).endswith(".gguf") and Path(model).is_file()


def load(
    model: str | Path,
    *,
    drafter: str | Path | None = None,
    draft_tokens: int | None = None,
    mesh: Mesh | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    weights: Weights = "dequantised",
    numerics: Numerics = "default",
    max_len: int | None = None,
    scheduler: SchedulerOption | None = None,
    profile: str | Path | None = None,
    temperatures: str | Path | None = None,
    unsigned: bool = False,
    verify: str = REJECTION,
) -> "LM":
    """Reads a model and places its weights.

    Args:
      model: the name of a shipped model, a checkpoint folder, or a GGUF file.
      drafter: for a dense model, the folder of a DSpark, DFlash or PARD drafter or of a smaller model, or a smaller model's
        GGUF file; its config.json says which it is (docs/drafters.md). DeepSeek-V4-style models have theirs in the checkpoint.
      draft_tokens: drafts a round of PARD and smaller models, 5 by default; other drafters' blocks have a size.
      mesh: from `dspark_jax.parallel.mesh.make_mesh`; one device by default.
      dtype: of activations and weights; float32 on a CPU and bfloat16 elsewhere by default.
      weights: what devices hold of an fp8 or fp4 checkpoint. "dequantised": numbers of `dtype`; the default, because without
        kernels (on a CPU, in float32) codes are widened anew by every layer. "quantised": the routed experts as their codes,
        for fp4 about a quarter of bfloat16's memory, and the same outputs. "quantised-all": fp8 linear maps, too. See
        docs/checkpoints.md.
      numerics: "reference" rounds activations as DeepSeek's inference code does (entirely so in bfloat16): for comparing with
        it, slower and not more exact. "default" keeps them in `dtype`. See docs/checkpoints.md.
      max_len: most positions of a request, prompt included; by default the model's, at most 4096.
      scheduler, profile, temperatures, unsigned: how many drafts are verified, see `decode.schedule_source` and
        docs/scheduling.md; whole blocks by default.
      verify: how drafts are verified: "rejection" sampling, or "coupled": draft and target share their noise, so that a
        sampled text, too, is a function of prompt and seed, for any drafter or none (docs/scheduling.md).

    Raises CheckpointError or ConfigError for a model that is missing, damaged or contradictory.
    """
    path = Path(model) if is_gguf(model) else model_folder(model)
    faults = list(verify_faults(verify))
    if draft_tokens is not None and drafter is None:
        faults.append(f"draft_tokens is {draft_tokens!r}, without a drafter whose drafts it could count; leave it out")
    raise_all(ConfigError, "load", [*faults, *gguf_faults(path, weights, numerics)])
    source = schedule_source(scheduler, profile, temperatures, unsigned)
    mesh = checked_mesh(mesh)
    default = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16
    dtype = default if dtype is None else dtype
    # LM reads the weights, when it has checked everything else.
    read, tokenizer, chat = open_model(path, dtype, weights, numerics)
    if drafter is not None:
        read = with_drafter(read, drafter, tokenizer, dtype=dtype, draft_tokens=draft_tokens)
    return LM(
        read.config, read.draft, read.graph, read.params, tokenizer, mesh=mesh, max_len=max_len, scheduler=source,
        verify=verify, chat=chat,
    )  # fmt: skip


def gguf_faults(path: Path, weights: Weights, numerics: Numerics) -> Iterator[str]:
    """What is asked for and cannot be had of a GGUF file, if `path` is one."""
    if path.is_file() and weights != "dequantised":
        yield f"weights is {weights!r}; a GGUF file is dequantised when it is read: use 'dequantised'"
    if path.is_file() and numerics != "default":
        yield f"numerics is {numerics!r}; a GGUF file is of another family than DeepSeek-V4: use 'default'"


def open_model(
    path: Path, dtype: jax.typing.DTypeLike, weights: Weights, numerics: Numerics
) -> tuple[LoadedCheckpoint, Any, ChatTemplate | None]:
    """A folder or a GGUF file with its tokenizer and its chat template; weights are read when they are placed."""
    if path.is_dir():
        read = open_checkpoint(path, dtype=dtype, axis=EXPERT, weights=weights, numerics=numerics)
        tokenizer = read_tokenizer(path)
        return read, tokenizer, read_chat(path, tokenizer)
    from dspark_jax.checkpoint.gguf_file import open_gguf  # its package is an extra

    return open_gguf(path, dtype=dtype)


def check_mesh(mesh: Mesh, experts: int) -> None:
    """Raises ConfigError for a mesh that a model with so many routed experts cannot generate on; 0 of a dense model, of
    which every device has a copy.
    """
    faults = []
    if mesh.shape[PIPE] != 1:
        faults.append(f"pipe is {mesh.shape[PIPE]}; this version generates on one pipeline stage: use pipe = 1")
    if experts % mesh.shape[EXPERT]:
        faults.append(f"expert is {mesh.shape[EXPERT]}; expected a divisor of the model's {experts} routed experts")
    raise_all(ConfigError, "mesh", faults)


class LM:
    """A model ready to generate.

    Args:
      config, draft: configurations; `draft` is None for a model without a drafter.
      graph, params: `nnx.split` of the `SpeculativeLM` or `DenseLM`, the former built with `axis="expert"` (None will do on
        one device).
      tokenizer: has `encode(text)` and `decode(ids)`, without special tokens; a `tokenizers.Tokenizer` will do.
      mesh, max_len, scheduler, profile, temperatures, unsigned, verify: as for `load`.
      chunk: prompt tokens of one prefill call and request.
      chat: the model's chat template; `lm.chat.encode(messages)` is a prompt. None where the model has none.
      rounds_per_call: decoding rounds of one device call; 1 on a CPU (rounds behind a stop are not run), else 8.

    Programs are compiled for power-of-two numbers of requests, of positions and of alternatives (`logprobs`) when they are
    first needed, and kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        draft: AnyDraftConfig | None,
        graph: nnx.GraphDef,
        params: nnx.State,
        tokenizer: Tokenizer | Any,
        *,
        mesh: Mesh | None = None,
        max_len: int | None = None,
        chunk: int = CHUNK,
        rounds_per_call: int | None = None,
        scheduler: SchedulerOption | None = None,
        profile: str | Path | None = None,
        temperatures: str | Path | None = None,
        unsigned: bool = False,
        verify: str = REJECTION,
        chat: ChatTemplate | None = None,
    ):
        self.chat = chat
        self._schedule = schedule_source(scheduler, profile, temperatures, unsigned)
        raise_all(ConfigError, "LM", verify_faults(verify))
        self.verify = verify
        limit = config.max_position_embeddings
        self.max_len = min(limit, 4096) if max_len is None else max_len
        if not isinstance(self.max_len, int | np.integer) or not 2 <= self.max_len <= limit:
            raise ConfigError(f"max_len is {max_len!r}; expected 2 … {limit}, the model's max_position_embeddings")
        self.mesh = checked_mesh(mesh)
        check_mesh(self.mesh, config.n_routed_experts)
        if self._schedule is not None:
            self._schedule.check(draft, fingerprint_of(config, draft, embedding_dtype(params), self.mesh), params)
        specs = param_specs(params)

        def place(param: Any, spec: PartitionSpec) -> jax.Array:
            host = param if isinstance(param, jax.Array) else np.asarray(param)  # of a checkpoint, it is read here
            return jax.device_put(host, NamedSharding(self.mesh, spec))

        with memory_for("placing the weights"):
            self._params = jax.tree.map(place, params, specs)
        self._graph = graph
        self.config, self.draft_config, self.tokenizer = config, draft, as_tokenizer(tokenizer)
        self._reader = RequestReader(config, self.tokenizer, self.max_len)
        self._chunk = chunk
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        self._rounds_per_call = rounds_per_call or (1 if on_cpu else 8)
        self._decoders: dict[tuple[int, int, int | None], BatchDecoder] = {}
        self._lock = threading.Lock()

    @property
    def gamma(self) -> int:
        """Draft tokens of a round; 0 without a drafter."""
        return self.draft_config.block_size if self.draft_config else 0

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, the beginning-of-sequence token first."""
        return self._reader.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens have none, incomplete characters become U+FFFD."""
        return self.tokenizer.decode([int(i) for i in ids])

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        speculate: bool | None = None,
        ignore_eos: bool = False,
        on_round: Callable[[RoundOutput], None] | None = None,
    ) -> list[Completion]:
        """Answers every prompt; the answers do not depend on each other.

        Args:
          prompts: texts (the beginning-of-sequence token is added) or lists of ids (taken as they are).
          params: one for all prompts or one each; greedy with at most 128 tokens by default.
          speculate: draft and verify (True), or one token a round (False). By default, if the model has a drafter.
          ignore_eos: the model's end-of-sequence token does not stop (`stop_token_ids` still do).
          on_round: called with what every round commits for every request, as it arrives.

        Raises RequestError that names every fault of the request, before any work on a device.
        """
        use_drafts = self._use_drafts(speculate)
        requests = self._reader.read(prompts, params, ignore_eos)
        decoder = self._decoder(requests, [use_drafts])
        tallies = [Tally(self.gamma if use_drafts else 0, r.params.logprobs is not None) for r in requests]
        finish, first, last = [""] * len(requests), [0.0] * len(requests), [0.0] * len(requests)
        streams = [TextStream(self.decode) for _ in requests]
        begin = time.perf_counter()
        for commit in decoder.run(self._params, requests, use_drafts):
            i, now = commit.index, time.perf_counter() - begin
            kept = _count(tallies[i], commit)
            if commit.prefill:
                first[i] = now
            if commit.finish_reason:
                finish[i], last[i] = commit.finish_reason, now
            if on_round:
                on_round(_output(commit, tallies[i].rounds, kept, streams[i]))
        return [
            Completion(
                prompt=prompt if isinstance(prompt, str) else request.prompt,
                prompt_tokens=request.prompt,
                tokens=tuple(tally.tokens),
                text=self.decode(tally.tokens),
                finish_reason=finish[i],
                rounds=tally.rounds,
                drafted=tuple(tally.drafted),
                verified_by_position=tuple(tally.verified),
                accepted_by_position=tuple(tally.accepted),
                prefill_seconds=first[i],
                seconds=last[i],
                logprobs=tally.logprobs,
                verify_lengths=tuple(tally.verify_lengths),
                rested_rounds=tally.rested_rounds,
            )
            for i, (prompt, request, tally) in enumerate(zip(prompts, requests, tallies, strict=True))
        ]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: bool | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[RoundOutput]:
        """What every round commits to the answer of one prompt, as it arrives; arguments as for `generate`.

        The request is checked, and missing programs are compiled, before this returns.
        """
        use_drafts = self._use_drafts(speculate)
        requests = self._reader.read([prompt], params, ignore_eos)
        decoder = self._decoder(requests, [use_drafts])

        def outputs() -> Iterator[RoundOutput]:
            tally, text = Tally(self.gamma), TextStream(self.decode)
            for commit in decoder.run(self._params, requests, use_drafts):
                kept = _count(tally, commit)
                yield _output(commit, tally.rounds, kept, text)

        return outputs()

    def compile(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        speculate: Iterable[bool | None] = (None,),
        ignore_eos: bool = False,
    ) -> float:
        """Compiles and runs once what `generate` with these arguments needs, several modes side by side.

        Returns the seconds it took; nearly none when everything was there.
        """
        modes = [self._use_drafts(mode) for mode in speculate]
        requests = self._reader.read(prompts, params, ignore_eos)
        begin = time.perf_counter()
        self._decoder(requests, modes)
        return time.perf_counter() - begin

    def _decoder(self, requests: Sequence[Request], modes: Sequence[bool]) -> BatchDecoder:
        """The compiled programs that fit the requests."""
        expert = self.mesh.shape[EXPERT]
        slots = -(-_power_of_two(len(requests)) // expert) * expert
        # No request comes so near to the end of its slot that its drafts would be cut short: what it generates must
        # not depend on the capacity that its neighbours ask for.
        need = max(len(r.prompt) + r.params.max_tokens for r in requests) + self.gamma + 1
        capacity = min(_power_of_two(max(need, MIN_CAPACITY)), self.max_len)
        with self._lock:
            key = (slots, capacity, self._alternatives(requests))
            if key not in self._decoders:
                schedule = self._schedule and self._schedule.schedule(slots // expert, self.gamma)
                self._decoders[key] = BatchDecoder(
                    self._graph, self._params, self.mesh, slots, capacity, self._chunk, self._rounds_per_call, key[-1],
                    schedule, self.verify,
                )  # fmt: skip
            decoder = self._decoders[key]
        with memory_for("making caches and program"):
            decoder.compile(self._params, modes)
        return decoder

    def _alternatives(self, requests: Sequence[Request]) -> int | None:
        """The tokens whose log-probabilities a program must report in each place; None if nobody asks for any."""
        asked = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        if not asked or max(asked) == 0:
            return 0 if asked else None
        return min(_power_of_two(max(asked)), MAX_LOGPROBS, self.config.vocab_size)

    def _use_drafts(self, speculate: bool | None) -> bool:
        if not isinstance(speculate, bool | np.bool_ | None):  # "no" would count as yes
            raise RequestError(f"speculate is {speculate!r}; expected True, False, or None: if there is a drafter")
        if speculate and self.draft_config is None:
            raise RequestError(
                "speculate is True, but this model has no drafter (its checkpoint has no mtp.* stages, and none was"
                " given); leave speculate out, or set it to False"
            )
        return self.draft_config is not None if speculate is None else bool(speculate)


def _count(tally: Tally, commit: Commit) -> int:
    """Adds one round; returns how many of its tokens are accepted drafts."""
    return tally.add(
        commit.tokens, commit.accepted, commit.verified, prefill=commit.prefill, logprobs=commit.logprobs, rested=commit.rested
    )  # fmt: skip


def _output(commit: Commit, number: int, kept: int, text: TextStream) -> RoundOutput:
    pieces = [text.push(token) for token in commit.tokens]
    if commit.finish_reason and pieces:
        pieces[-1] += text.flush()
    return RoundOutput(
        index=commit.index,
        round=number,
        tokens=commit.tokens,
        pieces=tuple(pieces),
        accepted=kept,
        verified=commit.verified,
        finish_reason=commit.finish_reason,
        logprobs=commit.logprobs,
        rested=commit.rested,
    )


def _power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << (n - 1).bit_length()
