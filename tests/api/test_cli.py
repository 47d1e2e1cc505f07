"""`dspark-jax`: what it prints, and how it fails."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from dspark_jax import LM, SamplingParams, __version__, cli
from dspark_jax.cli_display import Display, first_difference
from dspark_jax.results import RoundOutput
from helpers.lookup_lm import alphabet, lookup_lm

KEYS = "text tokens rounds tokens_per_round acceptance_by_position identical tokens_per_second plain_tokens_per_second"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs the command line in this process with the given model: exit code, stdout, stderr."""

    def go(*arguments: str, lm: LM | None = None):
        if lm is not None:
            monkeypatch.setattr("dspark_jax.api.load", lambda *_, **__: lm)
        monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return go


def test_json_has_every_key_and_tells_the_truth(run, spelling: LM):
    code, out, err = run("generate", "--prompt", "abc", "--max-tokens", "26", "--compare", "--json", lm=spelling)
    assert code == 0 and err == ""
    found = json.loads(out)
    assert found.keys() >= set(KEYS.split())
    (result,) = spelling.generate(["abc"], SamplingParams(max_tokens=26))
    assert found["text"] == result.text and found["tokens"] == 26 and found["rounds"] == 5
    assert found["tokens_per_round"] == 5 and found["acceptance_by_position"] == [1, 1, 1, 1]
    assert found["identical"] is True and found["finish_reason"] == "length"
    assert found["tokens_per_second"] > 0 and found["plain_tokens_per_second"] > 0


def test_json_without_compare_and_without_drafts(run, spelling: LM):
    _, out, _ = run("generate", "--prompt", "abc", "--max-tokens", "6", "--json", lm=spelling)
    found = json.loads(out)
    assert found["identical"] is None and found["plain_tokens_per_second"] is None
    _, out, _ = run("generate", "--prompt", "abc", "--max-tokens", "6", "--json", "--no-draft", lm=spelling)
    found = json.loads(out)
    assert found["rounds"] == 5 and found["tokens_per_second"] == found["plain_tokens_per_second"] > 0


@pytest.mark.long
def test_json_with_logprobs(run, spelling: LM):
    arguments = ("generate", "--prompt", "abc", "--max-tokens", "6", "--json")
    assert json.loads(run(*arguments, lm=spelling)[1])["logprobs"] is None
    found = json.loads(run(*arguments, "--logprobs", "2", lm=spelling)[1])
    assert [len(one["top"]) for one in found["logprobs"]] == [2] * 6
    assert [one["top"][0] for one in found["logprobs"]] == [
        {"token_id": token, "logprob": one["logprob"]}
        for token, one in zip(found["token_ids"], found["logprobs"], strict=True)
    ]
    code, out, err = run(*arguments[:-1], "--logprobs", "2", lm=spelling)
    assert code == 2 and out == "" and "--logprobs has nowhere to appear in the text; add --json" in err
    code, out, err = run(*arguments, "--logprobs", "21", lm=spelling)
    assert code == 2 and out == "" and "logprobs = 21; expected None (off) or an integer in 0 … 20" in err


@pytest.mark.long
def test_samples_are_not_called_identical(run, babbling: LM):
    common = ("generate", "--prompt", "abc", "--max-tokens", "9", "--compare", "--temperature", "1.5", "--seed", "3")
    code, out, _ = run(*common, "--json", lm=babbling)
    found = json.loads(out)
    assert code == 0 and found["identical"] is None and "differ by design" in found["note"]
    _, out, _ = run(*common, lm=babbling)
    assert "differ by design" in out and "identical" not in out


def test_text_then_summary(run, spelling: LM, monkeypatch):
    code, out, err = run("generate", "--prompt", "abc", "--max-tokens", "16", "--compare", lm=spelling)
    assert code == 0 and err == "" and "\x1b" not in out
    text, _, summary = out.partition("\n\n")
    assert text == "abcdefghijklmnabcde"
    for part in ("tokens per round", "5.00", "100% (3/3)", "with the drafter", "without the drafter", "token limit"):
        assert part in summary
    assert "Plain decoding's text is identical (16 tokens)." in summary
    assert "times as fast as plain decoding. One round takes" in summary


