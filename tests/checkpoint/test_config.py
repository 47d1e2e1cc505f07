"""config.json in and out: V4-Flash's published numbers, contradictions, wrong types and other families."""

from dataclasses import replace

import pytest

from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig, draft_from_hf, target_from_hf, to_hf
from dspark_jax.errors import ConfigError
from helpers.checkpoints import DRAFT, TARGET, with_head
from helpers.goldens import configs

# The published config.json of V4-Flash-0731, without the keys that say nothing of the architecture.
V4_FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp4",
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
YARN_OFF = RopeConfig(dim=4, yarn_original=0)


def error_of(config: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        target_from_hf(config, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")
    return str(caught.value)


def test_v4_flash_parses():
    config = target_from_hf(V4_FLASH)
    assert config == TargetConfig(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        head_dim=512,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        compress_ratios=(0, 0, *(4, 128) * 20, 4),
        num_hash_layers=3,
        max_position_embeddings=1048576,
        rope=RopeConfig(64, 1e4, 1.6e5, 16.0, 65536, 32.0, 1.0),
    )
    assert [config.compress_ratios.count(r) for r in (0, 4, 128)] == [2, 21, 20]
    assert config.group_width == 4096
    draft = draft_from_hf(V4_FLASH, 3)
    assert draft == DraftConfig(5, 128799, (40, 41, 42), num_stages=3, markov_rank=256, head="markov")
    assert draft.faults(config) == []


@pytest.mark.parametrize("target", [TARGET, replace(TARGET, rope=YARN_OFF), target_from_hf(V4_FLASH)])
@pytest.mark.parametrize("draft", [None, DRAFT, with_head("gated"), with_head("none")])
def test_to_hf_reads_back_to_the_same_values(target, draft):
    config = to_hf(target, draft)
    assert target_from_hf(config) == target
    assert draft_from_hf(config, 2) == draft
    stages = draft.num_stages if draft else 0
    assert config["compress_ratios"][target.num_hidden_layers :] == [0] * stages


def test_the_oracles_config_reads_back(golden_file):
    target, draft = configs(golden_file.cfg)
    assert target_from_hf(to_hf(target, draft)) == target
    assert draft_from_hf(to_hf(target, draft), 3) == draft


def test_configurations_are_hashable_also_from_lists():
    assert hash(replace(TARGET, compress_ratios=[0, 8, 4])) == hash(TARGET)
    assert hash(replace(DRAFT, target_layer_ids=[1, 2])) == hash(DRAFT)


def test_no_rope_scaling_means_no_yarn():
    assert target_from_hf({**V4_FLASH, "rope_scaling": None}).rope.yarn_original == 0


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v3", "qwen3", None, 4])
def test_other_families_are_refused_by_name(family):
    text = error_of({"model_type": family})
    assert f"model_type is {family!r}" in text and "expected 'deepseek_v4'" in text
    assert ("V4.1 is another architecture" in text) == (family == "deepseek_v41")


def test_missing_keys_are_listed_together():
    config = {k: v for k, v in V4_FLASH.items() if k not in ("hidden_size", "o_groups", "compress_ratios")}
    assert "lacks hidden_size, o_groups, compress_ratios;" in error_of(config)


def test_contradictions_are_reported_together():
    text = error_of(
        {
            **V4_FLASH,
            "num_experts_per_tok": 300,
            "qk_rope_head_dim": 63,
            "o_groups": 7,
            "num_hash_layers": 44,
            "eos_token_id": 129280,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": True,
        }
    )
    for part in (
        "num_experts_per_tok is 300; expected at most n_routed_experts = 256",
        "qk_rope_head_dim is 63; expected an even number up to head_dim = 512",
        "o_groups is 7; it must divide num_attention_heads * head_dim = 32768",
        "num_hash_layers is 44; expected 0 … num_hidden_layers = 43",
        "eos_token_id is 129280; expected a token id below vocab_size = 129280",
        "scoring_func is 'sigmoid'; only 'sqrtsoftplus'",
        "tie_word_embeddings is True; only False",
    ):
        assert part in text
    assert "7 faults" in text


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([0, 0, *[4, 128] * 20], "compress_ratios has 42 entries; expected num_hidden_layers = 43"),
        ([0, 0, *[4, 128] * 20, 4, 0, 4], "compress_ratios ends in [0, 4] behind its 43 layers"),
        ([0, -4, *[4, 128] * 20, 1, 0], "compress_ratios holds [-4, 1]"),
        ([0, 0, *[4, 128] * 20, 4.0], "expected a list of integers"),
        ("0,4", "compress_ratios is '0,4'; expected a list of integers"),
    ],
)
def test_compress_ratios(ratios, said):
    assert said in error_of({**V4_FLASH, "compress_ratios": ratios})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "4096"}, "hidden_size is '4096'; expected a positive integer"),
        ({"hidden_size": 4096.0}, "hidden_size is 4096.0; expected a positive integer"),
        ({"hc_mult": True}, "hc_mult is True; expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected a positive integer"),
        ({"num_hidden_layers": "43"}, "num_hidden_layers is '43'; expected a positive integer"),
        ({"sliding_window": [128]}, "sliding_window is [128]; expected a positive integer"),
        ({"num_hash_layers": -1}, "num_hash_layers is -1; expected an integer of at least 0"),
        ({"eos_token_id": [1, 2]}, "eos_token_id is [1, 2]; expected an integer of at least 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; expected a positive number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a positive number"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit is nan; expected a positive number"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor is inf; expected a positive number"),
        ({"rope_theta": -1}, "rope_theta is -1; expected a positive number"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim is None; expected a positive integer"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling.type is 'linear'; only 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling lacks original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "yarn", "factor": "16", "original_max_position_embeddings": 65536}},
            "rope_scaling.factor is '16'; expected a positive number",
        ),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; only 1 is supported"),
        ({"head_dim": None}, "lacks head_dim"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_types_are_named_with_their_value(change, said):
    text = error_of({**V4_FLASH, **change, "o_lora_rank": -2})
    assert said in text and "o_lora_rank is -2" in text  # and every other fault with it


def test_configuration_made_by_hand():
    with pytest.raises(ConfigError, match=r"target config: hidden_size is 8\.5"):
        replace(TARGET, hidden_size=8.5)
    with pytest.raises(ConfigError, match="rope is None; expected a RopeConfig"):
        replace(TARGET, rope=None)
    with pytest.raises(ConfigError, match="index_head_dim is 2; expected at least qk_rope_head_dim = 4"):
        replace(TARGET, index_head_dim=2)
    assert replace(TARGET, index_head_dim=2, compress_ratios=(0, 8, 8)).index_head_dim == 2


def test_no_block_size_means_no_drafter():
    config = {k: v for k, v in V4_FLASH.items() if k != "dspark_block_size"}
    assert draft_from_hf(config, 3) is None
    assert draft_from_hf({**config, "dspark_block_size": None}, 3) is None


def test_draft_keys_that_are_missing_or_not_supported():
    config = {k: v for k, v in V4_FLASH.items() if k not in ("dspark_noise_token_id", "dspark_target_layer_ids")}
    with pytest.raises(ConfigError, match="lacks dspark_noise_token_id, dspark_target_layer_ids") as caught:
        draft_from_hf(config | {"dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3}, 3)
    assert "dspark_n_routed_experts is 128; only the target's n_routed_experts = 256" in str(caught.value)
    assert "dspark_num_experts_per_tok is 3" in str(caught.value)
    assert draft_from_hf(V4_FLASH | {"dspark_n_routed_experts": 256}, 3) is not None


def test_vanilla_is_another_name_of_the_markov_head():
    assert draft_from_hf(V4_FLASH | {"dspark_markov_head_type": "vanilla"}, 3).head == "markov"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 0}, "dspark_block_size is 0; expected at least 1"),
        ({"block_size": "5"}, "dspark_block_size is '5'; expected an integer"),
        ({"noise_token_id": 13}, "dspark_noise_token_id is 13; expected a token id below vocab_size = 13"),
        ({"num_stages": 0}, "the checkpoint has 0 mtp.* stages"),
        ({"target_layer_ids": ()}, "dspark_target_layer_ids is []"),
        ({"target_layer_ids": (2, 1)}, "dspark_target_layer_ids is [2, 1]; expected distinct ascending layer ids"),
        ({"target_layer_ids": (1, 1)}, "dspark_target_layer_ids is [1, 1]"),
        (
            {"target_layer_ids": (1, 3)},
            "[1, 3]; expected distinct ascending layer ids in [0, 3)",
        ),
        ({"target_layer_ids": "12"}, "dspark_target_layer_ids is '12'; expected a list of integers"),
        ({"markov_rank": 0}, "dspark_markov_rank is 0; expected at least 1, or the head type 'none'"),
        ({"head": "lstm"}, "dspark_markov_head_type is 'lstm'; expected one of 'markov', 'gated', 'rnn', 'none'"),
    ],
)
def test_faults_of_the_drafter(change, said):
    (fault,) = replace(DRAFT, **change).faults(TARGET)
    assert said in fault


def test_faults_of_the_drafter_come_together():
    assert len(replace(DRAFT, block_size=0, noise_token_id=-1, target_layer_ids=(5,)).faults(TARGET)) == 3
