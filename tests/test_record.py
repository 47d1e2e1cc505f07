"""Recording of confidences from real decoding, and `dspark-jax calibrate`."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import LM, RequestError, SamplingParams, cli
from dspark_jax.chat import ChatTemplate
from dspark_jax.checkpoint.drafter import open_drafter
from dspark_jax.checkpoint.reader import open_checkpoint
from dspark_jax.config import DraftConfig
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.calibration_file import head_digest, read_calibration
from dspark_jax.decode.rounds_file import read_rounds
from dspark_jax.record import Recording, calibrate, record
from dspark_jax.testing import DummyTokenizer, LookupDrafter, LookupTarget
from dspark_jax.trace import trace_rounds
from helpers.dense import letters
from helpers.lookup_lm import EOS, LETTERS, alphabet, lookup_config, lookup_lm
from helpers.standalone import TARGET

VOCAB, GAMMA = 16, 3
TEMPERATURES = np.float32([2.0, 0.5, 1.0])


class ConfidentModel(nnx.Module):
    """Tables of a target, of a drafter, and of its confidence."""

    def __init__(self, target: LookupTarget, drafter: LookupDrafter):
        self.tables, self.drafts = nnx.Param(target.table), nnx.Param(drafter.table)
        self.confidence = nnx.Param(drafter.confidence_table)

    @property
    def target(self) -> LookupTarget:
        return LookupTarget(self.tables[...])

    @property
    def drafter(self) -> LookupDrafter:
        return LookupDrafter(self.drafts[...], self.confidence[...])


@pytest.fixture(scope="module")
def confident() -> LM:
    """A drafter that knows its chances behind every token, and says them too loudly or too softly."""
    table = np.array(LookupTarget.random(VOCAB, scale=1.5, seed=2).table)
    table[:, EOS] = -30  # nothing ends early
    target = LookupTarget(jnp.asarray(table))
    noise = np.random.default_rng(0).normal(0, 1, (GAMMA, VOCAB, VOCAB)) * np.linspace(0, 1.6, VOCAB)[:, None]
    guess = LookupDrafter((target.table + noise).astype(jnp.bfloat16).astype(jnp.float32), jnp.zeros((GAMMA, VOCAB)))
    chance = np.clip(guess.conditional_acceptance(target), 1e-3, 1 - 1e-3)
    drafter = LookupDrafter(guess.table, jnp.asarray(np.log(chance / (1 - chance)) * TEMPERATURES[:, None], jnp.float32))
    graph, params = nnx.split(ConfidentModel(target, drafter))
    draft = DraftConfig(GAMMA, noise_token_id=0, target_layer_ids=(0,), num_stages=1)
    return LM(lookup_config(VOCAB), draft, graph, params, DummyTokenizer(VOCAB, LETTERS))


PROMPTS = ["a", "bcd", "efghijklm", "n"]
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=300)


@pytest.fixture(scope="module")
def recording(confident: LM) -> Recording:
    return record(confident, PROMPTS, PARAMS, samples=8, batch=4)


@pytest.mark.long
def test_the_recording_is_what_decoding_did(confident: LM):
    """Round by round as the trace tells it, but for the rounds that the context has cut short."""
    short = LM(confident.config, confident.draft_config, confident._graph, confident._params, confident.tokenizer, max_len=40)
    found = record(short, PROMPTS[:2], PARAMS, samples=2, batch=3)  # two parts, the second not full
    expected, cut = [], 0
    for i in range(4):
        own = replace(PARAMS, seed=PARAMS.seed + i)
        for t in trace_rounds(short, PROMPTS[i % 2], own, rounds=99):
            expected += [(i % 2, t.accepted, *t.confidence)] if t.verified == GAMMA else []
            cut += t.verified < GAMMA
    assert cut > 1 and len(found.rounds) == len(expected) > 30
    confidence = 1 / (1 + np.exp(-found.rounds.logits))
    got = np.column_stack([found.prompt, found.rounds.accepted, confidence])
    np.testing.assert_allclose(sorted(got.tolist()), sorted(map(list, expected)), rtol=1e-5)


def test_calibration_finds_the_loudness_and_judges_on_other_prompts(confident: LM, recording: Recording):
    assert len(recording.rounds) > 2500
    found = calibrate(confident, recording, "letters")
    c = found.calibration
    np.testing.assert_allclose(c.temperatures, TEMPERATURES, rtol=0.35)
    assert c.num_samples + found.rounds == len(recording.rounds)
    assert c.num_samples == (recording.prompt % 2 == 0).sum()
    assert np.mean(c.ece_after) < 0.8 * np.mean(c.ece_before) and c.dataset == "letters"
    assert c.model == head_digest(confident._params)
    # The judging half decides about the errors, and not about the temperatures.
    upside = np.where(recording.prompt % 2 == 1, GAMMA - recording.rounds.accepted, recording.rounds.accepted)
    other = calibrate(confident, Recording(Rounds(recording.rounds.logits, upside), recording.prompt), "letters")
    assert other.calibration.temperatures == c.temperatures and np.mean(other.calibration.ece_after) > 0.1


def test_faults_are_named(confident: LM, recording: Recording):
    with pytest.raises(RequestError, match="no drafter"):
        record(lookup_lm(alphabet(), None), ["abc"])
    with pytest.raises(RequestError, match=r"2 faults\n.*samples is 0(.|\n)*batch is -1"):
        record(confident, ["abc"], samples=0, batch=-1)
    with pytest.raises(RequestError, match="no round was recorded"):
        first = int(np.asarray(confident._params["tables"][...])[0].argmax())  # behind an a
        record(confident, ["a"] * 4, SamplingParams(max_tokens=308, stop_token_ids=(first,)), batch=4)
    one = recording.prompt == 0
    with pytest.raises(RequestError, match=r"0 to judge by .*expected at least 200 each"):
        calibrate(confident, Recording(recording.rounds.part(one), recording.prompt[one]), "letters")


# The command.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, confident: LM):
    prompts = tmp_path / "letters.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))

    def go(*arguments: str):
        monkeypatch.setattr("dspark_jax.api.load", lambda *_, **__: confident)
        monkeypatch.setattr(sys, "argv", ["dspark-jax", "calibrate", "--prompts", str(prompts), *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return go


FULL = ("--max-tokens", "300", "--samples", "4", "--batch", "4")


def test_json_and_file(run, tmp_path: Path, confident: LM):
    out, recorded = tmp_path / "sts.json", tmp_path / "rounds.npz"
    code, printed, err = run(*FULL, "--json", "--out", str(out), "--recorded", str(recorded))
    assert code == 0 and err == ""
    found = json.loads(printed)
    for key in ("ece_before", "ece_after", "ece_floor", "auc", "auc_before", "temperatures"):
        assert len(found[key]) == GAMMA
    assert found["rounds"] > 200 and found["prompts"] == 4 and found["samples"] == 4
    for diagrams in found["reliability"].values():
        assert [len(d["predicted"]) for d in diagrams] == [10] * GAMMA
        assert sum(diagrams[0]["count"]) == found["rounds"]
    written = read_calibration(out)
    written.check(GAMMA, head_digest(confident._params))
    assert list(written.temperatures) == found["temperatures"] and written.dataset == "letters.jsonl"
    assert len(read_rounds(recorded)) == found["rounds"] + found["num_samples"]


def test_the_table_says_how_many_rounds_there_were(run, tmp_path):
    code, printed, _ = run(*FULL, "--plot", str(tmp_path / "r.png"))
    assert code == 0 and (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "Fitted on" in printed and "judged on" in printed
    assert [line.split()[0] for line in printed.splitlines()[2:6]] == ["1", "2", "3", "mean"]


@pytest.mark.parametrize(("arguments", "message"), [
    (("--out", "/no/such/folder/sts.json"), "there is no folder '/no/such/folder'"),
    (("--recorded", "/no/such/folder/r.npz"), "--recorded '/no/such/folder/r.npz': there is no folder"),
    (("--plot", "r.doc"), "'r.doc' ends in '.doc'; expected one of"),
    (("--samples", "0"), "samples is 0; expected at least 1"),
    (("--temperature", "-1"), "temperature = -1.0"),
    (("--batch", "0"), "Invalid value for '--batch'"),
])  # fmt: skip
def test_bad_input_ends_in_one_line(run, arguments, message):
    code, printed, err = run(*arguments)
    assert code == 2 and printed == "" and "Traceback" not in err
    assert any(part in err for part in message.split("|")), err


def test_a_separate_drafter_is_calibrated_in_the_chat_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
):
    """DeepSpec's tiny pair: the file belongs to that drafter's confidence head; a drafter without one is refused beforehand."""
    target = Path(shutil.copytree(TARGET, tmp_path / "target"))
    letters().save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "sts.json"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("ab", "abc", "what is", "0123")))
    seen: list[str] = []
    encode = ChatTemplate.encode

    def watched(self, messages):
        seen.append(messages[0]["content"])
        return encode(self, messages)

    monkeypatch.setattr(ChatTemplate, "encode", watched)

    def go(drafter: Path) -> tuple[int, str, str]:
        names = ["--target", str(target), "--drafter", str(drafter), "--chat", "--prompts", str(prompts)]
        words = ["--max-tokens", "60", "--samples", "5", "--batch", "20", "--json", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["dspark-jax", "calibrate", *names, *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    code, printed, err = go(TARGET.parent / "drafter-vanilla")
    assert code == 0, err
    assert seen == ["ab", "abc", "what is", "0123"] and "DSpark" in json.loads(printed)["drafter"]
    pair = open_drafter(open_checkpoint(target, dtype="float32"), TARGET.parent / "drafter-vanilla", dtype="float32")
    read_calibration(out).check(pair.draft.block_size, head_digest(jax.tree.map(np.asarray, pair.params)))
    code, printed, err = go(target)  # a draft model
    assert code == 2 and printed == "" and "has no confidence head" in err