def test_accepted_drafts_are_in_colour(run, spelling: LM, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments = ("generate", "--prompt", "abc", "--max-tokens", "6")
    _, out, _ = run(*arguments, lm=spelling)
    green = "\x1b[1;32m"
    assert "".join(part.split("\x1b[0m")[0] for part in out.split(green)[2:]) == "efgh"  # behind the legend
    _, out, _ = run(*arguments, "--no-color", lm=spelling)
    assert green not in out and "abcdefghi" in out


def test_a_terminal_does_not_obey_generated_text(capsys, monkeypatch):
    output = RoundOutput(0, 1, (1, 2), ("a\x1b[2J\n", "[red]b\t"), accepted=1, verified=1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    Display().round(output)
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown and "a\ufffd[2J" in shown and "[red]b\t" in shown
    monkeypatch.delenv("FORCE_COLOR")
    Display().round(output)
    assert capsys.readouterr().out == output.text  # a file gets the text as it is


def test_a_difference_is_shown(run, spelling: LM, monkeypatch):
    whole = spelling.generate

    def crooked(*arguments, speculate=None, **options):
        (result,) = whole(*arguments, speculate=speculate, **options)
        return [result if speculate else dataclasses.replace(result, tokens=(*result.tokens[:2], 0, 1))]

    monkeypatch.setattr(spelling, "generate", crooked)
    code, out, _ = run("generate", "--prompt", "abc", "--max-tokens", "9", "--compare", lm=spelling)
    assert code == 0 and "differs from token 3 on" in out and "'fghijkl'" in out and "'ab'" in out
    _, out, _ = run("generate", "--prompt", "abc", "--max-tokens", "9", "--compare", "--json", lm=spelling)
    assert json.loads(out)["identical"] is False


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1 and first_difference([1, 2], [1, 2, 3]) == 2


def test_prompt_file(run, spelling: LM, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("abcd")
    _, out, _ = run("generate", "--prompt-file", str(path), "--max-tokens", "3", "--json", lm=spelling)
    assert json.loads(out)["text"] == "efg"
    path.write_bytes(b"a\xff")
    code, out, err = run("generate", "--prompt-file", str(path), lm=spelling)
    assert code == 2 and out == "" and "is not UTF-8 text (invalid start byte at byte 1)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "abc", "--temperature=-1", "--top-p", "7"], "temperature = -1.0; expected a finite number >= 0"),
        (["--prompt", "abc", "--temperature=-1", "--top-p", "7"], "top_p = 7.0; expected a number in (0, 1]"),
        (["--prompt", "abc", "--max-tokens", "0"], "max_tokens = 0; expected an integer >= 1"),
        (["--prompt", "abc", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["--prompt", "abc", "--nope"], "No such option"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a" * 600], "the prompt has 601 tokens; expected at most 511"),
        (["--prompt", "aXb"], "the prompt cannot be encoded"),
        ([], "expected exactly one of --prompt and --prompt-file, got neither"),
        (["--prompt", "a", "--prompt-file", "b"], "expected exactly one of --prompt and --prompt-file, got both"),
        (["--prompt-file", "/no/such/file"], "cannot be read: No such file or directory"),
        (["--prompt", "a", "--compare", "--no-draft"], "--compare sets the drafter against plain decoding"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_one_message_and_exit_code_2(run, spelling: LM, arguments, message, as_json):
    code, out, err = run("generate", *arguments, *(["--json"] if as_json else []), lm=spelling)
    assert code == 2 and out == "" and message in err and "Traceback" not in err


def test_compare_needs_a_drafter(run):
    code, _, err = run("generate", "--prompt", "a", "--compare", lm=lookup_lm(alphabet(), None))
    assert code == 2 and "--compare needs a drafter, and the model 'nano' has none" in err


def test_damaged_models_are_bad_input(run, tmp_path):
    (tmp_path / "config.json").write_text("{")
    for model in (tmp_path, tmp_path / "absent"):
        code, out, err = run("generate", "--model", str(model), "--prompt", "a")
        assert code == 2 and out == "" and err.startswith("dspark-jax: error: ") and str(model) in err


def test_interrupt_is_exit_code_130(run, spelling: LM, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(spelling, "compile", interrupted)
    monkeypatch.setattr(cli.os, "_exit", sys.exit)  # the real one would end the test run
    code, _, err = run("generate", "--prompt", "a", lm=spelling)
    assert code == 130 and err == "dspark-jax: interrupted\n"


def test_a_fault_of_the_program_keeps_its_traceback(run, spelling: LM, monkeypatch):
    monkeypatch.setattr(spelling, "compile", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run("generate", "--prompt", "a", lm=spelling)


def test_help_and_version_need_no_jax():
    code = (
        "import sys, dspark_jax, dspark_jax.cli as c\n"
        "sys.argv = ['dspark-jax', *sys.argv[1:]]\n"
        "try: c.main()\n"
        "finally: assert 'jax' not in sys.modules"
    )
    for argument, expected in ((["generate", "--help"], "--prompt-file"), (["--version"], __version__)):
        done = subprocess.run([sys.executable, "-c", code, *argument], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and expected in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/dspark_jax/jax 0.3 False"),
        pytest.param({"HOME": "/h"}, "/h/.cache/dspark_jax/jax 0.3 False", marks=pytest.mark.long),
        pytest.param({"JAX_COMPILATION_CACHE_DIR": "/c"}, "/c 0.3 False", marks=pytest.mark.long),
        ({"JAX_COMPILATION_CACHE_DIR": "/c", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "2"}, "/c 2.0 False"),
    ],
)
def test_compilation_cache_is_the_users_or_the_default_and_no_backend_starts(environment, expected):
    code = (
        "import jax\nfrom jax._src import xla_bridge\nfrom dspark_jax.compilation_cache import use_default_cache\n"
        "use_default_cache()\n"
        "print(jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs,"
        " xla_bridge.backends_are_initialized())"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == expected, done.stderr
