"""Files of step times: three forms, one curve; faulty, cut-off and foreign files are refused."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.decode.profile_table import Curve, Fingerprint, measured, read_profile
from dspark_jax.decode.schedule import Schedule, StaleRate
from dspark_jax.eplb.placement import Placement
from dspark_jax.errors import ConfigError

CONFIG = TargetConfig(
    vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=64, q_lora_rank=8, o_groups=1,
    o_lora_rank=8, n_routed_experts=4, num_experts_per_tok=1, moe_intermediate_size=8, compress_ratios=(0,),
)  # fmt: skip
DRAFT = DraftConfig(3, noise_token_id=0, target_layer_ids=(0,), num_stages=1)
HERE = Fingerprint.of(CONFIG, DRAFT, dtype="float32", mesh="1x2", device="cpu", placement=Placement.auto(2, 4, 4, 2))
TABLE = measured({8: 5.5, 4: 5.0, 16: 9.0}, {1: 1.0, 3: 2.0}, HERE, {1: 4.0, 3: 5.0})
RATES = {"sample_batch_tokens": [1, 4, 8], "sample_steps_per_sec": [10, 5, 4], "max_batch_tokens": 12}
ADDITIVE = {
    "bias_seconds": 0.5, "bs_probes": [1, 3], "alpha_seconds": [0.0, 1.0], "m_probes": [2, 6], "theta_seconds": [1, 3],
}  # fmt: skip


def written(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.fixture
def own(tmp_path):
    """Our own form, as an object."""
    TABLE.write(tmp_path / "own.json")
    return json.loads((tmp_path / "own.json").read_text())


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "times.json"
    TABLE.write(path)
    assert read_profile(path) == TABLE
    assert [p.name for p in tmp_path.iterdir()] == ["times.json"]


def test_the_curve_is_jagged_and_ends_at_the_largest_bucket():
    cost = TABLE.cost(requests=4, rows=99)
    assert cost.rows == (*[5.0] * 5, *[5.5] * 4, *[9.0] * 8)
    assert cost.requests == (1.0, 1.0, 1.5, 2.0, 2.0)
    seconds = cost.seconds(jnp.asarray(2), jnp.asarray([3, 4, 5, 16, 17]))
    np.testing.assert_allclose(seconds, [6.5, 6.5, 7.0, 10.5, np.inf])
    assert cost.plain == (4.0, 4.0, 4.5, 5.0, 5.0)
    assert float(cost.plain_seconds(jnp.asarray(2)) or 0) == 4.5
    assert TABLE.cost(requests=1, rows=6).rows == (*[5.0] * 5, *[5.5] * 2)


def test_tables_of_earlier_versions_and_foreign_ones_never_rest(tmp_path):
    TABLE.write(tmp_path / "t.json")
    value = json.loads((tmp_path / "t.json").read_text())
    assert value.pop("plain") == {"requests": [1, 3], "seconds": [4.0, 5.0]}
    table = read_profile(written(tmp_path / "old.json", value))
    assert table == dataclasses.replace(TABLE, plain=None)
    for other in (table, *(read_profile(written(tmp_path / "f.json", form)) for form in (RATES, ADDITIVE))):
        assert other.cost(2, 8).plain is None and not Schedule(StaleRate(other.cost(2, 8))).rests
    assert Schedule(StaleRate(TABLE.cost(2, 8))).rests


def test_sglangs_rate_form(tmp_path):
    """Floor look-up: the rate at the largest sample that the batch reaches."""
    table = read_profile(written(tmp_path / "t.json", RATES))
    rows = table.cost(requests=2, rows=20).rows
    np.testing.assert_allclose(rows, [*[0.1] * 4, *[0.2] * 4, *[0.25] * 5])
    assert float(table.cost(2, 20).seconds(jnp.asarray(2), jnp.asarray([7]))[0]) == pytest.approx(0.2)
    assert table.fingerprint is None


def test_sglangs_additive_form(tmp_path):
    """T(bs, K) = bias + alpha(bs) + theta(bs + K), clamped and linear."""
    cost = read_profile(written(tmp_path / "t.json", ADDITIVE)).cost(requests=4, rows=8)
    np.testing.assert_allclose(cost.rows, [1.5, 1.5, 1.5, 2.0, 2.5, 3.0, 3.5, 3.5, 3.5])
    np.testing.assert_allclose(cost.requests, [0, 0, 0.5, 1, 1])
    np.testing.assert_allclose(cost.seconds(jnp.asarray(2), jnp.asarray([5])), [0.5 + 0.5 + 2.5])


def test_curves_between_points():
    assert [Curve((2, 4), (1.0, 3.0), "floor").at(n) for n in (0, 2, 3, 4, 9)] == [1, 1, 1, 3, 3]
    assert [Curve((2, 4), (1.0, 3.0), "linear").at(n) for n in (0, 2, 3, 4, 9)] == [1, 1, 2, 3, 3]
    assert [Curve((2, 4), (1.0, 3.0), "stairs").at(n) for n in (0, 2, 3, 4)] == [1, 1, 3, 3]


# Which engine a table belongs to.


def test_a_table_of_another_engine_is_refused():
    TABLE.check(HERE)
    other = Fingerprint.of(
        dataclasses.replace(CONFIG, hidden_size=16), DRAFT, dtype="float32", mesh="2x1", device="NVIDIA H200",
        placement=Placement.auto(2, 4, 8, 2),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="4 faults") as caught:
        TABLE.check(other, source="times.json")
    text = str(caught.value)
    assert "mesh is '1x2'; here it is '2x1'" in text and "device is 'cpu'" in text and "measure a table" in text
    for field in ("model is", "placement is", "times.json"):
        assert field in text


@pytest.mark.parametrize("change", [
    {"dtype": "bfloat16"}, {"mesh": "2x1"}, {"device": "gpu"}, {"placement": Placement.auto(2, 4, 8, 2)}, {"placement": None},
])  # fmt: skip
def test_every_part_counts(change):
    same = {"dtype": "float32", "mesh": "1x2", "device": "cpu", "placement": Placement.auto(2, 4, 4, 2)}
    assert Fingerprint.of(CONFIG, DRAFT, **same) == HERE
    with pytest.raises(ConfigError):
        TABLE.check(Fingerprint.of(CONFIG, DRAFT, **(same | change)))
    with pytest.raises(ConfigError):
        TABLE.check(Fingerprint.of(CONFIG, dataclasses.replace(DRAFT, block_size=4), **same))


def test_a_table_without_a_fingerprint_passes_only_on_request(tmp_path):
    table = read_profile(written(tmp_path / "t.json", RATES))
    with pytest.raises(ConfigError, match="has no fingerprint"):
        table.check(HERE)
    table.check(HERE, unsigned=True)
    with pytest.raises(ConfigError, match="only measured tables"):
        table.write(tmp_path / "again.json")


# Faulty files.


@pytest.mark.parametrize(("form", "change", "messages"), [
    ("own", {"format": "x"}, ["format is 'x'; expected 'dspark-jax step times'"]),
    ("own", {"version": 2}, ["version is 2; this release reads version 1"]),
    ("own", {"fingerprint": {"model": 1, "mesh": "", "placement": ""}}, ["fingerprint.device is missing"]),
    ("own", {"fingerprint": {"model": 1, "mesh": "", "placement": "", "device": ""}}, ["fingerprint.model is 1"]),
    ("own", {"fingerprint": None}, ["fingerprint is None; expected an object with model"]),
    ("own", {"draft": [1]}, [r"draft is \[1\]; expected an object"]),
    ("own", {"draft": {"requests": [1], "second": [1]}}, ["draft.seconds is missing", "draft.second is unknown"]),
    ("own", {"verify": {"rows": [4, 8], "seconds": [1]}}, ["verify.rows has 2 entries and seconds 1"]),
    ("own", {"verify": {"rows": [8, 4], "seconds": [1, 0]}}, ["strictly increasing", r"verify.seconds\[1\] is 0"]),
    ("own", {"verify": {"rows": [4.5], "seconds": ["1"]}}, ["rows holds 4.5", r"seconds\[0\] is '1'"]),
    ("own", {"extra": 1}, ["extra is unknown"]),
    ("own", {"plain": {"requests": [1, 1], "seconds": [1, 0]}}, ["plain.requests", r"plain.seconds\[1\] is 0"]),
    ("rates", {"sample_batch_tokens": [4, 4, 8]}, ["sample_batch_tokens is .*; expected strictly increasing"]),
    ("rates", {"sample_steps_per_sec": [1, float("nan"), 2]}, [r"sample_steps_per_sec\[1\] is nan"]),
    ("rates", {"max_batch_tokens": 7}, ["max_batch_tokens is 7; expected an integer >= 8"]),
    ("rates", {"sample_steps_per_sec": [1, 10**400, 2]}, [r"sample_steps_per_sec\[1\] is 1000"]),
    ("additive", {"bias_seconds": 0}, [r"bias_seconds\[0\] is 0; expected finite numbers above 0"]),
    ("additive", {"alpha_seconds": [0], "theta_seconds": []}, ["bs_probes has 2 entries", "theta_seconds is"]),
])  # fmt: skip
def test_faulty_tables_are_refused_with_every_fault(tmp_path, own, form, change, messages):
    value = {"own": own, "rates": RATES, "additive": ADDITIVE}[form] | change
    with pytest.raises(ConfigError) as caught:
        read_profile(written(tmp_path / "t.json", value))
    for message in (*messages, "t.json"):
        assert re.search(message, str(caught.value)), (message, str(caught.value))


@pytest.mark.parametrize(("text", "message"), [
    ("", "is not JSON .*perhaps cut off"), ("[1]", "expected a JSON object"), ("{}", "is no table of step times"),
    ('{"sample_batch_tokens": [1]}', "sample_steps_per_sec is missing"),
])  # fmt: skip
def test_files_that_are_none(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_profile(written(tmp_path / "t.json", text))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "missing.json")


def test_a_table_cut_off_anywhere_is_refused(tmp_path, own):
    text = json.dumps(own)
    for end in range(0, len(text), 7):
        with pytest.raises(ConfigError, match=r"t\.json"):
            read_profile(written(tmp_path / "t.json", text[:end]))
