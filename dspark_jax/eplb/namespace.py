"""The one namespace of MoE layers: target layers are 0 … L-1, draft stages L … L+S-1 (`num_hidden_layers + stage`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark_jax.config import DraftConfig, TargetConfig, target_from_hf
from dspark_jax.errors import ConfigError, raise_all


@dataclass(frozen=True)
class DraftExperts:
    """What an embedded drafter's own configuration says; as published, all but `num_stages` equals the target's.

    Attributes:
      num_stages: MoE layers of the drafter, counted in its weights.
      num_hidden_layers: depth of the target that the drafter was made for; its layer indices start there.
      num_experts, top_k: routed experts of each stage, and how many of them a row visits.
    """

    num_stages: int
    num_hidden_layers: int
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class ExpertLayers:
    """The MoE layers whose experts are placed: every layer of the target, and the stages of an embedded drafter.

    Attributes:
      num_hidden_layers: target layers L, all of them with experts.
      num_experts, top_k: routed experts of each layer, and how many of them a row visits.
      draft: the embedded drafter; None without one (other drafters are a namespace of their own).
    """

    num_hidden_layers: int
    num_experts: int
    top_k: int
    draft: DraftExperts | None = None

    @property
    def target_layers(self) -> range:
        """Indices 0 … L-1."""
        return range(self.num_hidden_layers)

    @property
    def draft_layers(self) -> range:
        """Indices L … L+S-1; empty without an embedded drafter."""
        stages = self.draft.num_stages if self.draft else 0
        return range(self.num_hidden_layers, self.num_hidden_layers + stages)

    @property
    def num_layers(self) -> int:
        """L + S."""
        return self.num_hidden_layers + len(self.draft_layers)

    @classmethod
    def of(cls, target: TargetConfig, draft: DraftConfig | None) -> "ExpertLayers":
        """The layers of a loaded model; its stages are made of the target's own blocks."""
        layers, experts, top_k = target.num_hidden_layers, target.n_routed_experts, target.num_experts_per_tok
        stages = DraftExperts(draft.num_stages, layers, experts, top_k) if draft else None
        return cls(layers, experts, top_k, stages)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], draft_config: Mapping[str, Any] | None = None, source: str = "config.json"
    ) -> "ExpertLayers":
        """The layers that a published config.json describes; no weights are read.

        With `dspark_block_size` the model has an embedded drafter: one stage for each entry that `compress_ratios` has
        behind the target's layers (published files have one a stage; `num_nextn_predict_layers` is stale in them).

        Args:
          config: the target's config.json.
          draft_config: config.json of the checkpoint that the drafter is read from, where that is another one.
          source: names `config` in errors.

        Raises:
          ConfigError: the target is impossible or of another family, or has a drafter without stages.
        """
        target = target_from_hf(config, source)
        own, name = (config, source) if draft_config is None else (draft_config, "the drafter's config.json")
        draft = _draft_from_hf(own, name) if own.get("dspark_block_size") is not None else None
        return cls(target.num_hidden_layers, target.n_routed_experts, target.num_experts_per_tok, draft)


def _draft_from_hf(config: Mapping[str, Any], source: str) -> DraftExperts:
    numbers: dict[str, Any] = {
        "num_hidden_layers": config.get("num_hidden_layers"),
        # The stages' own counts, where they have some.
        **{name: config.get(f"dspark_{name}") or config.get(name) for name in ("n_routed_experts", "num_experts_per_tok")},
    }
    faults = [
        f"{name} is {value!r}; expected a positive integer, as in the config.json published with the weights"
        for name, value in numbers.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    ratios: Any = config.get("compress_ratios")
    depth, experts, top_k = numbers.values()
    if not isinstance(ratios, list):
        faults.append(f"compress_ratios is {ratios!r}; expected a list with an entry for every layer and draft stage")
    elif not faults and len(ratios) <= depth:
        faults.append(
            f"has dspark_block_size, but compress_ratios has no entries behind its {depth} layers; expected one for"
            " every draft stage"
        )
    raise_all(ConfigError, source, faults)
    return DraftExperts(len(ratios) - depth, depth, experts, top_k)
