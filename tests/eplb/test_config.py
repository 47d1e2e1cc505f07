"""The load-balancer section: TensorRT-LLM's YAML in and out, and what is refused."""

import json

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.eplb import LoadBalancerConfig, load_config, save_config
from dspark_jax.errors import ConfigError

FILE = """\
num_slots: 6
layer_updates_per_iter: 0
initial_global_assignments:   # two layers
  3: [0, 1, 2, 3, 0, 1]
  60: [3, 2, 1, 0, 0, 0]
"""
ROWS = {3: (0, 1, 2, 3, 0, 1), 60: (3, 2, 1, 0, 0, 0)}


def test_a_file_of_tensorrt_is_read(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text(FILE)
    for source in (path, str(path), yaml.safe_load(FILE), LoadBalancerConfig(6, ROWS)):
        assert load_config(source) == LoadBalancerConfig(6, ROWS, 0)


def test_defaults_and_the_repr_is_short():
    config = load_config({})
    assert (config.num_slots, config.initial_global_assignments, config.layer_updates_per_iter) == (None, None, 0)
    assert len(repr(LoadBalancerConfig(6, ROWS))) < 80


def test_keys_that_went_through_json_are_layers():
    assert load_config(json.loads(json.dumps({"num_slots": 6, "initial_global_assignments": ROWS}))) == (
        LoadBalancerConfig(6, ROWS)
    )


assignments = st.none() | st.dictionaries(st.integers(0, 99), st.lists(st.integers(-1, 500), max_size=20), max_size=5)


@given(num_slots=st.none() | st.integers(-1, 1000), rows=assignments, updates=st.integers(0, 5))
def test_written_files_are_read_back_and_are_plain_yaml(tmp_path_factory, num_slots, rows, updates):
    config = LoadBalancerConfig(num_slots, rows, updates)
    path = tmp_path_factory.mktemp("eplb") / "map.yaml"
    save_config(config, path)
    assert load_config(path) == config
    plain = {"num_slots": num_slots, "initial_global_assignments": rows}
    expected = {key: value for key, value in plain.items() if value is not None}
    assert yaml.safe_load(path.read_text()) == expected | {"layer_updates_per_iter": updates}


def test_an_empty_mapping_stays_one(tmp_path):
    save_config(LoadBalancerConfig(6, {}), tmp_path / "map.yaml")
    assert load_config(tmp_path / "map.yaml").initial_global_assignments == {}


def test_numpy_rows_become_plain_numbers():
    rows = load_config({"num_slots": np.int64(2), "initial_global_assignments": {0: np.arange(2)}})
    assert rows.initial_global_assignments == {0: (0, 1)}
    assert type(rows.initial_global_assignments[0][0]) is int


def test_unknown_keys_and_wrong_types_are_one_error():
    values = {
        "num_slot": 3,
        "algorithm": "x",
        "num_slots": "many",
        "layer_updates_per_iter": -1,
        "initial_global_assignments": {"x": [0], 1: 5, 2: [0, "a", True], "3": [0], 3: [1]},
    }
    with pytest.raises(ConfigError) as error:
        load_config(values)
    text = str(error.value)
    assert text.startswith("load_balancer: 8 faults")
    for part in (
        "unknown key 'num_slot'; expected num_slots, initial_global_assignments, layer_updates_per_iter; did you mean"
        " 'num_slots'?",
        "unknown key 'algorithm'; expected num_slots",
        "num_slots is 'many'; expected an integer",
        "layer_updates_per_iter is -1; expected an integer of at least 0",
        "initial_global_assignments['x']: the key is no layer index",
        "initial_global_assignments[1] is 5; expected a list of expert ids",
        "initial_global_assignments[2] holds 'a'; expected expert ids, which are integers (2 such entries)",
        "initial_global_assignments[3]: layer 3 is there twice",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "not valid YAML"),
        ("", "holds None; expected the keys num_slots"),
        ("? [1]\n: 2", "not valid YAML"),
        ("[1, 2]", "holds [1, 2]; expected the keys num_slots"),
        ("moe_config: {}", "unknown key 'moe_config'"),
        ("initial_global_assignments: [1]", "initial_global_assignments is [1]; expected a mapping of layer index"),
        ("num_slots: true", "num_slots is True; expected an integer"),
        (
            "initial_global_assignments:\n  3: [0]\n  4: [1]\n  3: [2]",
            "the key '3' is there twice, the second time in line 4",
        ),
    ],
)
def test_bad_files_name_the_file(tmp_path, content, message):
    path = tmp_path / "map.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_unreadable_and_unwritable_paths(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read \(No such file or directory\)"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_config(LoadBalancerConfig(), tmp_path / "absent" / "map.yaml")
