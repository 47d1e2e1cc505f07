"""Configuration of drafters with files of their own: DSpark, DFlash, PARD and independent draft models on dense targets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Literal, get_args

from dspark_jax.config import DENSE_FAMILIES, DraftConfig, HeadKind, is_int
from dspark_jax.config_dense import DenseConfig, dense_from_hf, dense_to_hf
from dspark_jax.errors import ConfigError, raise_all

ConfidenceInput = Literal["markov", "hidden", "none"]

DRAFT_TOKENS = 5  # of a draft model, whose files say nothing about it
MOST_DRAFT_TOKENS = 32  # a program holds the draft model once for every draft
_DEEPSPEC = "Qwen3DSparkModel"  # DSpark and DFlash alike
_DFLASH = "DFlashDraftModel"
_SPECULATORS = ("dspark", "dflash")


class DrafterKind(Enum):
    """How drafts are made. Only the stages of `EMBEDDED_DSPARK` are layers of the target's namespace."""

    EMBEDDED_DSPARK = "embedded DSpark"
    STANDALONE_DSPARK = "standalone DSpark"
    DFLASH = "DFlash"
    PARD = "PARD"
    DRAFT_MODEL = "draft model"


@dataclass(frozen=True)
class StandaloneConfig:
    """A DSpark or DFlash drafter that reads a dense target's layers (paper section 3.1; DeepSpec's and speculators' layouts).

    Attributes:
      layers: the drafter's own layers. Its `vocab_size` is the rows of the drafter's embedding: the target's vocabulary, or
        that padded.
      block_size: drafts of a round, gamma. A drafter without `sample_from_anchor` reads one row more.
      mask_token_id: fills the rows behind the anchor.
      target_layer_ids: target layers whose output the drafter reads, ascending; -1 is the target's embedding.
      head, markov_rank: the sequential head; "none" is DFlash.
      confidence: what the confidence head reads beside the norm's output: the previous token's Markov row, nothing
        ("hidden"), or there is no such head ("none").
      sample_from_anchor: the anchor's row draws the first draft. Otherwise row k draws the token at its own position.
      draft_vocab_size: tokens that can be drafted, and `mapped` whether a table `d2t` in the weights says which.
      own_embedding, own_head: whether the files have an embedding and an output head; the target's are used otherwise.
      num_target_layers: layers of the target that it was trained on; None where the file does not say.
    """

    layers: DenseConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    head: HeadKind
    markov_rank: int
    confidence: ConfidenceInput
    draft_vocab_size: int
    mapped: bool = False
    sample_from_anchor: bool = True
    own_embedding: bool = True
    own_head: bool = True
    num_target_layers: int | None = None

    @property
    def kind(self) -> DrafterKind:
        """DFlash is DSpark without a sequential head."""
        return DrafterKind.DFLASH if self.head == "none" else DrafterKind.STANDALONE_DSPARK

    @property
    def num_stages(self) -> int:
        """Layer positions that it takes behind the target's."""
        return self.layers.num_hidden_layers

    @property
    def block_rows(self) -> int:
        """Rows of one pass."""
        return self.block_size + (not self.sample_from_anchor)

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        head = "no sequential head" if self.head == "none" else f"{self.head} head of rank {self.markov_rank}"
        size = f", {self.draft_vocab_size} draft tokens" if self.mapped else ""
        return f"{self.kind.value}: {self.block_size} drafts, {head}, taps {list(self.target_layer_ids)}{size}"

    def faults(self, target: DenseConfig) -> list[str]:
        """What makes this drafter impossible on `target`: wrong types, or with all types right the contradictions."""
        found = []
        for name in ("block_size", "mask_token_id", "markov_rank", "draft_vocab_size"):
            if not is_int(value := getattr(self, name)):
                found.append(f"{name} is {value!r}; expected an integer")
        ids = self.target_layer_ids
        if not isinstance(ids, tuple) or not all(is_int(i) for i in ids):
            found.append(f"target_layer_ids is {ids!r}; expected a list of integers")
        if self.head not in get_args(HeadKind):
            found.append(f"markov_head_type is {self.head!r}; expected one of 'vanilla', 'gated', 'rnn'")
        return found or list(self._contradictions(target))

    def _contradictions(self, target: DenseConfig) -> Iterator[str]:
        yield from _same_target(self.layers, target, mapped=self.mapped)
        if self.num_target_layers not in (None, target.num_hidden_layers):
            yield (
                f"num_target_layers is {self.num_target_layers}, and the target has {target.num_hidden_layers} layers: it was"
                " trained on another model"
            )
        if self.layers.hidden_size != target.hidden_size:
            yield (
                f"hidden_size is {self.layers.hidden_size}, and the target's is {target.hidden_size}: it was trained on another"
                " model"
            )
        if not 1 <= self.block_size < target.max_position_embeddings:
            rows = "" if self.sample_from_anchor else " drafts (block_size less the anchor's row)"
            yield f"block_size is {self.block_size}{rows}; expected at least 1, and less than the target's positions"
        if not 0 <= self.mask_token_id < (self.layers if self.own_embedding else target).vocab_size:
            yield f"mask_token_id is {self.mask_token_id}; expected a token id that the embedding has a row for"
        ids, layers = self.target_layer_ids, target.num_hidden_layers
        if layers - 1 in ids:
            yield (
                f"target_layer_ids holds {layers - 1}, the target's last layer, which writers of such files have behind the"
                " final norm: what it means is not certain; expected ids below it"
            )
        elif not ids or list(ids) != sorted(set(ids)) or ids[0] < -1 or ids[-1] >= layers:
            yield (
                f"target_layer_ids is {list(ids)}; expected distinct ascending layer ids in [0, {layers - 1}), or -1 for the"
                " embedding"
            )
        if self.head != "none" and self.markov_rank < 1:
            yield f"markov_rank is {self.markov_rank}; expected at least 1 for a {_PUBLISHED_HEAD[self.head]} head"
        if self.head == "rnn" and not self.sample_from_anchor:
            yield (
                "markov_head_type is 'rnn' with sample_from_anchor false; expected true: what state the anchor's row leaves to"
                " the next differs between writers of such files"
            )
        if self.confidence == "markov" and self.head == "none":
            yield "confidence_head_with_markov is true with markov_rank 0; expected a Markov head whose rows it could read"
        if not self.mapped and not target.vocab_size <= self.draft_vocab_size:
            yield (
                f"draft_vocab_size is {self.draft_vocab_size}, below the target's {target.vocab_size}, and the weights have no"
                " d2t, which says what token a draft id is"
            )
        if self.mapped and not self.own_head:
            yield "the weights have d2t but no lm_head.weight; expected an output head over the draft vocabulary"
        if not self.own_head and self.draft_vocab_size != target.vocab_size:
            yield (
                f"draft_vocab_size is {self.draft_vocab_size} without an lm_head.weight of that size; expected the target's"
                f" {target.vocab_size}"
            )


