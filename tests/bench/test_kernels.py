"""`bench kernels` runs the kernels' own benchmarks, `bench.records` keeps their results, and the tables of docs/performance.md
are those results."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from typer.testing import CliRunner

from dspark_jax import ConfigError
from dspark_jax.bench import kernels, records, tables
from dspark_jax.cli import app
from helpers.cuda import H200

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def result(case: str, us: float, **more) -> dict:
    one = {"bench": "round", "case": case, "device": "a GPU", "time_us": us, "floor_us": us / 2, "ceiling": "4 TB/s"}
    return one | {"fraction": 0.5, "peers": {}, **more}


def test_the_page_shows_the_results_beside_it():
    text = PAGE.read_text()
    assert tables.generate(text, PAGE.with_suffix("")) == text
    shown = [tuple(found.groups()) for line in text.splitlines() if (found := tables.BEGIN.fullmatch(line))]
    assert {("kernels.json", bench) for bench in ("expert_mlp", "hyper_connection", "routing")} <= set(shown)


def test_other_results_give_another_page(tmp_path):
    path = tmp_path / "r.json"
    memory = {"peak": 3e9, "weights": 2e9, "state": 5e8}
    profile = {"busy_us": 900.4, "launches": 41.0, "memory": memory}
    records.merge(path, [result("plain step", 1000, **profile), result("round", 2000.6, **profile | {"busy_us": None})])
    page = "a\n<!-- table: r.json round -->\n| old |\n<!-- end of table -->\nb\n"
    lines = tables.generate(page, tmp_path).splitlines()
    assert (lines[0], lines[1], *lines[-2:]) == ("a", "<!-- table: r.json round -->", "<!-- end of table -->", "b")
    assert lines[4:6] == [
        "| plain step | 1000 | 900 | 500 | 50 % | 41 | 3.00 (2.00 + 0.50) |",
        "| round | 2001 | - | 1000 | 50 % | 41 | 3.00 (2.00 + 0.50) |",
    ]
    # With peers there is a column for the fastest of each case.
    records.merge(path, [result("round", 2000, peers={"DeepSpec": 50000.4, "another one": 60000}, **profile)])
    assert tables.generate(page, tmp_path).splitlines()[2].split(" | ")[5:7] == ["fastest peer, µs", "launches"]
    shown = tables.generate(page, tmp_path).splitlines()[4:6]
    assert [line.split(" | ")[5] for line in shown] == ["-", "50000 (DeepSpec; 25.0 times ours)"]
    records.merge(path, [result("T=8", 3.14, bench="draft_head", peers={"jnp": 7.0})])
    other = tables.generate(page.replace("json round", "json draft_head"), tmp_path)
    assert "| T=8 | 3.1 | 1.6 | 50 % | jnp 7.0 |" in other
    with pytest.raises(ConfigError, match="has no '<!-- end of table -->' behind it"):
        tables.generate(page.replace("<!-- end of table -->\n", ""), tmp_path)
    with pytest.raises(ConfigError, match="bench 'none' has no results"):
        tables.generate(page.replace("json round", "json none"), tmp_path)
    records.merge(path, [result("round", 1, device="another GPU")])
    with pytest.raises(ConfigError, match="bench 'round' has a case of two devices"):
        tables.generate(page, tmp_path)


def test_results_of_one_case_replace_each_other(tmp_path, capsys):
    path = tmp_path / "r.json"
    records.merge(path, [result("a", 1), result("b", 2)])
    records.merge(path, [result("b", 3), result("a", 4, device="another GPU")])
    found = json.loads(path.read_text())
    kept = [(r["case"], r["device"], r["time_us"]) for r in found]
    assert kept == [("a", "a GPU", 1), ("b", "a GPU", 3), ("a", "another GPU", 4)]
    shown = records.table(found).splitlines()
    assert shown[0].split() == ["bench", "case", "us", "floor", "ceiling", "of", "it", "peers"]
    assert shown[2].split() == ["round", "b", "3.0", "1.5", "4", "TB/s", "50.0%", "-"]
    for text in ("{}", "[1]", "nothing"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"r\.json: (is not JSON|expected a list of objects)"):
            records.check_out(path)
    with pytest.raises(ConfigError, match="there is no folder"):
        records.check_out(tmp_path / "not there" / "r.json")


def call(*arguments: str):
    return CliRunner().invoke(app, ["bench", "kernels", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "bench kernels times kernels on a GPU, and JAX has none here (it runs on cpu)"),
        (("--only", "routing,convolution"), "--only has 'convolution'; expected "),
        (("--tokens", "8"), "'--tokens 8' would go to "),
        (("--out", "/not there/r.json"), "there is no folder '/not there'"),
    ],
)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the first case is for machines without a GPU")
def test_bad_input_is_refused(arguments, message):
    found = call(*arguments)
    assert found.exit_code == 2 and message in found.stderr


def test_benchmarks_get_the_options_and_their_results_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: H200.platform)
    ran, out = [], tmp_path / "kernels.json"

    def fake(name: str) -> SimpleNamespace:
        def main(argv: list[str]) -> None:
            ran.append((name, argv[:-2]))
            Path(argv[-1]).write_text(json.dumps([result("one", 5, bench=name)]))
            if name == "routing":
                raise KeyboardInterrupt  # in its second case

        return SimpleNamespace(main=main)

    for name in kernels.available():
        monkeypatch.setitem(sys.modules, f"dspark_kernels.{name}.bench", fake(name))
    done = call("--only", "expert_mlp", "--out", str(out), "--tokens", "8", "--tune")
    assert done.exit_code == 0 and ran == [("expert_mlp", ["--tokens", "8", "--tune"])]
    assert done.stdout.splitlines()[1].split() == ["expert_mlp", "one", "5.0", "2.5", "4", "TB/s", "50.0%", "-"]
    assert call("--out", str(out)).exit_code == 130 and "hyper_connection" in [name for name, _ in ran]
    assert {"expert_mlp", "hyper_connection", "routing"} <= {r["bench"] for r in json.loads(out.read_text())}
