"""Bad requests: one clear message with every fault, before any work on a device."""

import re

import pytest

import dspark_jax
from dspark_jax import LM, CheckpointError, ConfigError, RequestError, SamplingParams, load
from dspark_jax.api import model_folder, shipped_models
from dspark_jax.parallel.mesh import make_mesh
from helpers.lookup_lm import agreeing, alphabet, lookup_lm


@pytest.fixture(scope="module")
def lm() -> LM:
    return lookup_lm(alphabet(), agreeing(alphabet()), max_len=10)


@pytest.fixture(autouse=True)
def _no_device_work(lm: LM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lm, "_decoder", lambda *_: pytest.fail("programs were made for a bad request"))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty; expected at least one prompt"),
        ("abc", "prompts is 'abc' (str); expected a list of texts or of id lists, as in [prompt]"),
        (iter(["a"]), "expected a list of texts"),
        ([""], "request: the prompt is empty; expected some text"),
        ([[]], "the prompt is empty; expected at least one token id"),
        ([7], "the prompt is 7 (int); expected a text or a list of token ids"),
        ([b"ab"], "the prompt is b'ab' (bytes); expected"),
        ([None], "the prompt is None; expected a text"),
        ([[0, 16, -1, 2.5, True]], "the prompt holds 16, -1, 2.5, True; expected token ids in 0 … 15"),
        ([[99] * 9], "the prompt holds 99, 99, 99, 99, 99, …; expected token ids"),
        (["a\udcff"], "the prompt cannot be encoded: 'utf-8' codec can't encode character '\\udcff' in position 1"),
        (["aXc"], "the prompt cannot be encoded: text holds 'X'"),
        (
            [[3] * 10],
            "the prompt has 10 tokens; expected at most 9 (max_len is 10, one position is for the answer)",
        ),
        (["abcdefghi"], "shorten it, or in Python load the model with a larger max_len, up to 512"),
    ],
)
def test_bad_prompts(lm: LM, prompts, message: str):
    with pytest.raises(RequestError, match=re.escape(message)):
        lm.generate(prompts)


def test_the_longest_prompt_is_accepted():
    lm = lookup_lm(alphabet(), agreeing(alphabet()), max_len=10)
    assert len(lm._reader.read([[3] * 9], None, False)[0].prompt) == 9


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(temperature=-1), "temperature = -1; expected a finite number >= 0"),
        (
            SamplingParams(stop_token_ids=(16,)),
            "stop_token_ids holds [16]; expected token ids >= 0 below",
        ),
        ({"temperature": 1}, "params is {'temperature': 1} (dict); expected SamplingParams"),
        ([SamplingParams(), {"seed": 1}], "params[1] is {'seed': 1} (dict); expected SamplingParams (its from_dict"),
        ([SamplingParams()] * 3, "params has 3 entries for 2 prompts; expected one for all or one a prompt"),
        (
            SamplingParams(stop_token_ids=tuple(range(8))),
            "stop_token_ids gives 9 different ids, the end-of-sequence token 15 counted; expected at most 8",
        ),
    ],
)
def test_bad_parameters(lm: LM, params, message: str):
    with pytest.raises(RequestError, match=re.escape(message)):
        lm.generate(["a", "b"], params)


def test_eight_stop_tokens_are_accepted(lm: LM):
    eight = SamplingParams(stop_token_ids=tuple(range(8)))
    assert lm._reader.read(["a"], eight, True)[0].stop == tuple(range(8))
    seven = SamplingParams(stop_token_ids=(*range(7), 0, 15))  # twice the same, and the end of sequence by its id
    assert lm._reader.read(["a"], seven, False)[0].stop == (*range(7), 15)


def test_every_fault_is_named_at_once(lm: LM):
    with pytest.raises(RequestError) as caught:
        lm.generate(["", "a", [99]], [SamplingParams(), SamplingParams(top_p=2.0, seed=-1)])
    message = str(caught.value)
    assert message.startswith("request: 5 faults\n")
    for part in ("prompts[0] is empty", "prompts[2] holds 99", "params[1]: top_p", "params[1]: seed", "params has 2"):
        assert part in message


def test_stream_and_compile_check_before_they_return(lm: LM):
    with pytest.raises(RequestError, match="the prompt is empty"):
        lm.stream("")
    with pytest.raises(RequestError, match="max_tokens = 0"):
        lm.compile(["a"], SamplingParams(max_tokens=0))


def test_a_model_without_drafter_decodes_plainly_and_refuses_to_speculate():
    plain = lookup_lm(alphabet(), None)
    assert plain.gamma == 0
    (result,) = plain.generate(["abc"], SamplingParams(max_tokens=4))
    assert result.text == "defg" and result.rounds == 3 and result.acceptance_by_position == ()
    with pytest.raises(RequestError, match=r"speculate is True, but this model has no drafter .* leave speculate out"):
        plain.generate(["abc"], speculate=True)


def test_unknown_models_are_named_with_near_matches(tmp_path, monkeypatch):
    for name in ("nano", "mega"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr("dspark_jax.api.ASSETS", tmp_path)
    assert shipped_models() == ["mega", "nano"]
    assert model_folder("nano") == tmp_path / "nano" and model_folder(tmp_path / "notes") == tmp_path / "notes"
    with pytest.raises(CheckpointError) as caught:
        load("nanu")
    assert str(caught.value) == (
        "model 'nanu' not found; expected the name of a shipped model (mega, nano) or the path of a folder with"
        " config.json, *.safetensors and tokenizer.json; did you mean 'nano'?"
    )
    with pytest.raises(CheckpointError, match="is a file; expected") as caught:
        load(tmp_path / "nano" / "config.json")
    assert "did you mean" not in str(caught.value)
    monkeypatch.setattr("dspark_jax.api.ASSETS", tmp_path / "absent")
    with pytest.raises(CheckpointError, match="a shipped model \\(none is installed\\)"):
        load("")


def test_impossible_context_lengths_and_meshes():
    for max_len in (1, 513):
        with pytest.raises(ConfigError, match=f"max_len is {max_len}; expected 2 … 512"):
            lookup_lm(alphabet(), None, max_len=max_len)
    with pytest.raises(ConfigError) as caught:
        lookup_lm(alphabet(), None, mesh=make_mesh(pipe=2, expert=3))
    assert "pipe is 2" in str(caught.value) and "expert is 3; expected a divisor of the model's 4" in str(caught.value)


def test_package_names():
    assert dspark_jax.LM is LM and set(dspark_jax.__all__) <= set(dir(dspark_jax))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dspark_jax.nothing