@dataclass(frozen=True)
class DraftModelConfig:
    """A dense model that drafts by itself, from tokens alone.

    Attributes:
      model: the model; its vocabulary is the target's, or that padded.
      block_size: drafts of a round, gamma: the user's choice.
      mask_token_id: PARD's token, which stands for the drafts in front when all are made in one pass; None for a model that
        makes them one after the other.
    """

    model: DenseConfig
    block_size: int = DRAFT_TOKENS
    mask_token_id: int | None = None

    target_layer_ids: ClassVar[tuple[int, ...]] = ()  # it reads none

    @property
    def num_stages(self) -> int:
        """Layer positions that it takes behind the target's."""
        return self.model.num_hidden_layers

    @property
    def kind(self) -> DrafterKind:
        """PARD has a token for drafts that are not known yet."""
        return DrafterKind.DRAFT_MODEL if self.mask_token_id is None else DrafterKind.PARD

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        passes = "one pass" if self.kind is DrafterKind.PARD else f"{self.block_size} passes"
        return f"{self.kind.value}: {self.block_size} drafts in {passes}, {self.model.num_hidden_layers} layers"

    def faults(self, target: DenseConfig) -> list[str]:
        """What makes this drafter impossible on `target`."""
        found = list(_same_target(self.model, target, mapped=False))
        most = min(MOST_DRAFT_TOKENS, target.max_position_embeddings - 1)
        if not is_int(self.block_size) or not 1 <= self.block_size <= most:
            found.append(f"draft_tokens is {self.block_size!r}; expected 1 … {most}")
        mask = self.mask_token_id
        if mask is not None and not (is_int(mask) and 0 <= mask < self.model.vocab_size):
            found.append(f"pard_token is {mask!r}; expected a token id below vocab_size = {self.model.vocab_size}")
        return found


