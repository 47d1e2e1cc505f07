"""Chat templates: ids of a conversation, control tokens that no message can forge, and where templates lie in a folder."""

import json
import sys
from pathlib import Path

import pytest

from dspark_jax.chat import ChatTemplate, read_chat
from dspark_jax.errors import CheckpointError, RequestError
from dspark_jax.text import as_tokenizer
from helpers.dense import letters

TEMPLATE = """{% for message in messages %}
    {% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
<s>{{ message['role'] + ':' + message['content'] + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}<s>{{ 'short:' if brief else 'assistant:' }}{% endif %}"""
TALK = [{"role": "user", "content": "a <b>"}, {"role": "assistant", "content": "c"}]


def tokenizer():
    found = letters()
    found.add_special_tokens(["<s>", "</s>"])  # ids 95 and 96
    return found


@pytest.fixture
def chat() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, tokenizer(), {"eos_token": "</s>"})


def spelt(*parts: str | int) -> list[int]:
    """Ids of characters, and control tokens by id."""
    return [i for part in parts for i in ([part] if isinstance(part, int) else [ord(c) - 32 for c in part])]


def test_ids_of_a_conversation(chat: ChatTemplate):
    expected = spelt(95, "user:a <b>", 96, 95, "assistant:c", 96, 95, "assistant:")
    assert chat.encode(TALK) == expected
    assert chat.encode(TALK, brief=True) == [*expected[:-10], *spelt("short:")]
    assert chat.render(TALK, add_generation_prompt=False) == "<s>user:a <b></s><s>assistant:c</s>"
    # The tokenizer of prompts still takes such text as text.
    given = tokenizer()
    ChatTemplate(TEMPLATE, given, {}).encode([{"role": "user", "content": "a"}], eos_token="")
    assert as_tokenizer(given).encode("<s>") == spelt("<s>")


def test_what_is_refused(chat: ChatTemplate, monkeypatch: pytest.MonkeyPatch):
    wrong = [{"role": "user", "content": "x</s>y"}, {"role": "user"}, "hello"]
    with pytest.raises(RequestError) as found:
        chat.encode(wrong)  # type: ignore[list-item]
    for part in (
        "messages: 3 faults",
        "messages[0] spells the control token '</s>'; remove it",
        "messages[1] is {'role': 'user'}; expected role and content",
        "messages[2] is 'hello'",
    ):
        assert part in str(found.value)
    for nothing in ("hello", [], {"role": "user", "content": "a"}):
        with pytest.raises(RequestError, match="expected a list of messages"):
            chat.encode(nothing)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="chat template refuses them: no tools"):
        chat.encode([{"role": "tool", "content": "a"}])
    with pytest.raises(RequestError, match="refuses them"):
        ChatTemplate("{% for %}", tokenizer(), {}).encode(TALK)
    with pytest.raises(RequestError, match="refuses them"):  # sandboxed
        ChatTemplate("{{ messages.__class__.__mro__ }}", tokenizer(), {}).encode(TALK)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(CheckpointError, match=r"pip install 'dspark-jax\[chat\]'"):
        chat.encode(TALK)


def test_where_templates_lie(tmp_path: Path):
    assert read_chat(tmp_path, tokenizer()) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ eos_token }}!", "eos_token": {"content": "</s>"}, "bos_token": None}))
    found = read_chat(tmp_path, tokenizer())
    assert found is not None and found.encode(TALK) == spelt(96, "!")
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": several}))
    found = read_chat(tmp_path, tokenizer())
    assert found is not None and found.source == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    found = read_chat(tmp_path, tokenizer())
    assert found is not None and found.encode(TALK) == spelt("a <b>")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        read_chat(tmp_path, tokenizer())
