"""What the oracles' files must hold for a parity test on them to mean something."""

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / ".cache" / "oracles"
COMMITTED = ROOT / "tests" / "data"

pytestmark = pytest.mark.oracle


def load(path: Path) -> dict[str, np.ndarray]:
    assert path.is_file(), f"{path} is missing; `make oracles` writes it"
    with np.load(path) as archive:
        return dict(archive)


def random_files() -> list[dict[str, np.ndarray]]:
    paths = sorted(FILES.glob("random_*.npz"))
    assert len(paths) >= 6, f"{FILES} holds {len(paths)} random configurations; `make oracles` writes six"
    return [load(path) for path in paths]


def read_config(value: np.ndarray) -> dict:
    """A stored config.json, without the release that wrote it: requirements.txt allows several."""
    config = json.loads(str(value))
    del config["transformers_version"]
    return config


def compare(committed: dict[str, np.ndarray], fresh: dict[str, np.ndarray]) -> None:
    assert committed.keys() == fresh.keys()
    for key, value in committed.items():
        if value.dtype.kind == "f" and not key.startswith("P/") and "/W/" not in key:
            assert np.abs(value - fresh[key]).max() <= 3e-5 * np.abs(value).max(), key
        elif key.endswith("/config"):
            assert read_config(value) == read_config(fresh[key]), key
        else:
            np.testing.assert_array_equal(value, fresh[key], err_msg=key)


@pytest.mark.parametrize("name", ["v4_tiny_goldens.npz", "dense_goldens.npz"])
def test_committed_goldens_are_what_the_oracle_computes(name: str):
    compare(load(COMMITTED / name), load(FILES / name))


def test_committed_numerics_are_what_the_oracle_computes():
    """In bfloat16 another processor may add in another order: there the bound is the oracle's distance to itself."""
    committed, fresh = (load(folder / "v4_numerics_goldens.npz") for folder in (COMMITTED, FILES))
    chaotic = [key for key in committed if key.startswith("ref") and not key.endswith(("/ids", "/draft_steps"))]
    for mode in ("ref", "ref+inputs"):
        first, stepwise = (committed[f"{mode}/{key}_logits"] for key in ("target", "stepwise"))
        again = fresh[f"{mode}/target_logits"]
        assert np.linalg.norm(first - again) <= 1.2 * np.linalg.norm(first - stepwise), mode
    for data in (committed, fresh):
        for key in chaotic:
            del data[key]
    compare(committed, fresh)


@pytest.mark.parametrize(
    ("name", "fresh", "how"),
    [
        ("deepspec_tiny", "deepspec_tiny.npz", "`make oracles DEEPSPEC=/path/to/its/checkout`"),
        ("speculators_tiny", "speculators_tiny/goldens.npz", "speculators_goldens.py (README.md)"),
    ],
)
def test_committed_goldens_are_what_the_reference_computes(name: str, fresh: str, how: str):
    if not (FILES / fresh).is_file():
        pytest.skip(f"the reference is no part of the oracles' environment: {how} writes {FILES / fresh}")
    compare(load(COMMITTED / name / "goldens.npz"), load(FILES / fresh))


def test_speculators_and_deepspec_agree():
    """Both compute the same first block with the same weights, where row 0 drafts (rnn) and where it does not."""
    deepspec, speculators = (load(COMMITTED / name / "goldens.npz") for name in ("deepspec_tiny", "speculators_tiny"))
    for i in (0, 1):
        for name, source, first in (("rnn", "rnn", 0), ("masks", "vanilla", 1), ("dflash", "parallel", 1)):
            expected = deepspec[f"text{i}/{source}/hidden"][first:]
            assert np.abs(speculators[f"text{i}/{name}/hidden"] - expected).max() <= 3e-5 * np.abs(expected).max()


@pytest.mark.parametrize("drafter", ["vanilla", "gated", "rnn", "parallel"])
def test_deepspec_runs_are_not_degenerate(drafter: str):
    """Every number of drafts gets accepted somewhere, and the accepted ones are the target's own text."""
    goldens = load(COMMITTED / "deepspec_tiny" / "goldens.npz")
    seen: set[int] = set()
    for i in (0, 1):
        greedy = goldens[f"text{i}/greedy"].tolist()
        at = 0
        for tokens, accepted in zip(goldens[f"text{i}/{drafter}/tokens"], goldens[f"text{i}/{drafter}/accepted"], strict=True):
            expected = greedy[at + 1 : at + 1 + accepted]
            assert tokens[: len(expected)].tolist() == expected
            at += accepted + 1
            seen.add(int(accepted))
        assert at >= len(greedy)
        assert set(goldens[f"text{i}/{drafter}/cut_proposed"].tolist()) - {0, 5}
    assert {0, 1, 2, 5} <= seen
    if drafter != "parallel":
        assert np.abs(goldens[f"text0/{drafter}/logits"] - goldens[f"text0/{drafter}/base_logits"]).max() > 1


def test_transformers_agrees_with_the_oracle_on_the_renamed_weights():
    case = load(FILES / "transformers_v4.npz")
    assert case["oracle_error"] <= 2e-5
    assert case["margin"] >= 1e-4
    assert case["logits"].shape == (*case["ids"].shape, json.loads(str(case["config"]))["vocab_size"])
    np.testing.assert_array_equal(case["P/embed.weight"], case["H/model.embed_tokens.weight"])


def test_random_configurations_differ_where_it_matters():
    configs = [json.loads(str(case["cfg"])) for case in random_files()]
    for name in ("stages", "block", "window", "heads", "o_groups", "n_hash", "rope", "hc", "idx_topk"):
        assert len({config[name] for config in configs}) >= 3, name
    ratios = {ratio for config in configs for ratio in config["ratios"]}
    assert {0, 4} < ratios
    assert len(ratios) >= 4


def test_random_cases_are_well_conditioned_and_not_degenerate():
    for case in random_files():
        config = json.loads(str(case["cfg"]))
        assert case["margin"] >= 1e-4
        assert case["spread"] <= 2e-5
        tokens = len(case["ids"]) - 1
        assert tokens // 4 > config["idx_topk"], "the indexer must have something to refuse"
        assert tokens > config["window"], "the window must slide"
        assert case["draft_tokens"].shape == (len(case["draft_steps"]), config["block"])
        assert case["target_logits"].std() > 0.3
        for key, value in case.items():
            if key.endswith(("attn_sink", "gate.bias", "ape", "_base")):
                assert np.abs(value).min() > 0, key
