"""Validation of a load-balancer section: the whole of it in one error, and nothing where balancing is inactive."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.config import to_hf
from dspark_jax.eplb import (
    DraftExperts,
    ExpertLayers,
    LoadBalancerConfig,
    Placement,
    PlacementNotice,
    auto_assignment,
    placement_faults,
    resolve_placement,
)
from dspark_jax.eplb.validation import DOCS
from dspark_jax.errors import ConfigError
from helpers.checkpoints import DRAFT, TARGET

# V4-Pro: 61 layers, three draft stages, 384 experts of which a row visits 6.
PRO = ExpertLayers(61, 384, 6, DraftExperts(3, 61, 384, 6))
ALONE = ExpertLayers(61, 384, 6)
SMALL = ExpertLayers(2, 8, 2, DraftExperts(1, 2, 8, 2))


def full(layers, num_slots=384, experts=384, ranks=8, **options) -> LoadBalancerConfig:
    row = auto_assignment(experts, num_slots, ranks).tolist()
    return LoadBalancerConfig(num_slots, dict.fromkeys(layers, row), **options)


def message(config, layers, ranks=8) -> str:
    with pytest.raises(ConfigError) as error:
        resolve_placement(config, layers, ranks)
    return str(error.value)


def test_namespace_of_the_worked_example():
    assert PRO.target_layers == range(61) and PRO.draft_layers == range(61, 64) and PRO.num_layers == 64
    assert ALONE.draft_layers == range(61, 61) and ALONE.num_layers == 61
    placement = resolve_placement(full(range(64)), PRO, 8)
    assert placement is not None and placement.num_layers == 64


def test_a_file_made_for_one_mtp_layer():
    text = message(full(range(62)), PRO)
    assert "draft stage layers [62, 63] are missing" in text and "all of [61, 64), the 3 stages of DSpark" in text
    assert "num_hidden_layers + stage = 61 + stage" in text and "61," not in text.replace("[61, 64)", "")
    assert "regenerate the file from statistics that were collected with DSpark on (docs/expert_placement.md)" in text
    assert "leave initial_global_assignments out" in text
    assert "faults" not in text  # this alone is wrong


def test_the_page_that_errors_point_to_is_there_and_its_example_fits():
    page = (Path(__file__).resolve().parents[2] / DOCS).read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    placement = resolve_placement(yaml.safe_load(example), ExpertLayers(2, 8, 2), 2)
    assert placement is not None and placement.num_slots == 10


def test_a_file_made_without_a_drafter():
    text = message(full(range(61)), PRO)
    assert "draft stage layers [61, 62, 63] are missing" in text and "target layers" not in text


def test_an_empty_mapping_is_not_absent():
    text = message(LoadBalancerConfig(384, {}), PRO)
    assert f"target layers {list(range(61))} are missing" in text
    assert "draft stage layers [61, 62, 63] are missing" in text
    placement = resolve_placement(LoadBalancerConfig(384), PRO, 8)
    assert placement == Placement.auto(64, 384, 384, 8)


def test_coverage_online_and_depth_in_one_error():
    shallow = ExpertLayers(61, 384, 6, DraftExperts(3, 43, 384, 6))
    text = message(full(range(62), layer_updates_per_iter=2), shallow)
    assert text.startswith("load_balancer: 3 faults\n")
    assert "draft stage layers [62, 63] are missing" in text and "[61, 64)" in text
    assert "layer_updates_per_iter is 2; static EPLB only" in text
    assert "num_hidden_layers is 43 in the draft's config and 61 in the target's" in text


def test_online_is_refused_and_with_dspark_on_for_one_more_reason():
    alone = message(full(range(61), layer_updates_per_iter=3), ALONE)
    assert "layer_updates_per_iter is 3; static EPLB only: there is no online balancer" in alone
    assert alone.endswith("Set it to 0") and "DSpark" not in alone
    both = message(full(range(64), layer_updates_per_iter=3), PRO)
    assert "idle in iterations without generation requests" in both and "wait for them for ever" in both
    assert "online" in message(LoadBalancerConfig(384, layer_updates_per_iter=1), ALONE)  # automatic placement too


def test_a_draft_of_other_shape():
    other = ExpertLayers(61, 384, 6, DraftExperts(3, 61, 128, 3))
    text = message(full(range(64)), other)
    assert "n_routed_experts is 128 in the draft's config and 384 in the target's" in text
    assert "num_experts_per_tok is 3 in the draft's config and 6 in the target's" in text
    assert "num_hidden_layers" not in text
    text = message(LoadBalancerConfig(384), ExpertLayers(61, 384, 6, DraftExperts(0, 61, 384, 6)))
    assert "the drafter has 0 stages; expected at least 1" in text


@pytest.mark.parametrize("rows", [None, {0: list(range(8))}], ids=["automatic", "given"])
@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (None, ["num_slots is missing; expected a multiple of the 3 expert ranks and at least 8", "for example 9"]),
        (0, ["num_slots is 0, which does not switch balancing off", "leave the section out"]),
        (10, ["num_slots is 10; expected a multiple of the 3 expert ranks", "use 9 or 12"]),
        (6, ["num_slots is 6; expected at least 8, a slot for every routed expert", "use 9 or more"]),
        (
            7,
            [
                "num_slots is 7; expected a multiple of the 3 expert ranks",
                "use 9",
                "num_slots is 7; expected at least 8",
            ],
        ),
    ],
)
def test_num_slots(rows, slots, expected):
    text = message(LoadBalancerConfig(slots, rows), ExpertLayers(1, 8, 2), ranks=3)
    for part in expected:
        assert part in text
    assert text.count("num_slots is") == sum("num_slots is" in part for part in expected)


def test_the_right_quantity_must_divide():
    """TensorRT-LLM's #15410: ten experts on four ranks are fine with 12 slots, not with 13."""
    ten = ExpertLayers(1, 10, 2)
    assert placement_faults(LoadBalancerConfig(12), ten, 4) == []
    assert placement_faults(LoadBalancerConfig(13), ten, 4) == [
        "num_slots is 13; expected a multiple of the 4 expert ranks, as each holds equally many slots: use 12 or 16"
    ]