SeparateConfig = StandaloneConfig | DraftModelConfig
AnyDraftConfig = DraftConfig | SeparateConfig

_PUBLISHED_HEAD = {"markov": "vanilla", "gated": "gated", "rnn": "rnn", "none": "none"}
_HEADS = {"vanilla": "markov", "markov": "markov", "gated": "gated", "rnn": "rnn"}


def _same_target(own: DenseConfig, target: DenseConfig, *, mapped: bool) -> Iterator[str]:
    """A vocabulary may be padded, never cut: an id without a row could be drafted upon."""
    if own.vocab_size < target.vocab_size or (mapped and own.vocab_size != target.vocab_size):
        yield (
            f"vocab_size is {own.vocab_size}, and the target's is {target.vocab_size}: drafts must be the target's tokens;"
            " expected a drafter with the same tokenizer"
        )


def drafter_from_hf(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], source: str, draft_tokens: int | None = None
) -> SeparateConfig:
    """The drafter that a published config.json describes; which kind it is follows from the file.

    Args:
      config: config.json of DeepSpec's layout (`Qwen3DSparkModel`), of the speculators library (`speculators_model_type`), of
        a DFlash model (`dflash_config`), of a PARD model (`pard_token`), or of a dense model of its own.
      tensors: shapes of the tensors in the weight files by name.
      source: names the file in messages.
      draft_tokens: drafts a round, for PARD and draft models (5 by default); the others' block says it.

    Raises:
      ConfigError: naming `source` and every fault; another kind of drafter by its name.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(f"{source}: architectures is {architectures!r:.80}; expected a list of names")
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in _SPECULATORS:
            raise ConfigError(f"{source}: speculators_model_type is {kind!r}; expected one of {list(_SPECULATORS)}")
        defaults = _DSPARK_DEFAULTS if kind == "dspark" else {}
        found = _standalone({**defaults, **_flat(config, source)}, tensors, source, anchored=kind == "dspark", offset=-1)
    elif _DEEPSPEC in architectures:
        found = _standalone(config, tensors, source, anchored=True)
    elif _DFLASH in architectures or "dflash_config" in config:
        found = _standalone(config, tensors, source, anchored=False)
    elif config.get("model_type") in DENSE_FAMILIES and not _other(architectures):
        mask = config.get("pard_token")
        tokens = DRAFT_TOKENS if draft_tokens is None else draft_tokens
        return DraftModelConfig(dense_from_hf(config, source), tokens, mask)
    else:
        raise ConfigError(
            f"{source}: architectures is {architectures!r:.80} and model_type {config.get('model_type')!r}; expected a DSpark"
            f" or DFlash drafter ({_DEEPSPEC}, {_DFLASH}, or speculators_model_type dspark or dflash), a PARD model, or a dense"
            f" draft model ({', '.join(DENSE_FAMILIES)})"
        )
    if draft_tokens not in (None, found.block_size):
        raise ConfigError(
            f"draft_tokens is {draft_tokens!r}; this drafter's block has {found.block_size}: leave it out (it is for draft"
            " models)"
        )
    return found


def _other(architectures: list[str]) -> bool:
    """Whether something else than a language model has a dense model's `model_type`."""
    return any(not str(name).endswith("ForCausalLM") for name in architectures)


