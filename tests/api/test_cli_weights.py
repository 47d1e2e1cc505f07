"""`--weights` reaches the loader from every command that loads a model; the line about loading."""

import sys

import jax.numpy as jnp
import pytest

import dspark_jax.serve.engine  # noqa: F401 - whose Engine is replaced
from dspark_jax import cli, cli_engine, cli_loading
from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.errors import RequestError

PROMPTS = ("--prompts", "prompts.jsonl")


class Reached(RequestError):
    """Where the weights would be read."""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a command up to the loader; returns the exit code and stderr."""

    def loader(*_, weights="nothing was said", **__):
        raise Reached(f"loading with weights {weights}")

    monkeypatch.setattr("dspark_jax.api.load", loader)
    monkeypatch.setattr("dspark_jax.serve.engine.Engine", loader)
    monkeypatch.setattr(cli_engine, "Engine", loader)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "slots.yaml").write_text("num_slots: 16\n")

    def go(*arguments):
        monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr().err

    return go


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "a"),
        ("generate", "--prompt", "a", "--mesh", "8x1", "--no-draft"),
        ("evaluate", *PROMPTS),
        ("calibrate", *PROMPTS),
        ("profile",),
        ("bench", "serve", *PROMPTS),
        ("eplb", "collect", *PROMPTS, "--out", "statistics"),
        ("eplb", "apply", "slots.yaml", *PROMPTS, "--mesh", "4x2"),
    ],
    ids=" ".join,
)
def test_weights_reach_the_loader(command, run):
    for weights in ("dequantised", "quantised"):
        code, err = run(*command, "--weights", weights)
        assert code == 2 and err.endswith(f"loading with weights {weights}\n")
    assert run(*command)[1].endswith("loading with weights dequantised\n")
    code, err = run(*command, "--weights", "int4")
    assert code == 2 and "Invalid value for '--weights'" in err and "'dequantised', 'quantised'" in err


class Terminal:
    """stderr as a terminal that remembers."""

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_loading_shows_layers_on_a_terminal_when_it_takes_long(monkeypatch, tiny_folder):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(cli_loading, "PATIENCE", 1e3)
    with cli_loading.loading():
        read_checkpoint(tiny_folder, dtype=jnp.float32)
    assert sys.stderr.text == ""
    monkeypatch.setattr(cli_loading, "PATIENCE", 0.0)
    with cli_loading.loading():
        read_checkpoint(tiny_folder, dtype=jnp.float32)
    assert "loading layer 3 of 3 …" in sys.stderr.text  # two of the target, one draft stage
    assert "loading layer 4" not in sys.stderr.text
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with cli_loading.loading():
        read_checkpoint(tiny_folder, dtype=jnp.float32)
    assert sys.stderr.text == ""