def test_faults_of_lists_name_layers_and_experts():
    rows = {
        0: [0, 1, 2, 3, 4, 5, 6, 7, 0],  # too long
        1: [0, 1, 2, 9, -1, 5, 6, 7, 9, 0],  # ids out of range, which leave two experts without a slot
        2: [0, 1, 2, 3, 4, 5, 6, 6, 0, 0],
    }
    text = message(LoadBalancerConfig(10, rows), SMALL, ranks=2)
    assert text.startswith("load_balancer: 4 faults\n")
    assert "layer 0: the list has 9 entries; expected num_slots = 10" in text
    assert "layer 1: the list holds expert ids [-1, 9]; expected ids in [0, 8)" in text
    assert "layer 1: experts [3, 4] have no slot" in text and "layer 2: experts [7] have no slot" in text


def test_layers_with_one_fault_are_named_together_and_long_lists_cut():
    text = message(full(range(64), num_slots=400, experts=392), PRO)
    assert f"layers {list(range(64))}: the list holds expert ids [384, 385, 386, 387, 388, 389, 390, 391]" in text
    assert len(text.splitlines()) == 1
    text = message(LoadBalancerConfig(384, dict.fromkeys(range(64), [0] * 384)), PRO)
    assert f"experts {list(range(1, 33))} and 351 more have no slot" in text


def test_layers_outside_are_one_warning_that_names_them():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        placement = resolve_placement(full([*range(61), 61, 70]), ALONE, 8)
    assert placement is not None and placement.num_layers == 61
    (notice,) = seen
    assert notice.category is PlacementNotice
    assert "layers [61, 70], which are ignored" in str(notice.message)
    assert "61 target layers, without draft stages, so its layers are [0, 61)" in str(notice.message)
    assert notice.filename == __file__


def test_what_layers_outside_hold_does_not_matter():
    rows = {0: range(8), 5: [99]}
    with pytest.warns(PlacementNotice, match=r"layers \[5\]"):
        assert resolve_placement({"num_slots": 8, "initial_global_assignments": rows}, ExpertLayers(1, 8, 2), 2)


def test_inactive_incomplete_and_online_is_no_error_but_one_warning():
    config = full([3], layer_updates_per_iter=2)
    assert placement_faults(config, PRO, 8)
    with pytest.warns(PlacementNotice, match="ignored, because experts are balanced over ranks") as seen:
        assert resolve_placement(config, PRO, 1) is None
    assert len(seen) == 1 and seen[0].filename == __file__


def test_without_a_section_nothing_happens():
    assert resolve_placement(None, PRO, 8) is None and resolve_placement(None, PRO, 1) is None


def test_paths_are_named(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text("num_slots: 13")
    assert message(path, ALONE).startswith(f"{path}: 2 faults") and message(str(path), ALONE).startswith(str(path))


@given(data=st.data())
def test_the_placement_holds_the_lists(data):
    layers = data.draw(st.integers(1, 3))
    ranks = data.draw(st.integers(2, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    slots = (-(-8 // ranks) + data.draw(st.integers(0, 2))) * ranks
    rows = {i: rng.permutation([*range(8), *rng.integers(0, 8, slots - 8)]).tolist() for i in range(layers)}
    placement = resolve_placement(LoadBalancerConfig(slots, rows), ExpertLayers(layers, 8, 2), ranks)
    assert placement is not None
    assert placement.slot_to_expert.tolist() == list(rows.values())


def test_layers_of_a_loaded_model_and_of_its_config_json_agree():
    expected = ExpertLayers(3, 4, 2, DraftExperts(2, 3, 4, 2))
    assert ExpertLayers.of(TARGET, DRAFT) == expected and ExpertLayers.of(TARGET, None) == ExpertLayers(3, 4, 2)
    hf = json.loads(json.dumps(to_hf(TARGET, DRAFT)))
    assert ExpertLayers.from_hf(hf) == expected
    assert ExpertLayers.from_hf(hf | {"dspark_block_size": None}) == ExpertLayers(3, 4, 2)
    other = ExpertLayers.from_hf(hf | {"dspark_n_routed_experts": 2, "dspark_num_experts_per_tok": 1})
    assert other.draft == DraftExperts(2, 3, 2, 1)
    deeper = hf | {"num_hidden_layers": 4, "compress_ratios": [0, 8, 4, 4, 0]}
    assert ExpertLayers.from_hf(hf, deeper).draft == DraftExperts(1, 4, 4, 2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"compress_ratios": [0, 8, 4]}, "compress_ratios has no entries behind its 3 layers"),
        ({"compress_ratios": None}, "compress_ratios is None; expected a list"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'; expected a positive integer"),
    ],
)
def test_a_drafter_without_countable_stages(changes, expected):
    hf = to_hf(TARGET, DRAFT)
    with pytest.raises(ConfigError) as error:
        ExpertLayers.from_hf(hf, hf | changes)
    assert expected in str(error.value) and "the drafter's config.json" in str(error.value)