def _flat(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A speculators file with the keys of its layers at the top, where values that are the writer's defaults are left out."""
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ConfigError(f"{source}: transformer_layer_config is {layers!r:.80}; expected an object, the drafter's layers")
    own = {key: value for key, value in config.items() if key != "transformer_layer_config"}
    family = layers.get("model_type", "qwen3")
    if family not in DENSE_FAMILIES:
        raise ConfigError(f"{source}: transformer_layer_config.model_type is {family!r:.80}; expected one of {DENSE_FAMILIES}")
    return {**_LAYERS, **_LAYERS_BY_FAMILY.get(family, {}), **layers, **own, "model_type": family}


def _standalone(
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    source: str,
    *,
    anchored: bool,
    offset: int = 0,
) -> StandaloneConfig:
    """`offset` is added to layer ids: speculators numbers the state in front of a layer, which the layer before puts out."""
    nested = config.get("dflash_config")
    places = (nested, config) if isinstance(nested, Mapping) else (config,)

    def first(*names: str, default: Any = None) -> Any:
        return next((place[name] for place in places for name in names if place.get(name) is not None), default)

    block, mask = first("block_size"), first("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    ids = first("target_layer_ids", "aux_hidden_state_layer_ids")
    anchored = first("sample_from_anchor", default=anchored)
    wanted = {"block_size": block, "mask_token_id": mask, "target_layer_ids": ids}
    faults = []
    if missing := [name for name, value in wanted.items() if value is None]:
        faults.append(f"lacks {', '.join(missing)}; use the config.json published with the drafter")
    switches = {"sample_from_anchor": anchored}
    switches |= {name: first(name) for name in ("enable_confidence_head", "confidence_head_with_markov")}
    for name, value in switches.items():
        if not isinstance(value, bool | None):
            faults.append(f"{name} is {value!r}; expected true or false")
    if not isinstance(nested, Mapping | None):
        faults.append(f"dflash_config is {nested!r:.80}; expected an object")
    if not is_int(layers_read := first("num_target_layers", default=1)):
        faults.append(f"num_target_layers is {layers_read!r}; expected an integer")
    raise_all(ConfigError, source, faults)
    rank = first("markov_rank", default=0)
    head = "none" if rank == 0 else str(first("markov_head_type", default="vanilla")).lower()
    confidence: ConfidenceInput = "none"
    if first("enable_confidence_head", default=False):
        confidence = "markov" if first("confidence_head_with_markov", default=True) else "hidden"
    # Whatever the target is, writers of such files make the layers of Qwen3, with norms of queries and keys.
    layers = replace(dense_from_hf({**config, "tie_word_embeddings": False}, source), qk_norm=True)
    return StandaloneConfig(
        layers=layers,
        block_size=block - (not anchored) if is_int(block) else block,
        mask_token_id=mask,
        target_layer_ids=tuple(i + offset if is_int(i) else i for i in ids) if isinstance(ids, list | tuple) else ids,
        head=_HEADS.get(head, head),  # type: ignore[arg-type]  # `faults` says what is impossible
        markov_rank=rank,
        confidence=confidence,
        draft_vocab_size=first("draft_vocab_size", default=tensors.get("lm_head.weight", (layers.vocab_size,))[0]),
        mapped="d2t" in tensors,
        sample_from_anchor=anchored,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        num_target_layers=first("num_target_layers"),
    )


# Values that the speculators library leaves out of `transformer_layer_config`: the defaults of transformers' Qwen3Config and
# LlamaConfig, and of its own dspark models.
_LAYERS = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_LAYERS_BY_FAMILY = {
    "qwen3": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    "llama": {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
}
_DSPARK_DEFAULTS = {"markov_rank": 256, "enable_confidence_head": True}


def standalone_to_hf(config: StandaloneConfig) -> dict[str, Any]:
    """The config.json in DeepSpec's layout that `drafter_from_hf` reads back to the same values."""
    layers = {**dense_to_hf(config.layers), "architectures": [_DEEPSPEC]}
    found: dict[str, Any] = {
        **layers,
        "layer_types": ["full_attention"] * config.layers.num_hidden_layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_rows,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_anchors": 512,  # of training alone, where DeepSpec asks for it
        "enable_confidence_head": config.confidence != "none",
        "markov_rank": config.markov_rank if config.head != "none" else 0,
        "sample_from_anchor": config.sample_from_anchor,
    }
    if config.confidence != "none":
        found["confidence_head_with_markov"] = config.confidence == "markov"
    if config.head != "none":
        found["markov_head_type"] = _PUBLISHED_HEAD[config.head]
    return found
